"""Tests of ``recstore inspect`` on exported files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.formats.fixed import HERE
from torchrec_recstore.cli import app

FILES = HERE / "export_2"


def inspect(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("name", ["tables_float32.pt", "tables_int8.pt", "model.pt"])
def test_an_exported_model(name: str) -> None:
    versions = json.loads((FILES / "expected" / name).with_suffix(".json").read_text())
    status, out, _ = inspect(FILES / name, "--json")
    told = json.loads(out)
    assert (status, told["kind"], told["format"], told["verified"]) == (0, "export", 2, True)
    assert told["version"] == versions[0]
    assert told["bytes"] == (FILES / name).stat().st_size
    if name == "model.pt":
        assert told["dtype"] == "int4"
        assert told["tables"].keys() == {"t", "m", "s"}
        assert told["dense"] == ["over.bias", "over.weight"]
    else:
        assert told["dtype"] == name[7:-3]
        assert {table: counts["dim"] for table, counts in told["tables"].items()} == {"item": 8, "user": 8}
        assert told["tables"]["item"]["rows"] == 13
    status, out, _ = inspect(FILES / name)
    assert status == 0
    assert versions[0] in out
    assert "checksum        good" in out


def test_a_delta() -> None:
    path = FILES / "model_delta.safetensors"
    versions = json.loads((FILES / "expected" / "model.json").read_text())
    told = json.loads(inspect(path, "--json")[1])
    assert (told["kind"], told["format"], told["verified"]) == ("delta", 2, True)
    assert [told["base"], told["version"]] == versions
    assert told["dense"] == ["over.bias"]
    assert told["tables"]["t"]["removed"] == 0 < told["tables"]["t"]["rows"]
    status, out, _ = inspect(path)
    assert status == 0
    assert "checksum        good" in out
    assert json.loads(inspect(HERE / "export_1" / "model_delta.safetensors", "--json")[1])["format"] == 1
    assert json.loads(inspect(HERE / "export_1" / "model.pt", "--json", "--no-verify")[1])["verified"] is False


@pytest.mark.parametrize("name", ["tables_int8.pt", "model_delta.safetensors"])
def test_a_damaged_file(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    shutil.copy(FILES / name, file)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    for arguments in ((file,), (file, "--json")):
        assert inspect(*arguments) == (2, "", f"error: {file} is damaged: its checksum does not fit\n")
    file.write_text("something else")
    status, out, err = inspect(file)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert str(file) in err
