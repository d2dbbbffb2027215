"""Tests of the errors of commands, which are one line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer

from torchrec_recstore import RecStoreClient, RocksDBStore, TableOptions, cli
from torchrec_recstore.commands.output import errors_in_one_line
from torchrec_recstore.store import Table


def a_cold_store_in_a_file(folder: Path) -> None:
    (folder / "file").touch()
    Table(
        4,
        options=TableOptions(
            max_rows=10, cold_store=RocksDBStore(f"{folder}/file/cold")
        ),
    )


def no_server(folder: Path) -> None:
    RecStoreClient(["127.0.0.1:1"], timeout_s=0.1).init_data("t", (9, 4), torch.float32)


def too_much_memory(folder: Path) -> None:
    bytearray(2**60)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (a_cold_store_in_a_file, "error: cold store RocksDBStore('"),
        (no_server, "error: table 't' on server 127.0.0.1:1 cannot be reached"),
        (too_much_memory, "error: out of memory\n"),
    ],
)
def test_errors_that_are_no_values(
    body: Callable[[Path], None],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(typer.Exit) as end, errors_in_one_line():
        body(tmp_path)
    said = capsys.readouterr().err
    assert (end.value.exit_code, said.count("\n")) == (2, 1)
    assert said.startswith(says)


def main(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Returns the exit status of the command."""
    monkeypatch.setattr(sys, "argv", ["recstore", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert isinstance(end.value.code, int)
    return end.value.code


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("inspect", "Missing argument 'PATH': see recstore inspect --help"),
        (
            "export a b --dtype int3",
            "'int8', 'int4', 'fp16', 'float32': see recstore export --help",
        ),
        (
            "export a b --top-row 3",
            (
                "--top-row (Possible options: --rows, --top-rows): see recstore export"
                " --help"
            ),
        ),
        ("nosuch", "No such command 'nosuch': see recstore --help"),
    ],
)
def test_usage(
    arguments: str,
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert main(arguments.split(), monkeypatch) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith("error: ")
    assert said.err.endswith(f"{says}\n")


def test_nothing_asked_for_shows_the_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([], monkeypatch) == 0
    assert "Usage: recstore " in capsys.readouterr().out


def test_an_output_that_cannot_be_written() -> None:
    code = "from torchrec_recstore.cli import main; main()"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code, "bench", "--list", "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 2
    assert done.stderr.endswith("No space left on device\n")
    assert done.stderr.count("\n") == 1


def test_a_package_of_the_command_that_is_missing() -> None:
    code = (
        "import sys; sys.modules['typer'] = None\nfrom torchrec_recstore.cli import"
        " main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        2,
        "error: typer is missing: pip install 'path/to/torchrec_recstore[cli]'\n",
    )
