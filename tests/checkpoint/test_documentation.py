"""A checkpoint has the format that docs/checkpoint.md describes. tests/project/docs runs the
code of that page.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

from torchrec_recstore import optim, save_checkpoint

from . import models

DOCUMENTS = Path(__file__).parents[2] / "docs"
DOCUMENT = (DOCUMENTS / "checkpoint.md").read_text()


def test_its_tables_name_every_field_and_state(one_rank: None, tmp_path: Path) -> None:
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in DOCUMENT.splitlines()
        if line.startswith("|")
    ]
    described = set(re.findall(r"`(\w+)`", " ".join(row[0] for row in cells)))
    model = models.recstore()
    models.train(model)
    save_checkpoint(model, tmp_path / "saved")
    metadata = json.loads((tmp_path / "saved" / "metadata.json").read_text())
    table = metadata["tables"]["user"]
    assert described >= {*metadata, *table, "ids", "weight", "last_step", "frequency"}
    assert all(
        f"`{field}`" in DOCUMENT
        for field in [*table["parts"][0], *metadata["files"]["dense.safetensors"]]
    )


def test_the_states_of_each_optimizer_are_described() -> None:
    page = DOCUMENTS.joinpath("api", "optimizers.rst").read_text()
    table = page.partition("row-wise\n")[2].splitlines()[1:]
    columns = list(itertools.pairwise([0, 32, 63, 120]))
    rows = [
        [line[begin:end].strip() for begin, end in columns]
        for line in table
        if "====" not in line
    ]
    states = {name: row[1:] for row in rows for name in row[0].split(", ")}
    arguments = {
        "SGD": {"momentum": 0.9},
        "RowOptimizer": {"name": "<name>", "states": {"<state>": "row"}},
    }
    for name, optimizer in optim.OPTIMIZERS.items():
        kinds = optim.state_names(optimizer(**arguments.get(name, {})))
        if optimizer is optim.RowOptimizer:  # a state of each kind may have this name
            assert states.pop(name) == [*kinds, *kinds]
            continue
        for kind, cell in zip(("element", "row"), states[name], strict=True):
            said = [
                each
                for each in cell.removesuffix(", with momentum").split(", ")
                if each
            ]
            assert said == [
                state for state, of_kind in kinds.items() if of_kind == kind
            ], name
