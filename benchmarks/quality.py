"""Measures the test AUC of DLRM on a Criteo click log against the memory of its tables.

    python benchmarks/quality.py --data criteo_kaggle_sample.tsv.gz

The tables are RecStore's and TorchRec's. Each run is ``examples/dlrm/train.py`` with
its default settings and one limit for each of the 26 tables. RecStore's tables take raw
ids, keep at most this many rows, and evict the least frequently used ones. FUSED tables
have this many rows, and take ids modulo this number. Both train with row-wise Adagrad,
whose state counts as memory. Writes ``benchmarks/quality.json`` and the plot
``docs/quality.png``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from tqdm import tqdm

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "quality.json"
PLOT = ROOT / "docs" / "quality.png"
SEEDS = (0, 1, 2)
LIMITS = {
    "recstore": (600, 1_000, 2_000, 5_000, 15_000, None),
    "fused": (300, 1_000, 3_000, 10_000, 30_000, 100_000),
}
"""The rows of each table by backend. RecStore needs at least the ids of a step, 512."""

NAMES = {
    "recstore": "RecStore, raw ids",
    "fused": "TorchRec FUSED, ids modulo the rows",
}
COLORS = {"recstore": "#0b6e99", "fused": "#b35c00"}


def measure(data: str, backend: str, limit: int | None, seed: int) -> dict[str, Any]:
    """Trains one epoch and returns the bytes of the tables and the test AUC."""
    flags = ["--backend", backend, "--seed", str(seed)]
    if backend == "fused":
        flags += ["--num-embeddings", str(limit)]
    elif limit is not None:
        flags += ["--max-rows", str(limit), "--eviction", "lfu"]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, str(ROOT / "examples/dlrm/train.py")]
        command += ["--data", data, "--no-log", *flags, "--json", str(result)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        measured = json.loads(result.read_text())
    return {
        "backend": backend,
        "limit": limit,
        "seed": seed,
        "bytes": sum(measured["bytes"].values()),
        "test_auc": measured["test_auc"],
    }


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws the mean test AUC over the seeds, and its range, against the memory."""
    figure, axes = plt.subplots(figsize=(7.2, 3.6), layout="constrained")
    for backend, name in NAMES.items():
        memory_mb = []
        seed_aucs = []
        for limit in LIMITS[backend]:
            runs = [
                row
                for row in rows
                if row["backend"] == backend and row["limit"] == limit
            ]
            memory_mb.append(np.mean([run["bytes"] for run in runs]) / 1e6)
            seed_aucs.append([run["test_auc"] for run in runs])
        aucs = np.array(seed_aucs)
        axes.fill_between(
            memory_mb,
            aucs.min(axis=1),
            aucs.max(axis=1),
            color=COLORS[backend],
            alpha=0.18,
            linewidth=0,
        )
        mean = aucs.mean(axis=1)
        axes.plot(memory_mb, mean, "o-", color=COLORS[backend], label=name)
    axes.set_xscale("log")
    axes.set_xticks([1, 2, 5, 10, 20, 50, 100, 200])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    axes.set_xlabel("memory of the 26 tables and their optimizer state, MB")
    axes.set_ylabel("test AUC")
    axes.set_title("DLRM on the Criteo sample, one epoch, three seeds", fontsize=10)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=150, facecolor="white")


def main() -> None:
    """Measures every limit with every seed, and writes the results and the plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data",
        help=(
            "Criteo TSV file, plain or gzip. Without it, only the plot is drawn again."
        ),
    )
    data = parser.parse_args().data
    if data:
        runs = []
        for backend, limits in LIMITS.items():
            runs += [(backend, limit, seed) for limit in limits for seed in SEEDS]
        rows = []
        for backend, limit, seed in tqdm(runs, disable=not sys.stderr.isatty()):
            rows.append(measure(data, backend, limit, seed))
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    plot(json.loads(RESULTS.read_text()), PLOT)


if __name__ == "__main__":
    main()
