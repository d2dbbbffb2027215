"""Imports point one way, at run time and for types."""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.packages import PACKAGES, ROOT, sources

MODULES = sources()
# A module imports from its own layer and from those before it: docs/inside.md.
LAYERS = {
    "torchrec_recstore": (
        """display plugins torch_seams utils file_names ownership run_directories network threads quiet_warnings
        installing triples
        | optim option_flags row_types options | ops fake_ops table_fields encoding | store
        | kernels table_parameter quantization table_configs torchrec_seams
        | modules sharders | planner checkpoint | doctor | commands cli inference"""
    ),
    "torchrec_recstore_service": (
        "wire | tables | client server | recstore_compat | commands"
    ),
    "torchrec_recstore_serving": "export | retrieval | publish | predict",
}
LAYER_OF = {
    f"{package}.{room}": number
    for package, layers in LAYERS.items()
    for number, layer in enumerate(layers.split("|"))
    for room in layer.split()
}
BELOW = {  # the packages that a package may import
    "torchrec_recstore": set[str](),
    "torchrec_recstore_service": {"torchrec_recstore"},
    "torchrec_recstore_serving": {"torchrec_recstore", "torchrec_recstore_service"},
}
# They give users the names of all distributions under one name; nothing of ours imports
# from them.
FACADES = {"torchrec_recstore", "torchrec_recstore.inference"}


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def package_of(module: str) -> str:
    return module.partition(".")[0]


def layer_of(module: str) -> int:
    return (
        LAYER_OF[".".join(module.split(".")[:2])] if package_of(module) in LAYERS else 0
    )


def imports(module: str) -> set[str]:
    """The modules of the packages that ``module`` imports anywhere, in functions too."""
    found = set()
    for node in ast.walk(tree_of(module)):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and package_of(node.module) in PACKAGES
        ):
            whole = {f"{node.module}.{alias.name}" for alias in node.names} & set(
                MODULES
            )
            if set(PACKAGES) & {node.module} and not whole:
                names = {alias.name for alias in node.names}
                assert (
                    all(
                        "_pb2" in name or name in ("_C", "__version__")
                        for name in names
                    )
                    or module in FACADES
                ), f"{module} imports {names} from {node.module}"
            found |= whole or {node.module}
            private = [each.name for each in node.names if each.name.startswith("_")]
            assert set(private) <= {"_C", "__version__"}, f"{module} imports {private}"
        elif isinstance(node, ast.Import):
            assert not [
                each.name for each in node.names if package_of(each.name) in PACKAGES
            ], module
    return (found - set(PACKAGES) - {module}) & set(MODULES)


@cache
def graph() -> dict[str, set[str]]:
    return {module: imports(module) for module in MODULES}


# The rooms that stand beside each other: neither imports from the other.
APART = {"torchrec_recstore_service.client", "torchrec_recstore_service.server"}


def room_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def test_imports_point_one_way() -> None:
    within = {
        module: {other for other in found if package_of(other) == package_of(module)}
        for module, found in graph().items()
        if module not in PACKAGES
    }
    for module, found in within.items():
        for other in found:
            here, there = (layer_of(each) for each in (module, other))
            assert there <= here, f"{module} imports {other}"
            rooms = {room_of(module), room_of(other)}
            assert rooms != APART, f"{module} imports {other}"
    list(TopologicalSorter(within).static_order())  # raises where imports form a circle


@pytest.mark.parametrize("package", PACKAGES)
def test_a_distribution_imports_those_below_it(package: str) -> None:
    for module, found in graph().items():
        if package_of(module) == package and module not in FACADES:
            assert {package_of(other) for other in found} <= BELOW[package] | {
                package
            }, module
            # Not by its name in a string either: what is above is found by its entry
            # points (plugins.py).
            above = set(PACKAGES) - BELOW[package] - {package}
            strings = [
                node.value
                for node in ast.walk(tree_of(module))
                if isinstance(node, ast.Constant)
            ]
            named = [
                text
                for text in strings
                if isinstance(text, str) and text.partition(".")[0] in above
            ]
            # A warning points beyond the lines of all three.
            assert set(named) <= (
                set(PACKAGES) if module == "torchrec_recstore.utils" else set()
            ), module


def test_each_module_says_where_its_test_is() -> None:
    by_name = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    for module, path in MODULES.items():
        if path.name == "__init__.py" or f"test_{path.name}" in by_name:
            continue
        docstring = ast.get_docstring(tree_of(module)) or ""
        line = re.search(r"^Tests: (.*?)\.$", docstring, re.MULTILINE | re.DOTALL)
        assert line is not None, (
            f"{module}: no test_{path.name}, and no line 'Tests: tests/....py.' in its"
            " docstring"
        )
        folder = ROOT
        # a second file may stand without the folder of the first
        for file in re.split(r",\s|\sand\s", line[1]):
            folder = (ROOT / file).parent if "/" in file else folder
            assert (folder / Path(file).name).is_file(), f"{module}: {file}"


def test_the_slots_of_ids_are_those_of_the_cpp_client() -> None:
    """Its headers stand alone, so the core has a copy of the one file that both need."""
    ours = PACKAGES["torchrec_recstore"] / "csrc" / "base" / "slots.h"
    assert (
        ours.read_text()
        == (
            PACKAGES["torchrec_recstore_service"] / "include" / "recstore" / "slots.h"
        ).read_text()
    )


def native_sources() -> list[Path]:
    """Returns the files of C++ of all packages."""
    sources: list[Path] = []
    for folder in PACKAGES.values():
        sources += folder.glob("csrc/**/*.*")
    return sorted(sources)


def test_the_compiler_keeps_functions_that_prefetch() -> None:
    """GCC drops calls of them that it does not inline (csrc/base/prefetch.h)."""
    header = re.compile(r"^.*\b(prefetch\w*)(?: = \[.*\])?\([^;{}]*\{", re.MULTILINE)
    checked = 0
    for path in native_sources():
        text = re.sub("//.*", "", path.read_text())
        for match in header.finditer(text):
            body = text[match.end() : text.index("}", match.end())]
            is_call = match.group().lstrip().startswith(("if ", "for "))
            if is_call or not re.search(r"__builtin_prefetch|\.prefetch\w*\(", body):
                continue
            is_called = len(re.findall(rf"\b{match.group(1)}\(", text)) > 1
            if path.suffix == ".cpp" and not is_called:
                continue  # other files do not see what it does
            checked += 1
            assert "RECSTORE_PREFETCHES" in match.group(), (path.name, match.group())
    assert checked >= 10
