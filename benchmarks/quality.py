"""Measures the test AUC of DLRM on a Criteo click log against the memory of its tables.

    python benchmarks/quality.py --data criteo_kaggle_sample.tsv.gz

The sides are RecStore's tables and the tables of fixed size that an engineer would make
for the same memory: see :data:`SIDES`. Each side is trained with five budgets of memory
and three seeds: one epoch over the first 80 % of the log, dim 16, batch 512, row-wise
Adagrad, dense layers of 64 and of 128 and 64 units. The test is the last 10 %. The
memory is that of the rows, their optimizer state, and everything that finds the row of
an id: a vocabulary, the ids of managed collision, RecStore's index and counts.

Results are written to ``benchmarks/quality.json`` after each run. A run that is there
is not repeated, so an interrupted command continues. Then the plot ``docs/quality.png``
and the table of docs/measured.md are written. Without --data, only these are.
``--new`` repeats all runs: 15 minutes on two cores of an AMD EPYC.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import torch
from click_logs import ClickLog, criteo
from click_tables import (
    ID_BYTES,
    MCH_LFU_BYTES,
    RECSTORE_ROW_BYTES,
    ManagedCollision,
    Modulo,
    QuotientRemainder,
    RecStoreTables,
    Tables,
    Vocabulary,
    VocabularyOrModulo,
    counted,
    row_bytes,
)
from click_training import Layers, Trainer, interval, save
from figures import markdown
from measure import ROOT, commit
from run import END, load, write_between
from torch import Tensor
from tqdm import tqdm

from torchrec_recstore import LFU, LRU, TableOptions

RESULTS = ROOT / "benchmarks" / "quality.json"
PLOT = ROOT / "docs" / "quality.png"
BEGIN = "<!-- quality: written by benchmarks/quality.py -->"
DIM = 16
BATCH = 512
LAYERS = Layers([64], [128, 64])
SEEDS = (0, 1, 2)
BUDGETS_MB = (1.25, 2.5, 5.0, 10.0, 20.0)
LEAST_RECSTORE_ROWS = BATCH
"""RecStore needs room for all ids of a step."""


class Training(NamedTuple):
    """The training part of a log, and what a first pass over it has counted.

    Args:
        log: The samples.
        ranked: The distinct ids of each feature, the most frequent ones first.
    """

    log: ClickLog
    ranked: list[Tensor]

    @property
    def distinct(self) -> list[int]:
        """The number of distinct ids of each feature."""
        return [len(ids) for ids in self.ranked]

    def rows(self, limit: int, more: int = 0) -> list[int]:
        """Returns a number of rows for each feature: at most ``limit``."""
        return [min(count + more, limit) for count in self.distinct]


class Side(NamedTuple):
    """Tables that are made for a budget of memory.

    Args:
        name: The name in tables and plots.
        make: Makes the tables with a limit of rows.
        bytes_of: The bytes of the tables with a limit.
        color: The color in the plot.
    """

    name: str
    make: Callable[[Training, int], Tables]
    bytes_of: Callable[[Training, int], int]
    color: str


def _recstore(eviction: LFU | LRU) -> Callable[[Training, int], Tables]:
    def make(training: Training, limit: int) -> Tables:
        max_rows = max(limit, LEAST_RECSTORE_ROWS)
        options = TableOptions(max_rows=max_rows, eviction=eviction)
        return RecStoreTables(training.log.features, DIM, options)

    return make


def _recstore_bytes(training: Training, limit: int) -> int:
    return RECSTORE_ROW_BYTES * sum(training.rows(max(limit, LEAST_RECSTORE_ROWS)))


def _vocabulary(training: Training, limit: int) -> Tables:
    return Vocabulary([ids[:limit] for ids in training.ranked], DIM)


def _vocabulary_bytes(training: Training, limit: int) -> int:
    rows = sum(training.rows(limit))
    other_rows = len(training.ranked)
    known_bytes = (row_bytes(DIM) + ID_BYTES) * rows
    return known_bytes + row_bytes(DIM) * other_rows


def _vocabulary_or_modulo_bytes(training: Training, limit: int) -> int:
    vocabulary_sizes = [count for count in training.distinct if count <= limit]
    # Each vocabulary has a row for the ids that it lacks.
    rows = sum(training.rows(limit)) + len(vocabulary_sizes)
    bytes_of_rows = row_bytes(DIM) * rows
    bytes_of_ids = ID_BYTES * sum(vocabulary_sizes)
    return bytes_of_rows + bytes_of_ids


def _quotient_remainder_bytes(training: Training, limit: int) -> int:
    return row_bytes(DIM) * sum(training.rows(2 * limit))


def _equal_bytes(training: Training, limit: int) -> int:
    return row_bytes(DIM) * limit * len(training.ranked)


def _managed_bytes(training: Training, limit: int) -> int:
    return (row_bytes(DIM) + MCH_LFU_BYTES) * sum(training.rows(limit, more=1))


SIDES = (
    Side(
        "RecStore, LFU",
        _recstore(LFU()),
        _recstore_bytes,
        "#0b6e99",
    ),
    Side(
        "RecStore, LRU",
        _recstore(LRU()),
        _recstore_bytes,
        "#6fb7d6",
    ),
    Side(
        "modulo, the same rows for each feature",
        lambda training, limit: Modulo([limit] * len(training.ranked), DIM),
        _equal_bytes,
        "#b9b9b9",
    ),
    Side(
        "modulo, rows by the feature's ids",
        lambda training, limit: Modulo(training.rows(limit), DIM),
        lambda training, limit: row_bytes(DIM) * sum(training.rows(limit)),
        "#6b6b6b",
    ),
    Side(
        "vocabulary where it fits, else modulo",
        lambda training, limit: VocabularyOrModulo(training.ranked, DIM, limit),
        _vocabulary_or_modulo_bytes,
        "#d99a2b",
    ),
    Side(
        "vocabulary, one row for all other ids",
        _vocabulary,
        _vocabulary_bytes,
        "#b35c00",
    ),
    Side(
        "quotient-remainder",
        lambda training, limit: QuotientRemainder(training.distinct, DIM, limit),
        _quotient_remainder_bytes,
        "#7a4fa3",
    ),
    Side(
        "managed collision, LFU",
        lambda training, limit: ManagedCollision(
            training.rows(limit, more=1),
            training.log.features,
            DIM,
            "lfu",
        ),
        _managed_bytes,
        "#2f8f4e",
    ),
)
"""The sides. All but RecStore are FBGEMM's tables, which TorchRec's FUSED tables are.

