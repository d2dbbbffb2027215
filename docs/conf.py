"""The Sphinx configuration: ``sphinx-build -W -b html docs build/docs`` builds the
documentation without a network.
"""

import inspect
from typing import Any

from sphinx.util.nodes import make_refnode

import torchrec_recstore

project = "torchrec_recstore"
copyright = "the authors of torchrec_recstore"
version = release = torchrec_recstore.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
nb_execution_mode = "off"  # tests/project/docs/test_notebook.py runs the notebook
html_theme = "furo"
html_title = f"RecStore for TorchRec {release}"
html_show_sourcelink = False

# Headings are anchors, as on the repository's web page, so that links to headings work
# in both.
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Source", "notes_style")]

# A reference without a target is a warning. Names of other packages are excluded,
# because a build has no network.
nitpicky = True
nitpick_ignore_regex = [
    (
        r"py:.*",
        r"(torch|torchrec|fbgemm_gpu|collections|contextlib|os|typing|pathlib)\..*",
    ),
    (r"py:.*", r"ParameterSharding|PlannerError|SafetensorError|Tensor"),
    # Signatures contain these types, which only the package itself makes.
    (
        r"py:.*",
        r"torchrec_recstore\w*\..*\.(_\w+|ClientTable|ColdSnapshot|ColdTier|CopyTarget|DevicePass|LearningRate|ModelTable|ModuleState|RecStoreKernel|"
        r"RemotePooledGroup|RemoteSequenceGroup|RemoteTable|RowRead|RowService|RowsOnDevice|RowUpdate|ServedTable|TableModule|TableSpec)",
    ),
    (r"py:.*", r"torchrec_recstore\.ops\..*"),
]


def _leave_out_torch(
    app: Any, what: str, name: str, obj: Any, skip: bool, options: Any
) -> bool | None:
    """Leaves out methods without their own docstring: inherited methods of torch and
    TorchRec, and their overrides.
    """
    return (
        True
        if what in ("class", "exception") and inspect.isroutine(obj) and not obj.__doc__
        else None
    )


def _no_types_in_prose(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Adds a first line to attributes, because Napoleon reads the text before a colon
    in the first line as a type.
    """
    if what in ("attribute", "property", "data"):
        lines[:0] = ["..", ""]  # a comment


def _find_by_last_names(app: Any, env: Any, node: Any, content: Any) -> Any:
    """Finds the target of a short name in a docstring: ``Table.lookup`` is
    ``torchrec_recstore.Table.lookup``.
    """
    target = node.get("reftarget", "")
    for prefix in ("torchrec_recstore.", "store.", "optim.", "parts.", "state."):
        target = target.removeprefix(prefix)
    domain = env.domains["py"]
    found = {
        (o.docname, o.node_id)
        for name, o in domain.objects.items()
        if not o.aliased and _ends(name, target)
    }
    if node.get("refdomain") != "py" or len(found) != 1:
        return None
    ((page, anchor),) = found
    return make_refnode(app.builder, node["refdoc"], page, anchor, content, target)


def _ends(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")


def setup(app: Any) -> None:
    """Connects the functions of this file to the events of Sphinx, which calls this
    function.
    """
    app.connect("autodoc-skip-member", _leave_out_torch)
    app.connect("autodoc-process-docstring", _no_types_in_prose, priority=400)
    app.connect("missing-reference", _find_by_last_names)
