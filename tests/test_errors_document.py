"""docs/errors.md: each of its situations is got into, and gives the error that it says; and no class is left out."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchrec_recstore
from tests.errors import checkpoints, examples, exports, services, sharding, tables
from tests.errors.situations import SITUATIONS
from tests.packages import PACKAGES, sources
from tests.recstore_server import RecStoreServer
from tests.secrets import write_secret

assert all((checkpoints, examples, exports, services, sharding, tables))  # importing them registers the situations

ROOT = Path(__file__).parents[1]
DOCUMENT = (ROOT / "docs" / "errors.md").read_text()
CLASSES = {
    title.split()[0].strip("`"): text
    for title, text in re.findall(r"^## (`\w+`.*?)\n(.*?)(?=^## |\Z)", DOCUMENT, flags=re.DOTALL | re.MULTILINE)
}
ENTRIES = {
    title: (name, text)
    for name, section in CLASSES.items()
    for title, text in re.findall(r"^### (.*?)\n(.*?)(?=^### |\Z)", section, flags=re.DOTALL | re.MULTILINE)
}
# Ends of iterators and of commands, no errors.
CONTROL_FLOW = {"StopIteration", "SystemExit", "Exit"}
# The client's connection turns them into errors of the page, as it does with the errors of gRPC.
OF_SHARED_MEMORY = {"CallError", "DoesNotFitError", "ServedError"}
# Nothing raises the common base of ColdStoreError and ServiceError itself.
BASES = {"StorageError"}


@pytest.fixture(scope="module")
def error_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecStoreServer]:
    server = RecStoreServer(tmp_path_factory.mktemp("server"))
    yield server
    server.kill()


@pytest.fixture(scope="module")
def second_error_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecStoreServer]:
    server = RecStoreServer(tmp_path_factory.mktemp("second"))
    yield server
    server.kill()


@pytest.fixture(scope="module")
def guarded_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecStoreServer]:
    directory = tmp_path_factory.mktemp("guarded")
    write_secret(directory / "token", "correct-horse-battery")
    server = RecStoreServer(directory / "data", "--token-file", str(directory / "token"))
    yield server
    server.kill()


def on_one_line(text: str) -> str:
    return " ".join(text.split())


def test_every_entry_has_a_situation() -> None:
    assert ENTRIES.keys() == SITUATIONS.keys()


@pytest.mark.parametrize("title", SITUATIONS)
def test_situations(title: str, request: pytest.FixtureRequest) -> None:
    name, text = ENTRIES[title]
    situation = SITUATIONS[title]
    fixtures = {each: request.getfixturevalue(each) for each in inspect.signature(situation).parameters}
    with pytest.raises(Exception) as raised:  # noqa: PT011  (its class and its message are compared below)
        situation(**fixtures)
    assert next(each.__name__ for each in type(raised.value).__mro__ if each.__name__ in CLASSES) == name
    (message,) = re.findall(r"```text\n(.*?)```", text, flags=re.DOTALL)
    pattern = ".*".join(re.escape(part) for part in on_one_line(message).split("..."))
    assert re.fullmatch(pattern, on_one_line(str(raised.value))), str(raised.value)
    assert re.search(r"^Cause: .+\. Fix: .+\.$", on_one_line(text.partition("```text")[2].partition("```")[2]).strip())


def own_classes(kind: type[BaseException]) -> set[str]:
    found = set()
    for module in sources():
        for name, value in vars(importlib.import_module(module)).items():
            if inspect.isclass(value) and issubclass(value, kind) and value.__module__ == module:
                found.add(name)
    return found


def test_every_class_of_ours_is_listed_and_public() -> None:
    warnings = own_classes(Warning)
    assert warnings == {"RecStoreWarning"} == warnings & set(torchrec_recstore.__all__)
    own = own_classes(BaseException) - warnings - OF_SHARED_MEMORY - BASES
    assert own == {name for name in CLASSES if name not in vars(builtins)} - {"PlannerError", "DataError"}
    assert own - {"ServerStoppingError", "CallRefusedError"} == own & set(torchrec_recstore.__all__)


def returned_classes(tree: ast.AST) -> dict[str, str]:
    """By name of a function what its annotation says that it returns."""
    return {
        node.name: ast.unparse(node.returns)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.returns is not None
    }


def raised_classes() -> Iterator[tuple[str, str]]:
    """Names of the classes that the package raises, and where. What a function returns is raised as that."""
    trees = {file: ast.parse(file.read_text()) for file in sources().values()}
    everywhere = {name: kind for tree in trees.values() for name, kind in returned_classes(tree).items()}
    for file, tree in trees.items():
        returned = everywhere | returned_classes(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                name = ast.unparse(node.exc.func).rpartition(".")[2]
                yield returned.get(name, name), f"{file}:{node.lineno}"
            elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Name) and node.exc.id in vars(builtins):
                yield node.exc.id, f"{file}:{node.lineno}"


def is_listed(name: str) -> bool:
    """Whether the page has the class, or one of the system's errors has it as its own: ``IsADirectoryError``."""
    system = getattr(builtins, name, None)
    return name in CLASSES or (inspect.isclass(system) and issubclass(system, OSError))


def test_every_raise_is_of_a_class_that_is_listed() -> None:
    raised = list(raised_classes())
    assert len(raised) > 200
    passed_on = (
        CONTROL_FLOW | OF_SHARED_MEMORY | {"Exception"}
    )  # what a function returns that makes errors of several classes
    assert [(name, where) for name, where in raised if name not in passed_on and not is_listed(name)] == []


def test_what_the_core_throws_is_known() -> None:
    thrown = {
        name
        for folder in PACKAGES.values()
        for file in (folder / "csrc").rglob("*.*")
        for name in re.findall(r"throw ([\w:]+)\(", file.read_text())
    }
    # The first two become ValueError and MemoryError, as bad_alloc does; a logic_error is a defect of ours.
    assert thrown == {"InvalidArgument", "OutOfMemory", "std::bad_alloc", "std::logic_error"}