The limit is the most rows of a feature. *Vocabulary*: the most frequent ids of the
training part, and a row for all others.
"""


def limit_of(
    side: Side,
    training: Training,
    budget_mb: float,
) -> int:
    """Returns the largest limit with which a side keeps to a budget, at least 2."""
    low = 2
    high = max(training.distinct) + 1
    while low < high:
        middle = (low + high + 1) // 2
        if side.bytes_of(training, middle) <= budget_mb * 1e6:
            low = middle
        else:
            high = middle - 1
    return low


def measure(
    side: Side,
    training: Training,
    test: ClickLog,
    budget_mb: float,
    seed: int,
) -> dict[str, Any]:
    """Trains one epoch and returns the bytes of the tables and the test's result."""
    torch.manual_seed(seed)
    limit = limit_of(side, training, budget_mb)
    tables = side.make(training, limit)
    trainer = Trainer(tables, training.log, LAYERS, DIM, BATCH)
    trainer.train(training.log)
    auc, logloss = trainer.evaluate(test)
    return {
        "side": side.name,
        "budget_mb": budget_mb,
        "limit": limit,
        "seed": seed,
        "bytes": tables.memory_bytes(),
        "passes": tables.passes,
        "test_auc": auc,
        "test_logloss": logloss,
        "commit": commit(),
        "torch": torch.__version__,
    }


