"""``recstore inspect`` of publications shows the rows that a follower serves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from torchrec_recstore.cli import app
from torchrec_recstore.inference import DeltaPublisher, follow
from torchrec_recstore.modules import RecStoreEmbeddingBag

from .test_publisher import change, publish, trained


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two full exports and two deltas after the last one."""
    place = tmp_path_factory.mktemp("publications") / "published"
    model = trained()
    for full_every_s in (0, 1e6):
        with DeltaPublisher(
            model, place, every_s=0, full_every_s=full_every_s
        ) as publisher:
            for step in range(2):
                publish(publisher)
                change(model, step)
    return place


def inspect(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def contents_of(path: Path) -> dict[str, Any]:
    status, out, err = inspect(path, "--json")
    assert (status, err) == (0, "")
    contents: dict[str, Any] = json.loads(out)
    return contents


def test_a_directory_has_the_rows_of_its_newest_publication(published: Path) -> None:
    contents = contents_of(published)
    with follow(published) as follower:
        ids = follower.model.recstore_ids("t")
        assert contents["number"] == follower.state.number
        assert contents["version"] == follower.version
    table = contents["tables"]["t"]
    assert (table["rows"], table["dim"]) == (len(ids), 8)
    fulls = [entry["full"] for entry in contents["publications"]]
    assert fulls.count(True) == 2
    assert not fulls[-1], "the number of rows must be that after a delta"
    last = contents["publications"][-1]
    assert last["number"] == contents["number"]
    assert last["version"] == contents["version"]
    assert last["changed"] > 0 < last["removed"]
    files = [path for path in published.iterdir() if path.suffix != ".json"]
    sizes = [path.stat().st_size for path in files if path.name[0] != "."]
    assert contents["bytes"] == sum(sizes)
    status, out, _ = inspect(published)
    assert status == 0
    for text in (contents["version"], "checksum        good", "changed", "│ t "):
        assert text in out


def test_the_file_of_a_program_has_the_rows_beside_it(published: Path) -> None:
    program = max(published.glob("*.pt"))
    contents = contents_of(program)
    rows_file = program.with_suffix(".safetensors")
    assert contents["tables"]["t"]["rows"] == 60
    assert contents["tables"]["t"]["bytes"] == 60 * (8 + 8 * 2), "float16"
    assert contents["rows_in"] == str(rows_file)
    assert contents["bytes"] == program.stat().st_size + rows_file.stat().st_size
    numbers = {
        entry["number"]: entry for entry in contents_of(published)["publications"]
    }
    assert contents["version"] == numbers[int(program.stem)]["version"]
    assert str(rows_file) in inspect(program)[1]


@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".delta", ".json"])
def test_a_damaged_file_is_named(suffix: str, published: Path, tmp_path: Path) -> None:
    place = tmp_path / "copy"
    shutil.copytree(published, place)
    file = max(place.glob(f"0*{suffix}"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if suffix != ".json" else 0] ^= 1
    file.write_bytes(content)
    status, out, err = inspect(place)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert str(file) in err


def test_files_that_do_not_belong_together(published: Path, tmp_path: Path) -> None:
    place = tmp_path / "copy"
    shutil.copytree(published, place)
    other_model = nn.Sequential(RecStoreEmbeddingBag(9, 4, name="t"), nn.Linear(4, 2))
    other_model(torch.arange(3).unsqueeze(0)).sum().backward()
    other = tmp_path / "other"
    with DeltaPublisher(other_model, other, every_s=0):
        pass
    rows_file = max(place.glob("*.safetensors"))
    shutil.copy(min(other.glob("*.safetensors")), rows_file)
    program = rows_file.with_suffix(".pt")
    message = f"error: {rows_file} does not belong to {program}\n"
    assert inspect(program) == (2, "", message)
    assert inspect(place) == (2, "", message)


def test_a_key_is_checked(published: Path, tmp_path: Path) -> None:
    key = tmp_path / "publish.key"
    key.write_text("0123456789abcdef" * 2)
    key.chmod(0o600)
    status, _, err = inspect(published, "--key", key)
    assert status == 2
    assert "signature" in err
    signed = tmp_path / "signed"
    with DeltaPublisher(trained(), signed, every_s=0, key=key):
        pass
    status, out, err = inspect(signed, "--key", key)
    assert (status, err) == (0, "")
    assert f"signature       good, of {key}" in out
    status, _, err = inspect(signed, "--key", key, "--no-verify")
    assert status == 2
    assert "no --no-verify" in err
