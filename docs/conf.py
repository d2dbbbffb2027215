"""How the documentation is built: ``sphinx-build -W -b html docs build/docs``. Needs no network."""

import inspect
from typing import Any

from sphinx.util.nodes import make_refnode

import torchrec_recstore

project = "torchrec_recstore"
copyright = "the authors of torchrec_recstore"
version = release = torchrec_recstore.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"RecStore for TorchRec {release}"
html_show_sourcelink = False

# Headings are anchors, as on the repository's web page, so that links to them work in both.
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Source", "notes_style")]

# A reference that leads nowhere is a warning, but for what other packages document, where a build cannot look.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|torchrec|fbgemm_gpu|collections|typing|pathlib)\..*"),
    (r"py:.*", r"ParameterSharding|PlannerError|SafetensorError"),
    # In signatures: what the package alone makes and passes on.
    (
        r"py:.*",
        r"torchrec_recstore\..*\.(_\w+|ColdSnapshot|ColdTier|LearningRate|ModuleState|ServedTable|TableModule|TableSpec)",
    ),
    (r"py:.*", r"torchrec_recstore\.ops\..*"),
]


def _leave_out_torch(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Members that a class has from torch's or TorchRec's are those of theirs; overrides without a docstring too."""
    return True if what in ("class", "exception") and inspect.isroutine(obj) and not obj.__doc__ else None


def _no_types_in_prose(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Napoleon takes what stands before a colon in an attribute's first line for its type: give it another line."""
    if what in ("attribute", "property", "data"):
        lines[:0] = ["..", ""]  # a comment


def _find_by_last_names(app: Any, env: Any, node: Any, content: Any) -> Any:
    """A docstring names things as its module does: ``Table.lookup`` is that of ``torchrec_recstore.Table``."""
    target = node.get("reftarget", "").removeprefix("torchrec_recstore.").removeprefix("store.").removeprefix("optim.")
    domain = env.domains["py"]
    found = {(o.docname, o.node_id) for name, o in domain.objects.items() if not o.aliased and _ends(name, target)}
    if node.get("refdomain") != "py" or len(found) != 1:
        return None
    ((page, anchor),) = found
    return make_refnode(app.builder, node["refdoc"], page, anchor, content, target)


def _ends(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")


def setup(app: Any) -> None:
    """Called by sphinx."""
    app.connect("autodoc-skip-member", _leave_out_torch)
    app.connect("autodoc-process-docstring", _no_types_in_prose, priority=400)
    app.connect("missing-reference", _find_by_last_names)