def _key(row: dict[str, Any]) -> tuple[str, float, int]:
    return row["side"], row["budget_mb"], row["seed"]


def sweep(log: ClickLog, rows: list[dict[str, Any]]) -> None:
    """Measures the runs that are not among the results, and saves each of them."""
    num_samples = len(log)
    training_end = num_samples * 8 // 10
    test_begin = num_samples * 9 // 10
    training_log = log.part(0, training_end)
    test = log.part(test_begin, num_samples)
    training = Training(training_log, counted(training_log.ids))

    measured = {_key(row) for row in rows}
    runs = []
    for seed, budget_mb, side in itertools.product(SEEDS, BUDGETS_MB, SIDES):
        if (side.name, budget_mb, seed) not in measured:
            runs.append((side, budget_mb, seed))

    is_quiet = not sys.stderr.isatty()
    for side, budget_mb, seed in tqdm(runs, disable=is_quiet):
        row = measure(side, training, test, budget_mb, seed)
        rows.append(row)
        save(RESULTS, rows)


def results_of(
    rows: list[dict[str, Any]],
    side: Side,
    budget_mb: float,
) -> list[dict[str, Any]]:
    """Returns the results of all seeds."""
    return [
        row
        for row in rows
        if row["side"] == side.name and row["budget_mb"] == budget_mb
    ]


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the table of docs/measured.md: the mean AUC and its 95 % interval."""
    columns = ["tables", "passes before training"]
    columns += [f"{budget_mb:g} MB" for budget_mb in BUDGETS_MB]
    lines = []
    for side in SIDES:
        cells = [side.name]
        for budget_mb in BUDGETS_MB:
            runs = results_of(rows, side, budget_mb)
            if not runs:
                cells.append("-")
                continue
            first = runs[0]
            mean, half = interval([run["test_auc"] for run in runs])
            spread = ""
            if not math.isnan(half):
                spread = f" ± {half:.4f}"
            megabytes = first["bytes"] / 1e6
            cells.append(f"{mean:.4f}{spread} ({megabytes:.2f} MB)")
            passes = first["passes"] - 1
        cells.insert(1, f"{passes}")
        lines.append(cells)
    return markdown(columns, lines)


def plot(rows: list[dict[str, Any]]) -> None:
    """Draws the mean test AUC over the seeds against the memory."""
    figure, axes = plt.subplots(figsize=(8.4, 4.2), layout="constrained")
    for side in SIDES:
        memory_mb = []
        means = []
        for budget_mb in BUDGETS_MB:
            runs = results_of(rows, side, budget_mb)
            if runs:
                memory_mb.append(runs[0]["bytes"] / 1e6)
                means.append(interval([run["test_auc"] for run in runs])[0])
        width = 2.4 if side.name.startswith("RecStore") else 1.4
        axes.plot(
            memory_mb,
            means,
            "o-",
            color=side.color,
            label=side.name,
            linewidth=width,
        )
    axes.set_xscale("log")
    axes.set_xticks(BUDGETS_MB)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(mpl.ticker.NullFormatter())
    axes.set_xlabel("memory of the 26 tables with all that finds a row, MB")
    axes.set_ylabel("test AUC")
    axes.set_title("DLRM on the Criteo sample, one epoch, three seeds", fontsize=10)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        frameon=False,
        fontsize=8,
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
    )
    figure.savefig(PLOT, dpi=150, facecolor="white")


def write_pages(rows: list[dict[str, Any]]) -> None:
    """Draws the plot and writes the table of docs/measured.md."""
    plot(rows)
    write_between("docs/measured.md", BEGIN, END, table(rows))


def main() -> None:
    """Measures what is missing, and writes the plot and the table."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", help="Criteo TSV file, plain or gzip")
    parser.add_argument("--new", action="store_true", help="repeat all runs")
    arguments = parser.parse_args()
    rows = [] if arguments.new else load(RESULTS)
    if arguments.data:
        torch.set_num_threads(1)
        sweep(criteo(arguments.data), rows)
    write_pages(rows)


if __name__ == "__main__":
    main()
