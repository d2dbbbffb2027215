"""Prints the report of a run at its end, and writes its result as JSON."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from common.command import DataError
from torchrec_recstore import TableStats

ALL = "all"
"""The name under which the sum over all tables is reported."""

PART_TITLES = {
    "input_dist": "input dist",
    "lookup": "lookup",
    "dense": "dense",
    "update": "update",
    "reading": "reading",
}
"""The titles of the parts of a step's time.

The parts add up to the whole step. See ``StepSplit``.
"""

STDOUT = Path("-")


def short(value: float) -> str:
    """Formats a count with about four characters: 950, 12.5k, 3M."""
    for factor, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"


def short_bytes(value: float) -> str:
    """Formats a number of bytes: 950 B, 12.5 kB, 3 MB."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.3g} B"


def share(value: float) -> str:
    """Formats a fraction as a percentage."""
    return f"{100 * value:.3g} %"


def plain(value: Any) -> str:
    """Formats the value of a setting or a result."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"
    return str(value)


def check_file(path: Path | None) -> None:
    """Checks before the work begins that a result can be written to a file.

    The file is not changed.

    Args:
        path: The path of the file. None and "-" are not checked.

    Raises:
        DataError: The folder of the file does not exist, the path is a folder, or the
            file cannot be written.
    """
    if path is None or path == STDOUT:
        return
    place = Path(os.path.realpath(path))
    if not place.parent.is_dir():
        raise DataError(f"{path}: no such folder")
    if place.is_dir():
        raise DataError(f"{path}: this is a folder, not a file")
    try:
        if place.is_file():
            place.open("ab").close()
        elif not place.exists():
            place.open("xb").close()
            place.unlink()
        elif not os.access(place, os.W_OK):
            # A pipe is not opened, because its reader would see its end.
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def result_of(tables: Mapping[str, TableStats], since_step: int = 0) -> dict[str, Any]:
    """Returns the part of a run's result about its tables: rows and bytes, and the
    counts of RecStore tables.

    Args:
        tables: The statistics of the tables, from :func:`stats_of_tables`.
        since_step: The step at which this process resumed the run. Counts begin there.
            Default: 0.
    """
    counts = {}
    for name, stats in tables.items():
        if stats.lookups:
            counts[name] = _counts(stats)
    rows = {name: stats.rows for name, stats in tables.items()}
    sizes = {name: stats.bytes for name, stats in tables.items()}
    return {
        "rows": rows,
        "bytes": sizes,
        "counts_since_step": since_step,
        "counts": counts,
        "hit_rate": hit_rate(total(tables)),
    }


def _counts(stats: TableStats) -> dict[str, int]:
    counts = asdict(stats)
    # The steps of a table are restored from a checkpoint and count the whole run; the
    # result has them elsewhere.
    del counts["steps"]
    return counts


def print_result(
    console: Console,
    result: Mapping[str, Any],
    lines: Mapping[str, str],
) -> None:
    """Prints the rows and bytes of each table and of all tables, with the effects of
    limits, and the given lines.

    Args:
        console: The console to print to.
        result: A result that contains the values of :func:`result_of`. ``bounds`` are
            the limits of the tables.
        lines: What is printed below the tables.
    """
    heading = []
    for name in ("backend", "sharding"):
        if name in result:
            heading.append(str(result[name]))
    heading.append(f"world size {result['world_size']}")
    console.print(", ".join(heading))

    tables = {}
    for name, rows in result["rows"].items():
        numbers = {"rows": rows, "bytes": result["bytes"][name]}
        numbers |= result["counts"].get(name, {})
        tables[name] = TableStats(**numbers)
    columns = _columns(result.get("bounds") or {}, tables)
    # Rows and bytes are not counted since a step, so a table of rows and bytes needs no
    # caption.
    caption = None
    if len(columns) > 2:
        caption = counted_since(result)
    printed = Table(caption=caption)
    printed.add_column("table")
    for title in columns:
        printed.add_column(title, justify="right")
    for name, stats in tables.items():
        printed.add_row(name, *(text_of(stats) for text_of in columns.values()))
    printed.add_section()
    sums = total(tables)
    printed.add_row("all", *(text_of(sums) for text_of in columns.values()))
    console.print(printed)

    for name, text in lines.items():
        line = f"{name:<19}{text}" if text else name
        console.print(line, soft_wrap=True, highlight=False)


def counted_since(result: Mapping[str, Any]) -> str | None:
    """Returns a note on the step since which counts are counted.

    It is None if they are counted since the beginning of the run.
    """
    step = result.get("counts_since_step")
    if not step:
        return None
    return f"hits and other counts: since the run was resumed at step {step:,}"


def in_words(tables: Mapping[str, TableStats], limits: Mapping[str, Any]) -> str:
    """Returns the last row of the table of :func:`print_result` as one line."""
    sums = total(tables)
    parts = []
    for title, text_of in _columns(limits, tables).items():
        parts.append(f"{title} {text_of(sums)}")
    return ", ".join(parts)


def total(tables: Mapping[str, TableStats]) -> TableStats:
    """Returns the sums over all tables.

    The sum of ``steps`` has no meaning and is not shown.
    """
    sums = {}
    for field in fields(TableStats):
        name = field.name
        sums[name] = sum(getattr(stats, name) for stats in tables.values())
    return TableStats(**sums)


def since(
    earlier: Mapping[str, TableStats],
    later: Mapping[str, TableStats],
) -> dict[str, TableStats]:
    """Returns the statistics of ``later``, with the counts since ``earlier``."""
    sizes = ("rows", "cold_rows", "bytes")
    counts = [field.name for field in fields(TableStats) if field.name not in sizes]
    difference = {}
    for name, stats in later.items():
        earlier_stats = earlier[name]
        counted = {}
        for count in counts:
            counted[count] = getattr(stats, count) - getattr(earlier_stats, count)
        difference[name] = replace(stats, **counted)
    return difference


def hit_rate(stats: TableStats) -> float | None:
    """Returns the fraction of lookups that found a row in memory.

    It is None if there were no lookups.
    """
    return stats.hits / stats.lookups if stats.lookups else None


# The counts that are shown for each limit.
_COUNTS_OF_LIMITS = {
    "max_rows": ["evicted"],
    "expire_steps": ["expired"],
    "min_frequency": ["refused"],
    "cold_store": ["cold_rows", "cold_hits"],
    "nonfinite": ["nonfinite"],
    "device_rows": ["device_rows", "device_hits", "device_arrivals"],
}


def _columns(
    limits: Mapping[str, Any],
    tables: Mapping[str, TableStats],
) -> dict[str, Callable[[TableStats], str]]:
    """Returns functions that format a table's statistics, by the title of their column.

    Args:
        limits: The limits of the tables, by name. None: the limit is not set.
        tables: The statistics of the tables.
    """
    limits_set = {name for name, value in limits.items() if value is not None}
    columns: dict[str, Callable[[TableStats], str]] = {
        "rows": lambda stats: f"{stats.rows:,}",
        "bytes": lambda stats: decimal(stats.bytes),
    }
    if limits_set:
        columns["hit rate"] = _hit_text
    for limit, counts in _COUNTS_OF_LIMITS.items():
        # "nonfinite" and "device_rows" are no limits of the examples, but counts that
        # are shown if they are not 0
        has_happened = any(getattr(stats, limit, 0) for stats in tables.values())
        if limit in limits_set or has_happened:
            for count in counts:
                columns[count.replace("_", " ")] = partial(_count_text, count)
    return columns


def _hit_text(stats: TableStats) -> str:
    rate = hit_rate(stats)
    return "-" if rate is None else f"{rate:.1%}"


def _count_text(count: str, stats: TableStats) -> str:
    return f"{getattr(stats, count):,}"


def console_for(json_out: Path | None) -> Console:
    """Returns the console for the report.

    It is stdout, or stderr if the JSON result goes to stdout.
    """
    return Console(stderr=json_out == STDOUT)


def finite(value: Any) -> Any:
    """Replaces numbers that are not finite by None.

    JSON has neither NaN nor infinity.
    """
    if isinstance(value, Mapping):
        return {key: finite(member) for key, member in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    """Writes the result as JSON if a path is given.

    Raises:
        DataError: The file cannot be written.
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


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file under a temporary name and renames it.

    The file is therefore never incomplete. If the run is killed or the disk is full,
    the previous file is kept.

    Raises:
        OSError: The file cannot be written. The error names the file.
    """
    temporary = path.with_name(f".{path.name}")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
