"""Imports point one way, at run time and for types, and a class name has one meaning."""

from __future__ import annotations

import ast
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "torchrec_recstore"
MODULES = {
    path.relative_to(PACKAGE.parent).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
    if "_pb2" not in path.name
}
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}
# A module imports from its own layer and from those before it. DESIGN.md, section 2.
LAYERS = """display utils run_directories network threads triples late_updates
    | optim server_options options option_flags row_types | ops fake_ops encoding | rpc | store
    | kernels table_parameter quantization table_configs torchrec_seams
    | modules sharders | planner checkpoint | service inference | doctor | commands cli"""
LAYER_OF = {room: number for number, layer in enumerate(LAYERS.split("|")) for room in layer.split()}


def imports(module: str) -> set[str]:
    """The modules of the package that ``module`` imports anywhere, in functions too."""
    found = set()
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(PACKAGE.name):
            whole = {f"{node.module}.{alias.name}" for alias in node.names} & set(MODULES)
            found |= whole or {node.module}
            assert not [a.name for a in node.names if a.name.startswith("_") and a.name not in ("_C", "__version__")], (
                module
            )
    return (found - {PACKAGE.name, module}) & set(MODULES)


def test_imports_point_one_way() -> None:
    graph = {module: imports(module) for module in MODULES if module != PACKAGE.name}
    for module, found in graph.items():
        for other in found:
            here, there = module.split(".")[1], other.split(".")[1]
            assert LAYER_OF[there] <= LAYER_OF[here], f"{module} imports {other}"
    list(TopologicalSorter(graph).static_order())  # raises where imports form a circle


def test_no_two_classes_share_a_name() -> None:
    classes = Counter(node.name for tree in TREES.values() for node in tree.body if isinstance(node, ast.ClassDef))
    assert [name for name, count in classes.items() if count > 1 and not name.startswith("_")] == []
