"""A checkpoint has the format that docs/checkpoint.md describes. tests/docs runs the code of that page."""

from __future__ import annotations

import json
import re
from pathlib import Path

from torchrec_recstore import optim, save_checkpoint

from . import models

DOCUMENT = (Path(__file__).parents[2] / "docs" / "checkpoint.md").read_text()


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
    for optimizer in optim.OPTIMIZERS.values():
        kinds = optim.state_names(optimizer(momentum=0.9) if optimizer is optim.SGD else optimizer())
        for kind, cell in zip(("element", "row"), states[optimizer.__name__], strict=True):
            assert re.findall(r"`(\w+)`", cell) == [name for name, of_kind in kinds.items() if of_kind == kind]
