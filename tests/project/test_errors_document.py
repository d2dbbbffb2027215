"""The situations of tests/errors raise their errors, docs/errors.md explains them, and
no class is left out.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
from collections.abc import Iterator

import pytest

import torchrec_recstore
from tests.errors.__main__ import DOCUMENT, explanation, with_entries
from tests.errors.situations import SITUATIONS
from tests.packages import PACKAGES, sources
from tests.recstore_server import RecStoreServer
from tests.secrets import write_secret

SLOW = {"copied_by_hooks", "fewer_epochs", "one_empty", "one_killed", "one_rolled_back"}
"""The situations that start servers again, or other processes."""
CLASSES = {situation.kind for situation in SITUATIONS.values()}
# Ends of iterators and of commands, no errors. The command line prints BadParameter.
CONTROL_FLOW = {"StopIteration", "SystemExit", "Exit", "typer.BadParameter"}
# The client's connection turns them into errors of the situations, as it does with the
# errors of gRPC. Errors of connections for rows, which their callers catch.
OF_CONNECTIONS = {"CallError", "DoesNotFitError", "ServedError", "RefusedError"}
# Only its subclasses are raised, ColdStoreError and ServiceError.
BASES = {"StorageError"}


@pytest.fixture(scope="module")
def error_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecStoreServer]:
    server = RecStoreServer(tmp_path_factory.mktemp("server"))
    yield server
    server.kill()


@pytest.fixture(scope="module")
def second_error_server(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[RecStoreServer]:
    server = RecStoreServer(tmp_path_factory.mktemp("second"))
    yield server
    server.kill()


@pytest.fixture(scope="module")
def guarded_server(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[RecStoreServer]:
    directory = tmp_path_factory.mktemp("guarded")
    write_secret(directory / "token", "correct-horse-battery")
    server = RecStoreServer(
        directory / "data", "--token-file", str(directory / "token")
    )
    yield server
    server.kill()


def on_one_line(text: str) -> str:
    return " ".join(text.split())


def test_the_page_has_the_present_entries() -> None:
    page = DOCUMENT.read_text()
    assert page == with_entries(page), "python -m tests.errors writes the page"
    assert len(page.splitlines()) < 600
    explained = [
        explanation(each) for each in SITUATIONS.values() if each.function.__doc__
    ]
    assert len({title for title, _ in explained}) == len(explained)
    for title, text in explained:
        assert re.search(r"^Cause: .+\. Fix: .+\.$", text), title


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in SITUATIONS
    ],
)
def test_situations(name: str, request: pytest.FixtureRequest) -> None:
    situation = SITUATIONS[name]
    fixtures = {
        each: request.getfixturevalue(each)
        for each in inspect.signature(situation.function).parameters
    }
    with pytest.raises(Exception) as raised:  # noqa: PT011  (its class and its message are compared below)
        situation.function(**fixtures)
    assert (
        next(
            each.__name__
            for each in type(raised.value).__mro__
            if each.__name__ in CLASSES
        )
        == situation.kind
    )
    pattern = ".*".join(re.escape(part) for part in situation.message.split("..."))
    assert re.fullmatch(pattern, on_one_line(str(raised.value))), str(raised.value)


def own_classes(kind: type[BaseException]) -> set[str]:
    found = set()
    for module in sources():
        for name, value in vars(importlib.import_module(module)).items():
            if (
                inspect.isclass(value)
                and issubclass(value, kind)
                and value.__module__ == module
            ):
                found.add(name)
    return found


def test_every_class_of_ours_is_known_and_public() -> None:
    warnings = own_classes(Warning)
    assert warnings == {"RecStoreWarning"} == warnings & set(torchrec_recstore.__all__)
    own = own_classes(BaseException) - warnings - OF_CONNECTIONS - BASES
    assert own == CLASSES - vars(builtins).keys() - {"PlannerError", "DataError"}
    assert own - {"ServerStoppingError", "CallRefusedError"} == own & set(
        torchrec_recstore.__all__
    )


def returned_classes(tree: ast.AST) -> dict[str, str]:
    """By name of a function what its annotation says that it returns."""
    return {
        node.name: ast.unparse(node.returns)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.returns is not None
    }


def raised_classes() -> Iterator[tuple[str, str]]:
    """Names of the classes that the package raises, and where.

    What a function returns is raised as that.
    """
    trees = {file: ast.parse(file.read_text()) for file in sources().values()}
    by_file = {file: returned_classes(tree) for file, tree in trees.items()}
    everywhere = {
        name: kind for returned in by_file.values() for name, kind in returned.items()
    }
    for file, tree in trees.items():
        returned = everywhere | by_file[file]
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                name = ast.unparse(node.exc.func).rpartition(".")[2]
                yield returned.get(name, name), f"{file}:{node.lineno}"
            elif (
                isinstance(node, ast.Raise)
                and isinstance(node.exc, ast.Name)
                and node.exc.id in vars(builtins)
            ):
                yield node.exc.id, f"{file}:{node.lineno}"


def is_known(name: str) -> bool:
    """Whether a situation has the class, or it is a narrower one of a situation:
    ``IsADirectoryError``.
    """
    system = getattr(builtins, name, None)
    return name in CLASSES or (
        inspect.isclass(system) and issubclass(system, (OSError, ImportError))
    )


def test_every_raise_is_of_a_class_of_a_situation() -> None:
    raised = list(raised_classes())
    assert len(raised) > 200
    # What a function returns that makes errors of several classes, and the class whose
    # name a server has sent.
    passed_on = CONTROL_FLOW | OF_CONNECTIONS | {"Exception", "REMOTE_ERRORS[error]"}
    assert [
        (name, where)
        for name, where in raised
        if name not in passed_on and not is_known(name)
    ] == []


def test_what_the_core_throws_is_known() -> None:
    thrown = {
        name
        for folder in PACKAGES.values()
        for file in (folder / "csrc").rglob("*.*")
        for name in re.findall(r"throw ([\w:]+)\(", file.read_text())
    }
    # The first two become ValueError and MemoryError, as bad_alloc does; a logic_error
    # is a defect of ours. CallFailed has the class that it becomes, StorageError
    # becomes ColdStoreError, and the others, which the start of a server meets, become
    # OSError. The reader of rows of a served model turns its own two into a
    # runtime_error, which is a RuntimeError there.
    of_servers = {"CallFailed", "std::runtime_error", "std::system_error"}
    own = {"Passing", "Refused"}
    assert thrown == {
        "InvalidArgument",
        "OutOfMemory",
        "std::bad_alloc",
        "std::logic_error",
        "StorageError",
        *of_servers,
        *own,
    }
