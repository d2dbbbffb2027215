"""Draws the charts of docs/measured.md from ``results.json``."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from figures import machine
from matplotlib.axes import Axes
from measure import ROOT

SPEED = ROOT / "docs" / "speed.png"
MEMORY = ROOT / "docs" / "memory.png"
OURS = "#0b6e99"
THEIRS = "#b9b9b9"


def draw(rows: list[dict[str, Any]]) -> None:
    """Draws the charts of speed and memory, of the rows that are there."""
    kernels = []
    memory = []
    for row in rows:
        is_headline = (
            row["benchmark"] == "kernel"
            and row["case"] == "criteo"
            and row["optimizer"] == "rowwise_adagrad"
            and row["lane"] == "shipped"
        )
        if is_headline:
            kernels.append(row)
        if row["benchmark"] == "memory":
            memory.append(row)
    if kernels:
        _speed(kernels[0])
    if memory:
        _memory(memory[-1])


def _bars(
    axes: Axes,
    names: list[str],
    values: list[float],
    unit: str,
) -> None:
    colors = [OURS if name.startswith("RecStore") else THEIRS for name in names]
    bars = axes.barh(names, values, color=colors)
    axes.bar_label(
        bars,
        [f"{value:.1f} {unit}" for value in values],
        padding=3,
    )
    axes.set_xlim(0, 1.2 * max(values))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def _speed(row: dict[str, Any]) -> None:
    figure, axes = plt.subplots(figsize=(7.2, 2.4), layout="constrained")
    parts = {"lookup": "forward_ms", "lookup and update": "total_ms"}
    sides = {"recstore": "RecStore", "fbgemm": "FBGEMM (FUSED)"}
    names = []
    values = []
    for part, key in parts.items():
        for side, name in sides.items():
            names.append(f"{name}: {part}")
            milliseconds = row[side][key]
            values.append(milliseconds["median"])
    _bars(axes, names, values, "ms")
    axes.set_xlabel("milliseconds, median")
    processor = machine(row["cpu"])
    figure.suptitle(
        f"{row['ids']:,} ids of 26 tables, dim 64, row-wise Adagrad, {processor}",
        fontsize=10,
    )
    figure.savefig(SPEED, dpi=150, facecolor="white")
    plt.close(figure)


def _memory(row: dict[str, Any]) -> None:
    figure, axes = plt.subplots(figsize=(7.2, 1.7), layout="constrained")
    names = ["weights, optimizer state", "with the id", "RecStore: resident"]
    payload = row["payload_bytes_per_row"]
    values = [payload, payload + 8, row["resident_bytes_per_row"]]
    _bars(axes, names, values, "B")
    axes.set_xlabel("bytes a row")
    axes.set_title(
        f"a table of {row['rows']:,} rows of dim 64, row-wise Adagrad",
        fontsize=10,
    )
    figure.savefig(MEMORY, dpi=150, facecolor="white")
    plt.close(figure)
