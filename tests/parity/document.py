"""Writes docs/parity.md, tables of outcomes with notes, and reads the kinds of outcomes from it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

from .cells import BAGS, SEQUENCES, Cell
from .outcomes import FAILS, UNSUPPORTED, UPSTREAM, WORKS, Outcome
from .run_cell import LEARNING_RATE, ROW_LEARNING_RATE, STEPS, TOLERANCE

PATH = Path(__file__).parents[2] / "docs" / "parity.md"
_KINDS = (WORKS, UPSTREAM, UNSUPPORTED, FAILS)
_COLUMNS = {
    BAGS: {
        _label: Cell(BAGS, "", 0, pooling, weighted, varying)
        for pooling, weighted, varying in product(("sum", "mean"), (False, True), (False, True))
        for _label in [f"{pooling}{', weighted' * weighted}{', VBE' * varying}"]
    },
    SEQUENCES: {
        "rows": Cell(SEQUENCES, "", 0, "none"),
        "rows, VBE": Cell(SEQUENCES, "", 0, "none", varying=True),
    },
}


def text(outcomes: Mapping[Cell, Outcome]) -> str:
    """The whole document."""
    notes = list(dict.fromkeys(o for o in outcomes.values() if o.kind != WORKS))
    counts = Counter(outcome.kind for outcome in outcomes.values())
    parts = [
        "# RecStore tables against unsharded TorchRec",
        "Written by `make parity`; not by hand.",
        "Each cell is a model of `torchrec.distributed.test_utils.test_model` (`TestSparseNN`; for sequences "
        "`TestMixedEmbeddingSparseArch`) with batches of its `ModelInput`, all of its tables in RecStore under one "
        "sharding type. It starts from the unsharded model's weights, through `load_state_dict` and again through "
        f"`load_dense_weights`, and takes {STEPS} steps of SGD (fused EXACT_SGD, learning rate {ROW_LEARNING_RATE:g}, "
        f"for the rows, torch's, {LEARNING_RATE:g}, for the rest) beside the unsharded model. Predictions of every "
        "step and then all rows agree within "
        + ", ".join(f"{tolerance:g} ({data_type})" for data_type, tolerance in TOLERANCE.items())
        + ", absolute or relative. The unsharded rows are fp32, rounded to the data type at the start. Four ranks are "
        "two nodes of two, fewer are one node. Weighted models have a weighted collection beside the plain one. Torch "
        "has no weighted mean unsharded; what it is compared with is TorchRec's, which depends on the sharding: the "
        "weighted sum over the number of rows, and over the sum of the weights where a table is split by rows.",
        "\n".join(
            [
                f"- **{WORKS}**: {counts[WORKS]} cells",
                f"- **{UPSTREAM}**: {counts[UPSTREAM]}; TorchRec's own FUSED tables, placed the same, fail as well",
                f"- **{UNSUPPORTED}**: {counts[UNSUPPORTED]}; the error of the note is what a user gets",
                f"- **{FAILS}**: {counts[FAILS]}; a defect of RecStore's",
            ]
        ),
    ]
    for module, data_type in dict.fromkeys((cell.module, cell.data_type) for cell in outcomes):
        of_table = {c: o for c, o in outcomes.items() if (c.module, c.data_type) == (module, data_type)}
        parts += [f"## {module}, {data_type.lower()}", "\n".join(_table(module, of_table, notes))]
    parts += ["## Notes", "\n".join(_note(index, note) for index, note in enumerate(notes, 1))]
    return "\n\n".join(parts) + "\n"


def kinds(document: str) -> dict[Cell, str]:
    """The kind of outcome of each cell in a document."""
    found: dict[Cell, str] = {}
    module = data_type = ""
    labels: list[str] = []
    for line in document.splitlines():
        if heading := re.fullmatch(r"## (\w+), (\w+)", line):
            module, data_type = heading[1], heading[2].upper()
        if not line.startswith("| "):
            continue
        sharding, ranks, *entries = (entry.strip() for entry in line.strip("|").split("|"))
        if sharding == "sharding":
            labels = entries
        elif ranks.isdigit():
            for label, entry in zip(labels, entries, strict=True):
                if entry:
                    like = _COLUMNS[module][label]
                    cell = replace(like, sharding=sharding, world_size=int(ranks), data_type=data_type)
                    found[cell] = next(kind for kind in _KINDS if entry.startswith(kind))
    return found


def _table(module: str, outcomes: Mapping[Cell, Outcome], notes: list[Outcome]) -> Iterable[str]:
    shape = [(c.pooling, c.weighted, c.varying) for c in outcomes]
    columns = {
        label: like for label, like in _COLUMNS[module].items() if (like.pooling, like.weighted, like.varying) in shape
    }
    yield "| sharding | ranks | " + " | ".join(columns) + " |"
    yield "| --- | --- |" + " --- |" * len(columns)
    data_type = next(iter(outcomes)).data_type
    for sharding in dict.fromkeys(cell.sharding for cell in outcomes):
        for world_size in sorted({cell.world_size for cell in outcomes}):
            row = [replace(c, sharding=sharding, world_size=world_size, data_type=data_type) for c in columns.values()]
            yield f"| {sharding} | {world_size} | " + " | ".join(_entry(outcomes.get(c), notes) for c in row) + " |"


def _entry(outcome: Outcome | None, notes: list[Outcome]) -> str:
    if outcome is None or outcome.kind == WORKS:
        return "" if outcome is None else WORKS
    return f"{outcome.kind} ({notes.index(outcome) + 1})"


def _note(index: int, outcome: Outcome) -> str:
    stock = outcome.stock if outcome.stock == "works" else f"`{outcome.stock}`"
    return f"{index}. {outcome.kind}: `{outcome.reason}`. With FUSED tables: {stock}."
