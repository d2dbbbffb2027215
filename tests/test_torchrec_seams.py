"""Every use of a private name of TorchRec is in the folder
``torchrec_recstore/torchrec_seams``, and every one of ``torch._C`` in a file beside it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
import torchrec

from .packages import PACKAGES, sources

TORCHREC = Path(torchrec.__file__).parent
SEAMS = PACKAGES["torchrec_recstore"] / "torchrec_seams"


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined(tree: ast.AST) -> set[str]:
    """The private names that code defines: functions, classes, variables, attributes
    that it sets.
    """
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(
            node.ctx, ast.Store
        ):
            names.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return {name for name in names if private(name)}


@cache
def names_of_torchrec() -> frozenset[str]:
    """The private names that TorchRec defines anywhere but in its tests, and that
    torch's modules do not have.
    """
    files = [
        path
        for path in TORCHREC.rglob("*.py")
        if not {"tests", "test_utils"} & set(path.parts)
    ]
    return (
        frozenset().union(*(defined(ast.parse(path.read_text())) for path in files))
        - vars(torch.nn.Module()).keys()
    )


def inherited(cls: type) -> set[str]:
    """The private names of the classes of TorchRec's that a class derives from."""
    bases = [
        base for base in cls.__mro__ if base.__module__.partition(".")[0] == "torchrec"
    ]
    return set().union(
        *(
            defined(ast.parse(textwrap.dedent(inspect.getsource(base))))
            for base in bases
        )
    )


def uses(path: Path, name: str) -> Iterator[str]:
    """The private names of TorchRec that a module uses, each with its line."""
    tree = ast.parse(path.read_text())
    imports = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
    ]
    of_torchrec = [
        node for node in imports if (node.module or "").partition(".")[0] == "torchrec"
    ]
    yield from (
        f"{node.lineno}: {each.name}"
        for node in of_torchrec
        for each in node.names
        if private(each.name)
    )
    theirs_alone = names_of_torchrec() - defined(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if (
                node.attr in theirs_alone
                and of_torchrec
                and ast.unparse(node.value) not in ("self", "cls", "super()")
            ):
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "getattr",
            "hasattr",
            "setattr",
        ):
            constant = (
                node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            )
            if constant in theirs_alone:
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.ClassDef) and node in tree.body:
            theirs = inherited(getattr(importlib.import_module(name), node.name))
            for part in ast.walk(node) if theirs else ():
                used = (
                    part.name
                    if isinstance(part, ast.FunctionDef)
                    else getattr(part, "attr", "")
                )
                if used in theirs:
                    yield f"{part.lineno}: {node.name} has or uses {used}"  # type: ignore[attr-defined]


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
            for node in ast.walk(ast.parse(path.read_text()))
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
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else None
            if name in ("_getframe", "currentframe", "f_back", "f_locals"):
                readers.add(module)
    # The module finds the line of the user's program to which a warning points.
    assert readers == {"torchrec_recstore.utils"}
