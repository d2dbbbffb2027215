"""Flags in a file: the command line goes first, and other keys are refused by name."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.processes import run_forked_command
from tests.recstore_server import RecStoreServer
from torchrec_recstore.cli import app as recstore
from torchrec_recstore.commands.config_file import ConfigFile

app = typer.Typer(rich_markup_mode=None)


@app.command()
def show(
    name: str,
    dim: int = typer.Option(...),
    rate: float = 0.5,
    tables: list[str] = typer.Option([], "--table"),  # noqa: B008
    out: Path = Path("out"),
    overwrite: bool = typer.Option(False, "--overwrite"),
    verify: bool = True,
    as_json: bool = typer.Option(False, "--json"),
    config: ConfigFile = None,
) -> None:
    values = (name, dim, rate, tables, str(out), overwrite, verify, as_json)
    print(json.dumps(values))


def flags_of(tmp_path: Path, content: str, *arguments: str) -> list[object]:
    result = invoked(tmp_path, content, *arguments)
    assert result[0] == 0, result[1]
    values: list[object] = json.loads(result[1])
    return values


def invoked(tmp_path: Path, content: str, *arguments: str) -> tuple[int, str]:
    file = tmp_path / "flags.toml"
    file.write_text(content)
    result = CliRunner().invoke(app, [*arguments, "--config", str(file), "the name"])
    return result.exit_code, result.stdout if result.exit_code == 0 else result.stderr


def test_each_kind_of_flag(tmp_path: Path) -> None:
    content = """
        dim = 8
        rate = 0.25
        table = ["a", "b"]
        out = "elsewhere"
        overwrite = true
        verify = false
        json = true
    """
    assert flags_of(tmp_path, content) == [
        "the name",
        8,
        0.25,
        ["a", "b"],
        "elsewhere",
        True,
        False,
        True,
    ]


def test_the_command_line_goes_first(tmp_path: Path) -> None:
    content = 'dim = 8\nrate = 0.25\ntable = ["a"]\nverify = false\nout = "there"'
    arguments = ["--dim", "3", "--table", "b", "--verify"]
    values = flags_of(tmp_path, content, *arguments)
    assert values == ["the name", 3, 0.25, ["b"], "there", False, True, False]


def test_a_key_may_have_an_underscore(tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_text("min_frequency = 300")
    result = CliRunner().invoke(
        recstore, ["export", "a", "b", "--config", str(tmp_path / "train.toml")]
    )
    assert result.exit_code == 2
    assert "no checkpoint at" in result.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("dims = 8", "has no flag --dims; the nearest one is --dim"),
        ("zzz = 8", "has no flag --zzz"),
        ("help = true", "has no flag --help"),
        ('config = "other.toml"', "has no flag --config"),
        ('name = "x"', "has no flag --name"),
        ("[serve]\ndim = 8", "has no flag --serve"),
        ('dim = "eight"', "Invalid value for '--dim'"),
        ("dim = true", "dim must be a text or a number, got True"),
        ("dim = [8]", "dim must be a text or a number, got [8]"),
        ("dim = 2026-11-28", "dim must be a text or a number, got datetime"),
        ('table = "a"', "table must be a list, got 'a'"),
        ("overwrite = 1", "overwrite must be true or false, got 1"),
        ("as-json = 1\nas_json = 1", "has no flag --as-json"),
        ("dim 8", "is no TOML file"),
    ],
)
def test_what_is_refused(content: str, message: str, tmp_path: Path) -> None:
    status, output = invoked(tmp_path, content)
    assert status == 2
    text = " ".join(output.replace("│", " ").split())
    assert message in text


def test_a_file_that_is_not_there_and_two_spellings(tmp_path: Path) -> None:
    file = tmp_path / "none.toml"
    result = CliRunner().invoke(recstore, ["export", "a", "b", "--config", str(file)])
    assert result.exit_code == 2
    file.write_text("top-rows = 1\ntop_rows = 2")
    done = run_forked_command(
        ["-m", "torchrec_recstore.cli", "export", "a", "b", "--config", str(file)]
    )
    assert done.returncode == 2
    assert done.stderr == (
        f"error: Invalid value for '--config': {file}: 'top_rows' is there twice, with"
        " - and with _: see recstore export --help\n"
    )


@pytest.mark.parametrize(
    "name",
    [
        "train",
        "serve",
        pytest.param("plan", marks=pytest.mark.slow),
        pytest.param("export", marks=pytest.mark.slow),
        pytest.param("follow", marks=pytest.mark.slow),
    ],
)
def test_the_long_commands_have_it(name: str, tmp_path: Path) -> None:
    file = tmp_path / "flags.toml"
    file.write_text("configuration = 1")
    command = ["-m", "torchrec_recstore.cli", name, "--config", str(file)]
    done = run_forked_command(command)
    assert done.returncode == 2
    assert f"recstore {name} has no flag --configuration" in done.stderr
    shown = run_forked_command(["-m", "torchrec_recstore.cli", name, "-h"])
    assert shown.returncode == 0
    assert f"Usage: recstore {name}" in shown.stdout
    assert "--config" in shown.stdout


def test_recstore_train_with_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.toml").write_text(
        'limit-rows = 2000\nbatch_size = 256\nno-log = true\njson = "out.json"'
    )
    command = ["-m", "torchrec_recstore.cli", "train", "--config", "train.toml"]
    done = run_forked_command(
        [*command, "--dim", "4"], {**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(Path("out.json").read_text())
    assert (result["dim"], result["batch_size"]) == (4, 256)


def test_recstore_serve_with_a_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text("max-tables = 1")
    server = RecStoreServer(tmp_path / "data", "--config", str(file))
    try:
        assert server.is_alive
    finally:
        server.stop()


def test_every_command_has_the_short_flag_of_help() -> None:
    def names_of(group: typer.Typer) -> list[list[str]]:
        names = []
        for command in group.registered_commands:
            callback = command.callback
            assert callback is not None
            names.append([command.name or callback.__name__])
        for inner in group.registered_groups:
            assert inner.typer_instance is not None
            for path in names_of(inner.typer_instance):
                names.append([str(inner.name), *path])
        return names

    names = names_of(recstore)
    assert ["servers", "status"] in names
    assert ["train"] in names
    for path in names:
        if path != ["train"]:  # it runs a script, see above
            shown = CliRunner().invoke(recstore, [*path, "-h"])
            assert shown.exit_code == 0, path
            assert "Usage:" in shown.stdout
