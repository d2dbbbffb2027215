"""What docs/checkpoint.md says of the format holds for a checkpoint."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from tests.distributed.workers import run_on_ranks
from torchrec_recstore import optim, save_checkpoint

from . import models

DOCUMENT = (Path(__file__).parents[2] / "docs" / "checkpoint.md").read_text()


def saves(rank: int, world_size: int, *, path: Path) -> None:
    model = models.recstore("grid_shard")
    models.train(model)
    save_checkpoint(model, path / "checkpoints" / "1000")
    models.write_down(model, path)


def test_the_code_reads_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = re.findall(r"```python\n(.*?)```", DOCUMENT, flags=re.DOTALL)[-1]
    run_on_ranks(2, partial(saves, path=tmp_path))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code, names)
    held = models.whole_tables(tmp_path)["user"]
    assert len({part["columns"][0] for part in names["table"]["parts"]}) == 2
    assert names["rows"].keys() == held.keys()
    assert all(torch.equal(names["rows"][i], held[i]["weight"]) for i in held)


def test_its_tables_name_every_field_and_state(one_rank: None, tmp_path: Path) -> None:
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in DOCUMENT.splitlines() if line.startswith("|")]
    described = set(re.findall(r"`(\w+)`", " ".join(row[0] for row in cells)))
    model = models.recstore()
    models.train(model)
    save_checkpoint(model, tmp_path / "saved")
    metadata = json.loads((tmp_path / "saved" / "metadata.json").read_text())
    table = metadata["tables"]["user"]
    assert described >= {*metadata, *table, "ids", "weight", "last_step", "frequency"}
    assert all(f"`{field}`" in DOCUMENT for field in [*table["parts"][0], *metadata["files"]["dense.safetensors"]])
    states = {name: row[1:] for row in cells for name in row[0].split(", ")}
    for optimizer in get_args(optim.Optimizer):
        kinds = optim.state_names(optimizer(momentum=0.9) if optimizer is optim.SGD else optimizer())
        for kind, cell in zip(("element", "row"), states[optimizer.__name__], strict=True):
            assert re.findall(r"`(\w+)`", cell) == [name for name, of_kind in kinds.items() if of_kind == kind]
