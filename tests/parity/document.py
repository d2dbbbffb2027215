"""Writes docs/parity.md, tables of outcomes with notes, and reads the kinds of outcomes
from it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from .cells import BAGS, SEQUENCES, Cell
from .extras import EXTRAS
from .outcomes import DIFFERS, FAILS, UNSUPPORTED, UPSTREAM, WORKS, Outcome
from .run_cell import LEARNING_RATE, ROW_LEARNING_RATE, STEPS, TOLERANCE
from .uses.use import Use

PATH = Path(__file__).parents[2] / "docs" / "parity.md"
_KINDS = (WORKS, UPSTREAM, UNSUPPORTED, DIFFERS, FAILS)
_COLUMNS = {
    BAGS: {
        _label: Cell(BAGS, "", 0, pooling, weighted, varying)
        for pooling, weighted, varying in product(
            ("sum", "mean"), (False, True), (False, True)
        )
        for _label in [f"{pooling}{', weighted' * weighted}{', VBE' * varying}"]
    },
    SEQUENCES: {
        "rows": Cell(SEQUENCES, "", 0, "none"),
        "rows, VBE": Cell(SEQUENCES, "", 0, "none", varying=True),
    },
}

_MORE = "batches with more than the tables need"


@dataclass(frozen=True)
class _Section:
    """The cells of one table of the document.

    Args:
        pooling: The pooling of all cells, if the columns are what the batches carry.
            Empty: the columns are the other dimensions.
    """

    module: str
    data_type: str
    pooling: str = ""

    @classmethod
    def of(cls, cell: Cell) -> _Section:
        """The section of a cell."""
        return cls(cell.module, cell.data_type, cell.pooling if cell.extra else "")

    @property
    def heading(self) -> str:
        """The heading without the number signs."""
        heading = f"{self.module}, {self.data_type.lower()}"
        return (
            f"{heading}, {_POOLING_WORDS[self.pooling]}, {_MORE}"
            if self.pooling
            else heading
        )

    @property
    def columns(self) -> dict[str, Cell]:
        """For each label, a cell with the dimensions of the column."""
        if self.pooling:
            return {
                extra: Cell(self.module, "", 0, self.pooling, extra=extra)
                for extra in EXTRAS
            }
        return _COLUMNS[self.module]


_POOLING_WORDS = {"sum": "sum", "mean": "mean", "none": "rows"}


def text(outcomes: Mapping[Cell, Outcome], uses: Mapping[Use, Outcome]) -> str:
    """The whole document."""
    notes = list(
        dict.fromkeys(
            o for o in (*outcomes.values(), *uses.values()) if o != Outcome(WORKS)
        )
    )
    counts = Counter(outcome.kind for outcome in outcomes.values())
    parts = [
        "# RecStore tables against unsharded TorchRec",
        (
            "This page lists which combinations of sharding, pooling, weights, batches"
            " and data types work, and which [uses](#uses) of a sharded model. `make"
            " parity` writes this page. Do not edit it by hand."
        ),
        "Each cell is one test of a model of"
        " `torchrec.distributed.test_utils.test_model`: `TestSparseNN`, or"
        " `TestMixedEmbeddingSparseArch` for sequences. Batches come from its"
        " `ModelInput`. All tables of the model are in RecStore with one sharding"
        " type. The test loads the weights of the unsharded model, once through"
        " `load_state_dict` and once through `load_dense_weights`. Then it trains both"
        f" models for {STEPS} steps of SGD: rows with fused EXACT_SGD and learning rate"
        f" {ROW_LEARNING_RATE:g}, all other parameters with torch's SGD and learning"
        f" rate {LEARNING_RATE:g}. The predictions of every step and the rows at the"
        " end must agree within "
        + ", ".join(
            f"{tolerance:g} ({data_type})" for data_type, tolerance in TOLERANCE.items()
        )
        + ", absolute or relative.",
        (
            "The unsharded rows are fp32 and are rounded to the data type before"
            " training. Four ranks are two nodes of two ranks; one and two ranks are"
            " one node. VBE means a different batch size for each feature. Weighted"
            " models have a weighted collection and an unweighted one. Torch has no"
            " weighted mean for unsharded tables. The test compares with TorchRec's"
            " weighted mean, which depends on the sharding: the weighted sum divided by"
            " the number of rows, or by the sum of the weights if a table is split by"
            " rows."
        ),
        (
            "The last three tables are of batches whose unweighted features carry more"
            " than the tables need, or come in another form: per-sample weights,"
            " further features with all features in another order in each step, lengths"
            " and offsets in int64, ids and lengths in int32, offsets without lengths,"
            " inverse indices, and a stride for each feature"
            " (`stride_per_key_per_rank`) with equal strides. An unsharded collection"
            " ignores weights that it does not use, and further features."
        ),
        "\n".join(
            [
                f"- **{WORKS}**: {counts[WORKS]} cells.",
                (
                    f"- **{UPSTREAM}**: {counts[UPSTREAM]}. TorchRec's own FUSED tables"
                    " with this sharding fail, too."
                ),
                (
                    f"- **{UNSUPPORTED}**: {counts[UNSUPPORTED]}. The note shows the"
                    " error."
                ),
                f"- **{FAILS}**: {counts[FAILS]}. These cells are defects of RecStore.",
            ]
        ),
    ]
    for section in dict.fromkeys(map(_Section.of, outcomes)):
        of_section = {
            cell: outcome
            for cell, outcome in outcomes.items()
            if _Section.of(cell) == section
        }
        parts += [
            f"## {section.heading}",
            "\n".join(_table(section, of_section, notes)),
        ]
    parts += _uses(uses, notes)
    parts += [
        "## Notes",
        "\n".join(_note(index, note) for index, note in enumerate(notes, 1)),
    ]
    return "\n\n".join(parts) + "\n"


def kinds(document: str) -> dict[Cell, str]:
    """The kind of outcome of each cell in a document."""
    found: dict[Cell, str] = {}
    section = _Section("", "")
    labels: list[str] = []
    poolings = {word: pooling for pooling, word in _POOLING_WORDS.items()}
    for line in document.splitlines():
        if heading := re.fullmatch(rf"## (\w+), (\w+)(?:, (\w+), {_MORE})?", line):
            section = _Section(
                heading[1],
                heading[2].upper(),
                poolings[heading[3]] if heading[3] else "",
            )
        if not line.startswith("| "):
            continue
        sharding, ranks, *entries = (
            entry.strip() for entry in line.strip("|").split("|")
        )
        if sharding == "sharding":
            labels = entries
        elif ranks.isdigit():
            for label, entry in zip(labels, entries, strict=True):
                if entry:
                    like = section.columns[label]
                    cell = replace(
                        like,
                        sharding=sharding,
                        world_size=int(ranks),
                        data_type=section.data_type,
                    )
                    found[cell] = next(
                        kind for kind in _KINDS if entry.startswith(kind)
                    )
    return found


def kinds_of_uses(document: str) -> dict[str, str]:
    """The kind of outcome of each use in a document, by its name."""
    section = document.partition("\n## Uses\n")[2].partition("\n## Notes\n")[0]
    rows = [
        line.strip("|").rsplit("|", 1)
        for line in section.splitlines()
        if line.startswith("| ")
    ]
    return {
        name.strip(): next(kind for kind in _KINDS if entry.strip().startswith(kind))
        for name, entry in rows
        if entry.strip() not in ("outcome", "---")
    }


def _uses(uses: Mapping[Use, Outcome], notes: list[Outcome]) -> Iterable[str]:
    counts = Counter(outcome.kind for outcome in uses.values())
    yield "## Uses"
    yield (
        "What users do with a sharded model, each tried with TorchRec's own FUSED"
        " tables and with RecStore tables: a model of two tables of 100 rows, row-wise"
        " Adagrad for the rows, and Adam for a linear layer. The models and the batches"
        " are equal, and the results, mostly predictions before and after further"
        " training, must agree within 0.001. Without another word, a use is that of one"
        " rank and of table-wise sharding."
    )
    yield "\n".join(
        [
            (
                f"- **{WORKS}**: {counts[WORKS]} uses. The results are equal, or only"
                " the stock tables fail."
            ),
            f"- **{UPSTREAM}**: {counts[UPSTREAM]}. TorchRec's own tables fail, too.",
            (
                f"- **{UNSUPPORTED}**: {counts[UNSUPPORTED]}. An error says what to"
                " call instead. The note shows it."
            ),
            (
                f"- **{DIFFERS}**: {counts[DIFFERS]}. The results differ on purpose."
                " The note says why, and what to call."
            ),
            f"- **{FAILS}**: {counts[FAILS]}. These uses are defects of RecStore.",
        ]
    )
    for topic in dict.fromkeys(use.topic for use in uses):
        yield f"### {topic}"
        of_topic = [
            f"| {use.name} | {_entry(uses[use], notes)} |"
            for use in uses
            if use.topic == topic
        ]
        yield "\n".join(["| use | outcome |", "| --- | --- |", *of_topic])


def _table(
    section: _Section, outcomes: Mapping[Cell, Outcome], notes: list[Outcome]
) -> Iterable[str]:
    shape = [(c.pooling, c.weighted, c.varying, c.extra) for c in outcomes]
    columns = {
        label: like
        for label, like in section.columns.items()
        if (like.pooling, like.weighted, like.varying, like.extra) in shape
    }
    yield "| sharding | ranks | " + " | ".join(columns) + " |"
    yield "| --- | --- |" + " --- |" * len(columns)
    for sharding in dict.fromkeys(cell.sharding for cell in outcomes):
        for world_size in sorted({cell.world_size for cell in outcomes}):
            row = [
                replace(
                    c,
                    sharding=sharding,
                    world_size=world_size,
                    data_type=section.data_type,
                )
                for c in columns.values()
            ]
            yield (
                f"| {sharding} | {world_size} | "
                + " | ".join(_entry(outcomes.get(c), notes) for c in row)
                + " |"
            )


def _entry(outcome: Outcome | None, notes: list[Outcome]) -> str:
    if outcome is None or outcome == Outcome(WORKS):
        return "" if outcome is None else WORKS
    return f"{outcome.kind} ({notes.index(outcome) + 1})"


def _note(index: int, outcome: Outcome) -> str:
    stock = outcome.stock if outcome.stock == "works" else _code(outcome.stock)
    if outcome.kind == WORKS:
        return f"{index}. {outcome.kind}, but not with FUSED tables: {stock}."
    reason = outcome.reason if outcome.kind == DIFFERS else _code(outcome.reason)
    return f"{index}. {outcome.kind}: {reason}. With FUSED tables: {stock}."


def _code(error: str) -> str:
    return f"`` {error} ``" if "`" in error else f"`{error}`"
