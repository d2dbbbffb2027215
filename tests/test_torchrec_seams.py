"""Every use of a private name of TorchRec is in the folder
``torchrec_recstore/torchrec_seams``, and every one of ``torch._C`` in a file beside it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import torch
import torchrec

from .packages import PACKAGES, sources

TORCHREC = Path(torchrec.__file__).parent
SEAMS = PACKAGES["torchrec_recstore"] / "torchrec_seams"


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined(nodes: Iterable[ast.AST]) -> set[str]:
    """The private names that code defines: functions, classes, variables, attributes
    that it sets.
    """
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(
            node.ctx, ast.Store
        ):
            names.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return {name for name in names if private(name)}


@cache
def defined_in(code: str) -> set[str]:
    return defined(ast.walk(ast.parse(code)))


@cache
def code_with_names() -> dict[str, set[str]]:
    """TorchRec's files but for its tests, each with the private names in it."""
    codes = [
        path.read_text()
        for path in TORCHREC.rglob("*.py")
        if not {"tests", "test_utils"} & set(path.parts)
    ]
    return {code: set(re.findall(r"\b_\w+", code)) for code in codes}


@cache
def is_of_torchrec(name: str) -> bool:
    """Whether TorchRec defines a private name anywhere but in its tests, and torch's
    modules do not have it.
    """
    if not private(name) or name in vars(torch.nn.Module()):
        return False
    return any(
        name in names and name in defined_in(code)
        for code, names in code_with_names().items()
    )


@cache
def defined_by(cls: type) -> set[str]:
    return defined_in(textwrap.dedent(inspect.getsource(cls)))


def inherited(cls: type) -> set[str]:
    """The private names of the classes of TorchRec's that a class derives from."""
    bases = [
        base for base in cls.__mro__ if base.__module__.partition(".")[0] == "torchrec"
    ]
    return set().union(*map(defined_by, bases))


def imported(nodes: list[ast.AST]) -> list[ast.ImportFrom]:
    """The imports from TorchRec."""
    return [
        node
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").partition(".")[0] == "torchrec"
    ]


def of_objects(nodes: list[ast.AST]) -> Iterator[str]:
    """The private names that code reads of objects, each with its line."""
    imports = bool(imported(nodes))
    own = defined(nodes)
    for node in nodes:
        if isinstance(node, ast.Attribute):
            if (
                imports
                and node.attr not in own
                and is_of_torchrec(node.attr)
                and ast.unparse(node.value) not in ("self", "cls", "super()")
            ):
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "getattr",
            "hasattr",
            "setattr",
        ):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            if name not in own and is_of_torchrec(str(name)):
                yield f"{node.lineno}: {ast.unparse(node)}"


def of_base_classes(tree: ast.Module, module: str) -> Iterator[str]:
    """The private names of their base classes that classes have or use."""
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        theirs = inherited(getattr(importlib.import_module(module), node.name))
        for part in ast.walk(node) if theirs else ():
            used = (
                part.name
                if isinstance(part, ast.FunctionDef)
                else getattr(part, "attr", "")
            )
            if used in theirs:
                yield f"{part.lineno}: {node.name} has or uses {used}"  # type: ignore[attr-defined]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


def uses(path: Path, module: str) -> Iterator[str]:
    """The private names of TorchRec that a module uses, each with its line."""
    nodes = nodes_of(path)
    for node in imported(nodes):
        for alias in node.names:
            if private(alias.name):
                yield f"{node.lineno}: {alias.name}"
    yield from of_objects(nodes)
    yield from of_base_classes(tree_of(path), module)


def test_private_names_of_torchrec_are_in_one_folder() -> None:
    found = {
        name: sorted(set(uses(path, name)))
        for name, path in sources().items()
        if path.parent != SEAMS
    }
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_private_names_of_torch_stand_in_one_file() -> None:
    public = {"torch._C", "torch._C.DisableTorchFunctionSubclass"}
    for module, path in sources().items():
        if not module.startswith("torchrec_recstore."):
            continue
        names = {
            ast.unparse(node)
            for node in nodes_of(path)
            if isinstance(node, ast.Attribute)
        }
        private_names = {name for name in names if name.startswith("torch._C")}
        if module == "torchrec_recstore.torch_seams":
            assert len(private_names - public) >= 3
        else:
            assert private_names <= public, module


def test_only_warnings_read_stack_frames() -> None:
    readers = set()
    for module, path in sources().items():
        for node in nodes_of(path):
            name = node.attr if isinstance(node, ast.Attribute) else None
            if name in ("_getframe", "currentframe", "f_back", "f_locals"):
                readers.add(module)
    # The module finds the line of the user's program to which a warning points.
    assert readers == {"torchrec_recstore.utils"}
