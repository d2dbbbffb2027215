"""Tests of ``recstore inspect`` on exported files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.formats.fixed import EXPORTS
from torchrec_recstore.cli import app

FILES = EXPORTS / "sorted"
DIMS = {"t": 8, "m": 4, "s": 8}


def inspect(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_an_exported_model() -> None:
    path = FILES / "model.pt"
    versions = json.loads((FILES / "expected.json").read_text())
    status, out, _ = inspect(path, "--json")
    told = json.loads(out)
    assert (status, told["kind"], told["format"], told["verified"]) == (
        0,
        "export",
        1,
        True,
    )
    assert (told["index"], told["dtype"], told["version"]) == (
        "sorted",
        "int4",
        versions[0],
    )
    assert told["bytes"] == path.stat().st_size
    assert {name: table["dim"] for name, table in told["tables"].items()} == DIMS
    assert told["tables"]["t"]["rows"] == 6
    assert told["dense"] == ["over.bias", "over.weight"]
    status, out, _ = inspect(path)
    assert status == 0
    assert versions[0] in out
    assert "checksum        good" in out


def test_a_delta() -> None:
    path = FILES / "model.delta"
    versions = json.loads((FILES / "expected.json").read_text())
    told = json.loads(inspect(path, "--json")[1])
    assert (told["kind"], told["format"], told["verified"]) == ("delta", 1, True)
    assert [told["base"], told["version"]] == versions
    assert told["dense"] == ["over.bias"]
    assert told["tables"]["t"]["removed"] == 0 < told["tables"]["t"]["rows"]
    status, out, _ = inspect(path)
    assert status == 0
    assert "checksum        good" in out
    assert (
        json.loads(inspect(FILES / "model.pt", "--json", "--no-verify")[1])["verified"]
        is False
    )


@pytest.mark.parametrize("name", ["model.pt", "model.delta"])
def test_a_damaged_file(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    shutil.copy(FILES / name, file)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    for arguments in ((file,), (file, "--json")):
        assert inspect(*arguments) == (
            2,
            "",
            f"error: {file} is damaged: its checksum does not fit\n",
        )
    file.write_text("something else")
    status, out, err = inspect(file)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert str(file) in err
