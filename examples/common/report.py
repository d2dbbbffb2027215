"""The report that a run prints at its end."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from common.command import DataError
from common.run_settings import Bounds
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from torchrec_recstore import TableStats

ALL = "all"
"""In the place of a table's name: all of them together."""

PART_TITLES = {
    "input_dist": "input dist",
    "lookup": "lookup",
    "dense": "dense",
    "update": "update",
    "reading": "reading",
}
"""What a step's time is split into; the parts' sum is the whole of it. See ``StepSplit``."""


def short(value: float) -> str:
    """A count in four characters or so: 950, 12.5k, 3M."""
    for factor, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"


def short_bytes(value: float) -> str:
    """A size: 950 B, 12.5 kB, 3 MB."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.3g} B"


def share(value: float) -> str:
    """A share of a whole, in per cent."""
    return f"{100 * value:.3g} %"


def plain(value: Any) -> str:
    """A setting or a result."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"
    return str(value)


STDOUT = Path("-")


def check_file(path: Path | None) -> None:
    """Finds out before the work whether its result can be written; leaves what is there as it is.

    Args:
        path: of the file; None and "-" are none.

    Raises:
        DataError: its folder does not exist, it is a folder itself, or it cannot be written to.
    """
    if path is None or path == STDOUT:
        return
    place = Path(os.path.realpath(path))
    if not place.parent.is_dir():
        raise DataError(f"{path}: no such folder")
    if place.is_dir():
        raise DataError(f"{path}: this is a folder, and no file")
    try:
        if place.is_file():
            place.open("ab").close()
        elif not place.exists():
            place.open("xb").close()
            place.unlink()
        elif not os.access(place, os.W_OK):  # a pipe's other end would take opening and closing for all there is
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def result_of(tables: Mapping[str, TableStats], since_step: int = 0) -> dict[str, Any]:
    """What a run's result says of its tables: rows and bytes of each, and what RecStore's have done.

    Args:
        tables: what :func:`stats_of_tables` gives.
        since_step: where this process went on with the run. What tables have done is counted from there.
    """
    return {
        "rows": {name: stats.rows for name, stats in tables.items()},
        "bytes": {name: stats.bytes for name, stats in tables.items()},
        "counts_since_step": since_step,
        "counts": {name: _counts(stats) for name, stats in tables.items() if stats.lookups},
        "hit_rate": hit_rate(total(tables)),
    }


def _counts(stats: TableStats) -> dict[str, int]:
    # A table's steps come with its checkpoint, and are those of the whole run, which has them elsewhere.
    return {name: count for name, count in asdict(stats).items() if name != "steps"}


def print_tables(console: Console, result: Mapping[str, Any], bounds: Bounds) -> None:
    """Prints what every table holds, and all of them together; where there are bounds, also what came of them.

    Args:
        console: where.
        result: with what :func:`result_of` gives.
        bounds: of the tables.
    """
    rows, sizes, counts = result["rows"], result["bytes"], result["counts"]
    tables = {name: TableStats(**({"rows": rows[name], "bytes": sizes[name]} | counts.get(name, {}))) for name in rows}
    columns = _columns(bounds)
    # Rows and bytes are what tables hold, whoever made them.
    shown = Table(caption=counted_since(result) if len(columns) > 2 else None)
    shown.add_column("table")
    for title in columns:
        shown.add_column(title, justify="right")
    for name, stats in tables.items():
        shown.add_row(name, *(number(stats) for number in columns.values()))
    shown.add_section()
    shown.add_row("all", *(number(total(tables)) for number in columns.values()))
    console.print(shown)


def counted_since(result: Mapping[str, Any]) -> str | None:
    """Since when counts of a result are counted, where that is not the run's beginning."""
    step = result.get("counts_since_step")
    return f"hits and other counts: since the run was resumed at step {step:,}" if step else None


def in_words(tables: Mapping[str, TableStats], bounds: Bounds) -> str:
    """What :func:`print_tables` has in its last row, in a line."""
    return ", ".join(f"{title} {number(total(tables))}" for title, number in _columns(bounds).items())


def total(tables: Mapping[str, TableStats]) -> TableStats:
    """The sum over tables; of ``steps`` as well, which no one shows."""
    return TableStats(**{f.name: sum(getattr(stats, f.name) for stats in tables.values()) for f in fields(TableStats)})


def since(before: Mapping[str, TableStats], now: Mapping[str, TableStats]) -> dict[str, TableStats]:
    """What the tables hold now, and what they have done since before."""
    held = ("rows", "cold_rows", "bytes")
    done = [f.name for f in fields(TableStats) if f.name not in held]
    return {
        name: replace(stats, **{count: getattr(stats, count) - getattr(before[name], count) for count in done})
        for name, stats in now.items()
    }


def hit_rate(stats: TableStats) -> float | None:
    """The share of looked up ids that had a row in memory; None where there was none."""
    return stats.hits / stats.lookups if stats.lookups else None


def _columns(bounds: Bounds) -> dict[str, Callable[[TableStats], str]]:
    """What is shown of a table, by title."""
    columns: dict[str, Callable[[TableStats], str]] = {
        "rows": lambda stats: f"{stats.rows:,}",
        "bytes": lambda stats: decimal(stats.bytes),
    }
    if bounds.flags():
        columns["hit rate"] = lambda stats: "-" if (rate := hit_rate(stats)) is None else f"{rate:.1%}"
    if bounds.max_rows is not None:
        columns["evicted"] = lambda stats: f"{stats.evicted:,}"
    if bounds.expire_steps is not None:
        columns["expired"] = lambda stats: f"{stats.expired:,}"
    if bounds.min_frequency is not None:
        columns["refused"] = lambda stats: f"{stats.refused:,}"
    if bounds.cold_store is not None:
        columns["cold rows"] = lambda stats: f"{stats.cold_rows:,}"
        columns["cold hits"] = lambda stats: f"{stats.cold_hits:,}"
    return columns


def console_for(json_out: Path | None) -> Console:
    """Where the report goes: stdout, or stderr where stdout is the JSON result's."""
    return Console(stderr=json_out == STDOUT)


def finite(value: Any) -> Any:
    """The same, with null in the place of every number that is not finite: NaN is no JSON."""
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    """Writes the result, where a path is given.

    Raises:
        DataError: it cannot be written.
    """
    if path is None:
        return
    text = json.dumps(finite(result), indent=2, allow_nan=False) + "\n"
    if path == STDOUT:
        sys.stdout.write(text)
        return
    try:
        path.write_text(text)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
