r"""Measures the AUC of tomorrow's clicks over time: train on a part, test on the next.

    python benchmarks/progressive.py --criteo criteo_kaggle_sample.tsv.gz \
        --movielens ml-100k --games Video.txt --stream

Each log is cut into parts of equal length in the order of time. A model predicts a part
before it is trained on it, once and in order (progressive validation). All sides have
the same memory, with everything that finds the row of an id: see :data:`SIDES`.

- criteo: a sample of seven days of a click log, half a day in each part.
- movielens: MovieLens-100k by its timestamps; the label is a rating of at least 4.
- games: Amazon "Games". Its file has no times, so the parts are by the place of an
  interaction in its user's history; negatives are drawn from earlier interactions.
- stream: generated, always the same. Each of 4,000 items that can be shown is replaced
  by a new one after 40,000 samples, four parts.

Results are written to ``benchmarks/progressive.json`` after each run. A run that is
there is not repeated. Then the plot ``docs/progressive.png`` and the table of
docs/measured.md are written; without a log, only these are. ``--new`` repeats the runs
of the given logs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from click_logs import ClickLog, criteo, games, movielens, stream
from click_tables import (
    ID_BYTES,
    MCH_LFU_BYTES,
    RECSTORE_ROW_BYTES,
    ManagedCollision,
    Modulo,
    RecStoreTables,
    Tables,
    Vocabulary,
    counted,
    row_bytes,
)
from click_training import Layers, Trainer, interval, save
from figures import markdown
from measure import ROOT, commit
from run import END, load, write_between
from torch import Tensor
from tqdm import tqdm

from torchrec_recstore import LFU, LRU, Expiry, TableOptions

RESULTS = ROOT / "benchmarks" / "progressive.json"
PLOT = ROOT / "docs" / "progressive.png"
BEGIN = "<!-- progressive: written by benchmarks/progressive.py -->"
DIM = 16
SEEDS = (0, 1, 2)
GROWTH = 2
"""A feature has at most this many times the distinct ids of the first part as rows."""


class Course(NamedTuple):
    """How a log is trained on.

    Args:
        title: The name in the plot.
        parts: The number of parts.
        batch: The samples of a step.
        budget_mb: The memory of all tables.
        layers: The sizes of the dense layers.
        lr: The learning rate of the tables.
    """

    title: str
    parts: int
    batch: int
    budget_mb: float
    layers: Layers
    lr: float


COURSES = {
    "criteo": Course(
        title="Criteo sample",
        parts=14,
        batch=512,
        budget_mb=3.0,
        layers=Layers([64], [128, 64]),
        lr=0.01,
    ),
    "movielens": Course(
        title="MovieLens-100k",
        parts=10,
        batch=128,
        budget_mb=0.1,
        layers=Layers([16], [64, 32]),
        lr=0.05,
    ),
    "games": Course(
        title='Amazon "Games"',
        parts=12,
        batch=512,
        budget_mb=1.5,
        layers=Layers([16], [64, 32]),
        lr=0.05,
    ),
    "stream": Course(
        title="items come and go",
        parts=24,
        batch=250,
        budget_mb=0.4,
        layers=Layers([16], [64, 32]),
        lr=0.05,
    ),
}


class Plan(NamedTuple):
    """What a side knows when its tables are made: the first part of the log.

    Args:
        course: The course of the log.
        features: The names of the features.
        ranked: The distinct ids of the first part by feature, the most frequent first.
    """

    course: Course
    features: tuple[str, ...]
    ranked: list[Tensor]

    def rows(self, bytes_of_row: int, least: int = 2) -> list[int]:
        """Returns the rows of each feature, which together keep to the budget."""
        budget_bytes = self.course.budget_mb * 1e6
        low = least
        high = GROWTH * max(len(ids) for ids in self.ranked)
        while low < high:
            middle = (low + high + 1) // 2
            rows = sum(self._limited(middle))
            if bytes_of_row * rows <= budget_bytes:
                low = middle
            else:
                high = middle - 1
        return self._limited(low)

    def _limited(self, limit: int) -> list[int]:
        return [min(GROWTH * len(ids), limit) for ids in self.ranked]


class Side(NamedTuple):
    """Tables and what is done to them before each part.

    Args:
        name: The name in tables and plots.
        make: Makes the tables.
        color: The color in the plot.
        renew_parts: The parts between two vocabularies. Default: None, no renewal.
    """

    name: str
    make: Callable[[Plan], Tables]
    color: str
    renew_parts: int | None = None

    def extra_passes(self, tables: Tables, parts: int) -> float:
        """Returns how often a part is read before it is trained on, on average."""
        if self.renew_parts is not None:
            return 1 / self.renew_parts
        return (tables.passes - 1) / parts


def _vocabulary(plan: Plan) -> Tables:
    rows_of_features = plan.rows(row_bytes(DIM) + ID_BYTES)
    sizes = []
    vocabularies = []
    for ids, rows in zip(plan.ranked, rows_of_features, strict=True):
        size = rows - 1
        sizes.append(size)
        vocabularies.append(ids[:size])
    return Vocabulary(
        vocabularies,
        DIM,
        sizes=sizes,
        lr=plan.course.lr,
    )


def _managed(policy: str) -> Callable[[Plan], Tables]:
    def make(plan: Plan) -> Tables:
        rows = plan.rows(row_bytes(DIM) + MCH_LFU_BYTES)
        return ManagedCollision(
            rows,
            plan.features,
            DIM,
            policy,
            plan.course.lr,
        )

    return make


def _recstore(eviction: LFU | LRU) -> Callable[[Plan], Tables]:
    def make(plan: Plan) -> Tables:
        rows_of_features = plan.rows(RECSTORE_ROW_BYTES)
        options = {}
        for feature, rows in zip(plan.features, rows_of_features, strict=True):
            # room for all ids of a step
            max_rows = max(rows, plan.course.batch)
            options[f"t_{feature}"] = TableOptions(
                max_rows=max_rows,
                eviction=eviction,
            )
        return RecStoreTables(
            plan.features,
            DIM,
            options,
            plan.course.lr,
        )

    return make


def _expiring(plan: Plan) -> Tables:
    options = TableOptions(expiry=Expiry(steps=60))
    return RecStoreTables(
        plan.features,
        DIM,
        options,
        plan.course.lr,
    )


def _unlimited(plan: Plan) -> Tables:
    return RecStoreTables(
        plan.features,
        DIM,
        TableOptions(),
        plan.course.lr,
    )


def _modulo(plan: Plan) -> Tables:
    return Modulo(
        plan.rows(row_bytes(DIM)),
        DIM,
        plan.course.lr,
    )


SIDES = (
    Side("RecStore, LFU", _recstore(LFU()), "#0b6e99"),
    Side(
        "RecStore, LFU, half-life of 50 steps",
        _recstore(LFU(half_life_steps=50)),
        "#2f9bc4",
    ),
    Side("RecStore, LRU", _recstore(LRU()), "#84c3dd"),
    Side("RecStore, expiry after 60 steps, no limit", _expiring, "#5561b5"),
    Side("RecStore, no limit", _unlimited, "#1d2f6f"),
    Side("modulo", _modulo, "#6b6b6b"),
    Side("vocabulary of the first part", _vocabulary, "#d99a2b"),
    Side("vocabulary, renewed every 4 parts", _vocabulary, "#b35c00", 4),
    Side("vocabulary, renewed every part", _vocabulary, "#7a3b00", 1),
    Side(
        "managed collision, LFU",
        _managed("lfu"),
        "#2f8f4e",
    ),
    Side(
        "managed collision, LRU",
        _managed("lru"),
        "#8cc79b",
    ),
)
"""The sides. The rows without a limit have more memory than the others, which is
reported. A vocabulary is renewed from the ids of the coming part and of as many parts
before it as lie between two renewals; rows of ids that stay are kept.
"""


def renew(vocabulary: Vocabulary, ids: Tensor) -> None:
    """Makes the vocabulary of the most frequent ids (F, N)."""
    for feature, ranked in enumerate(counted(ids)):
        size = int(vocabulary.tables.rows[feature]) - 1
        vocabulary.renew(feature, ranked[:size])


def measure(
    side: Side,
    log: ClickLog,
    course: Course,
    seed: int,
) -> dict[str, Any]:
    """Tests and trains on the parts in turn, and returns the results of the parts."""
    torch.manual_seed(seed)
    bounds = np.linspace(0, len(log), course.parts + 1).astype(int).tolist()
    parts = [log.part(begin, end) for begin, end in pairwise(bounds)]
    plan = Plan(course, log.features, counted(parts[0].ids))
    tables = side.make(plan)
    trainer = Trainer(
        tables,
        log,
        course.layers,
        DIM,
        course.batch,
    )
    aucs = []
    losses = []
    sizes = []
    for number, part in enumerate(parts):
        if number > 0:
            auc, logloss = trainer.evaluate(part)
            aucs.append(round(auc, 5))
            losses.append(round(logloss, 5))
        every = side.renew_parts
        if every is not None and number > 0 and number % every == 0:
            assert isinstance(tables, Vocabulary)
            first = max(0, number - every)
            window = parts[first : number + 1]
            window_ids = [earlier.ids for earlier in window]
            renew(tables, torch.cat(window_ids, dim=1))
        trainer.train(part)
        sizes.append(tables.memory_bytes())
    extra_passes = side.extra_passes(tables, course.parts)
    return {
        "log": log.name,
        "side": side.name,
        "seed": seed,
        "auc": aucs,
        "logloss": losses,
        "bytes": sizes,
        "extra_passes": round(extra_passes, 3),
        "commit": commit(),
        "torch": torch.__version__,
    }


def sweep(log: ClickLog, rows: list[dict[str, Any]]) -> None:
    """Measures the runs that are not among the results, and saves each of them."""
    course = COURSES[log.name]
    have = {(row["log"], row["side"], row["seed"]) for row in rows}
    runs = []
    for seed in SEEDS:
        for side in SIDES:
            run = (log.name, side.name, seed)
            if run not in have:
                runs.append((side, seed))
    is_quiet = not sys.stderr.isatty()
    for side, seed in tqdm(runs, desc=log.name, disable=is_quiet):
        row = measure(side, log, course, seed)
        rows.append(row)
        save(RESULTS, rows)


def results_of(
    rows: list[dict[str, Any]],
    log_name: str,
    side: Side,
) -> list[dict[str, Any]]:
    """Returns the results of all seeds."""
    results = []
    for row in rows:
        if row["log"] == log_name and row["side"] == side.name:
            results.append(row)
    return results


def measured_logs(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the names of the logs that have results."""
    names = {row["log"] for row in rows}
    return [name for name in COURSES if name in names]


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the table of docs/measured.md.

    It has the mean AUC of all parts but the first one, its 95 % interval, and the
    largest memory.
    """
    logs = measured_logs(rows)
    columns = ["tables", "extra passes"]
    columns += [COURSES[name].title for name in logs]
    lines = []
    for side in SIDES:
        cells = [side.name]
        passes: list[str] = []
        for name in logs:
            runs = results_of(rows, name, side)
            if not runs:
                cells.append("-")
                continue
            aucs = [float(np.mean(run["auc"])) for run in runs]
            mean, half = interval(aucs)
            first = runs[0]
            megabytes = max(first["bytes"]) / 1e6
            cells.append(f"{mean:.4f} ± {half:.4f} ({megabytes:.2f} MB)")
            passes.append(f"{first['extra_passes']:.2g}")
        cells.insert(1, _range(passes))
        lines.append(cells)
    return markdown(columns, lines)


def _range(values: Sequence[str]) -> str:
    ordered = sorted(set(values), key=float)
    if len(ordered) < 2:
        return "".join(ordered)
    return f"{ordered[0]} to {ordered[-1]}"


def plot(rows: list[dict[str, Any]]) -> None:
    """Draws the AUC over time for each log, as the mean of the seeds."""
    logs = measured_logs(rows)
    figure, grid = plt.subplots(
        2,
        2,
        figsize=(9.0, 7.6),
        layout="constrained",
    )
    all_axes = grid.flatten()
    for name, axes in zip(logs, all_axes[: len(logs)], strict=True):
        for side in SIDES:
            runs = results_of(rows, name, side)
            if runs:
                aucs = [run["auc"] for run in runs]
                means = np.mean(aucs, axis=0)
                part_numbers = np.arange(2, len(means) + 2)
                width = 2.0 if side.name.startswith("RecStore") else 1.2
                axes.plot(
                    part_numbers,
                    means,
                    color=side.color,
                    linewidth=width,
                    label=side.name,
                )
        course = COURSES[name]
        axes.set_title(f"{course.title}, {course.budget_mb:g} MB", fontsize=10)
        axes.set_xlabel("part that is predicted before it is trained on")
        axes.set_ylabel("AUC")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=8,
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
    parser.add_argument("--criteo", help="Criteo TSV file, plain or gzip")
    parser.add_argument("--movielens", help="folder with ml-100k.inter.gz")
    parser.add_argument("--games", help="the file Video.txt of SASRec")
    parser.add_argument("--stream", action="store_true", help="the generated stream")
    parser.add_argument("--new", action="store_true", help="repeat the runs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logs = []
    if arguments.stream:
        logs.append(stream())
    if arguments.movielens:
        logs.append(movielens(arguments.movielens))
    if arguments.criteo:
        logs.append(criteo(arguments.criteo))
    if arguments.games:
        logs.append(games(arguments.games))
    rows = load(RESULTS)
    if arguments.new:
        names = {log.name for log in logs}
        rows = [row for row in rows if row["log"] not in names]
    for log in logs:
        sweep(log, rows)
    write_pages(rows)


if __name__ == "__main__":
    main()
