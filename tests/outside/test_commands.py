"""Hostile names on the command line never lead a command out of the directories that it
is given.

A name is each argument whose placeholder in the help has the word NAME. A new one needs
a command in ``COMMANDS``, or the first test fails.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tests.formats import fixed
from tests.outside.names import SEED, HostileNames
from tests.outside.sandbox import MARKER, Sandbox
from tests.recstore_server import RecStoreServer
from torchrec_recstore.cli import app
from torchrec_recstore.options import SSDStore
from torchrec_recstore.store.ssd_store import SSDColdStore
from torchrec_recstore_service.server.pair import PairOptions
from torchrec_recstore_serving.predict.named_models import sources_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

_NAMES = 12  # hostile names for each command
COMMANDS: dict[tuple[str, str], list[str]] = {
    ("export", "tables"): [
        "export",
        "{data}/full",
        "{data}/out.pt",
        "--overwrite",
        "--table",
        "{name}",
    ],
    ("top", "table"): ["top", "{data}/full", "--table", "{name}"],
    ("neighbours", "table"): [
        "neighbours",
        "{data}/full",
        "--table",
        "{name}",
        "--",
        "1",
    ],
    ("bench", "names"): ["bench", "--quick", "--", "{name}"],
    ("servers restore", "name"): [
        "servers",
        "restore",
        "--timeout",
        "5",
        "--",
        "{name}",
        "{server}",
    ],
}
"""The commands with a name, by the command and its argument."""

ELSEWHERE = {
    ("serve", "replicate"): "test_the_name_of_a_pair_is_no_path",
    ("follow", "sources"): "test_the_name_of_a_model_is_no_path",
    ("follow", "jagged"): "test_the_name_of_a_model_is_no_path",
}
"""The arguments of commands that do not end, and the tests of their names."""


@pytest.fixture
def sandbox(sandbox: Sandbox) -> Sandbox:
    shutil.copytree(fixed.CHECKPOINTS / "full", sandbox.data / "full")
    return sandbox


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecStoreServer]:
    server = RecStoreServer(tmp_path_factory.mktemp("server") / "data")
    yield server
    server.kill()


def _names(sandbox: Sandbox) -> Iterator[str]:
    """Yields hostile names that a command line can have: those without NUL."""
    names = HostileNames(random.Random(SEED), sandbox.root, ("full", "monday"))
    while True:
        for name in (names.escape(), names.unicode()):
            if "\0" not in name:
                yield name


def _arguments_with_names(
    command: Any, before: tuple[str, ...] = ()
) -> Iterator[tuple[str, str]]:
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from _arguments_with_names(inner, (*before, name))
        return
    for parameter in command.params:
        if "NAME" in (parameter.metavar or ""):
            yield " ".join(before), parameter.name


def test_each_name_of_the_command_line_is_tried() -> None:
    arguments = set(_arguments_with_names(typer.main.get_command(app)))
    assert arguments == COMMANDS.keys() | ELSEWHERE.keys()
    assert set(ELSEWHERE.values()) <= globals().keys()


@pytest.mark.parametrize("command", COMMANDS)
def test_no_name_of_a_command_leads_out(
    sandbox: Sandbox, server: RecStoreServer, command: tuple[str, str]
) -> None:
    print(f"RECSTORE_TEST_SEED={SEED}")
    names = _names(sandbox)
    for _ in range(_NAMES):
        name = next(names)
        values = {"data": str(sandbox.data), "server": server.address, "name": name}
        arguments = [argument.format(**values) for argument in COMMANDS[command]]
        with sandbox.watched():
            result = CliRunner().invoke(app, arguments)
        assert MARKER.decode() not in result.output
        assert result.exit_code == 2, (arguments, result.output)
        refused = result.exception is None or isinstance(result.exception, SystemExit)
        assert refused, (arguments, result.exception)


def test_the_name_of_a_pair_is_no_path(sandbox: Sandbox) -> None:
    """The name is a part of two keys in Redis, and a value in pair.json."""
    names = _names(sandbox)
    with sandbox.watched():
        for _ in range(200):
            with suppress(ValueError):
                options = PairOptions(
                    next(names), "redis://127.0.0.1:1", "127.0.0.1:7700"
                )
                assert not {"{", "}", "\n"} & set(options.name)


def test_the_name_of_a_model_is_no_path(sandbox: Sandbox) -> None:
    names = _names(sandbox)
    with sandbox.watched():
        for _ in range(200):
            name = next(names)
            sources = sources_of([f"{name}={sandbox.data}"])
            assert not any("/" in model for model in sources)


def test_names_of_tables_and_of_shared_stores_are_no_paths(sandbox: Sandbox) -> None:
    names = _names(sandbox)
    with sandbox.watched():
        for _ in range(200):
            table = next(names)
            shared = next(names)
            for options in (
                SSDStore(str(sandbox.data)),
                SSDStore(str(sandbox.data), shared=shared or "x"),
            ):
                SSDColdStore(options, name=table, row_bytes=64).close()
