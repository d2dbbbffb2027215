"""What soak.py measures of processes, and how it judges it.

This module does not import torch.

A sample has the memory, files and threads of one process at one moment. The samples of
one process, from its start to its end, are a series. A process that was killed and
started again begins a new one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

MEMORY = {
    "rss": "VmRSS",
    "anon": "RssAnon",
    "file": "RssFile",
    "shmem": "RssShmem",
}
"""The kinds of resident memory, and their names in /proc/PID/status."""
COUNTS = ("files", "threads", "children")
WARM_UP = 1 / 12
"""The share of a run after the start of a process that is not judged."""
SHORTEST = 1 / 12
"""The share of a run that the samples of a half must span to be judged."""
MB_AN_HOUR = 6.0
"""The slope up to which memory counts as flat.

It is that of anonymous and of shared memory in the last half.
"""
COUNT_MARGIN = 2
"""The number by which files, threads or children may grow in the last half."""
POINTS = 150
"""The number of points of a series that are kept for the plot."""
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Sample:
    """One process at one moment.

    Attributes:
        second: The time since the start of the run, in seconds.
        process: The name of the process.
        pid: The id of the process.
        rss: The resident memory in bytes, which is the sum of the next three.
        anon: The memory that the process has allocated, in bytes.
        file: The pages of files that the process has mapped, in bytes. They are the
            system's, and no leak.
        shmem: The pages of shared memory, in bytes.
        files: The number of open files.
        threads: The number of threads.
        children: The number of processes that the process has started and that run.
        processor_s: The processor time of the process so far, in seconds.
    """

    second: float
    process: str
    pid: int
    rss: int
    anon: int
    file: int
    shmem: int
    files: int
    threads: int
    children: int
    processor_s: float


def sample_of(process: str, pid: int, second: float) -> Sample | None:
    """Reads a sample from /proc. Returns None if the process does not run.

    Args:
        process: The name of the process.
        pid: The id of the process.
        second: The time since the start of the run, in seconds.
    """
    folder = Path("/proc", str(pid))
    try:
        status_lines = (folder / "status").read_text().splitlines()
        files = len(list((folder / "fd").iterdir()))
        stat = (folder / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    status = dict(line.split(":", 1) for line in status_lines)
    if "VmRSS" not in status:  # a process that has ended and that nobody has waited for
        return None
    _, _, fields_after_name = stat.rpartition(")")
    fields = fields_after_name.split()
    memory = {}
    for name, key in MEMORY.items():
        kilobytes, _ = status[key].split()
        memory[name] = 1024 * int(kilobytes)
    user_ticks = int(fields[11])
    system_ticks = int(fields[12])
    ticks = user_ticks + system_ticks
    return Sample(
        second=round(second, 1),
        process=process,
        pid=pid,
        **memory,
        files=files,
        threads=int(status["Threads"]),
        children=len(children_of(pid)),
        processor_s=ticks / TICKS_A_SECOND,
    )


def children_of(pid: int) -> list[int]:
    """Returns the ids of the processes that a process has started."""
    children: list[int] = []
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            pids = (thread / "children").read_text().split()
            children += map(int, pids)
    except (FileNotFoundError, ProcessLookupError):
        return children
    return children


@dataclass(frozen=True)
class Judgement:
    """What the samples of one process say.

    Attributes:
        process: The name of the process.
        series: The number of series: 1, and one for each new start.
        anon_mb: The anonymous memory after the warm-up of the longest series, and at
            its end, in MB.
        rss_mb: The same for the resident memory.
        first: The slope of each kind of memory in the first half of the run, in MB an
            hour. None: too few samples.
        last: The slope of each kind of memory in the last half, which is judged.
        last_quarter: The slope of each kind of memory in the last quarter, which tells
            whether growth has ended.
        counts: The number of files, of threads and of children, after the warm-up of
            the longest series and at its end. A server has other numbers when it
            becomes the primary of its pair because the other one was killed.
        counts_of_last: The same of the longest series in the last half.
        problems: A line for each thing that grows. Empty: the process is flat.
    """

    process: str
    series: int
    anon_mb: tuple[float, float]
    rss_mb: tuple[float, float]
    first: dict[str, float | None]
    last: dict[str, float | None]
    last_quarter: dict[str, float | None]
    counts: dict[str, tuple[float, float]]
    counts_of_last: dict[str, tuple[float, float]]
    problems: list[str]


def series_of(samples: Iterable[Sample]) -> dict[str, list[list[Sample]]]:
    """Returns the series of each process, in the order of their starts."""
    series: dict[tuple[str, int], list[Sample]] = {}
    for sample in samples:
        key = (sample.process, sample.pid)
        points = series.setdefault(key, [])
        points.append(sample)

    by_process: dict[str, list[list[Sample]]] = {}
    for (process, _), points in series.items():
        series_of_process = by_process.setdefault(process, [])
        series_of_process.append(points)
    return by_process


def slope(series: Sequence[Sequence[tuple[float, float]]]) -> float | None:
    """Returns the slope of lines through several series, by least squares.

    The lines have one slope, and each of them has a height of its own: a process that
    was started again may have more or less memory than before.

    Args:
        series: The points (x, y) of each series.

    Returns:
        The slope, or None if no series has two points with different x.
    """
    products = 0.0
    squares = 0.0
    for points in series:
        if not points:
            continue
        mean_x = sum(x for x, _ in points) / len(points)
        mean_y = sum(y for _, y in points) / len(points)
        for x, y in points:
            distance_x = x - mean_x
            products += distance_x * (y - mean_y)
            squares += distance_x**2
    if squares > 0:
        return products / squares
    return None


def judge(samples: Sequence[Sample], mb_an_hour: float = MB_AN_HOUR) -> list[Judgement]:
    """Judges the samples of a run, process by process.

    Args:
        samples: All samples of the run.
        mb_an_hour: The slope up to which memory counts as flat.
    """
    end = max(sample.second for sample in samples)
    begin = min(sample.second for sample in samples)
    length = end - begin
    warm_up = length * WARM_UP
    middle = begin + length / 2
    judgements = []
    for process, series in series_of(samples).items():
        warm = []
        for points in series:
            warm_second = points[0].second + warm_up
            warm += _between([points], warm_second, math.inf)
        judgement = _judge_process(
            process,
            longest=max(warm, key=_span),
            first=_between(warm, -math.inf, middle),
            last=_between(warm, middle, math.inf),
            last_quarter=_between(warm, middle + length / 4, math.inf),
            shortest_s=length * SHORTEST,
            mb_an_hour=mb_an_hour,
            series=len(series),
        )
        judgements.append(judgement)
    return judgements


def _between(
    series: list[list[Sample]],
    begin: float,
    end: float,
) -> list[list[Sample]]:
    """Returns the points of each series in ``[begin, end)``."""
    parts = []
    for points in series:
        parts.append([point for point in points if begin <= point.second < end])
    return parts


def _judge_process(
    process: str,
    longest: list[Sample],
    first: list[list[Sample]],
    last: list[list[Sample]],
    last_quarter: list[list[Sample]],
    shortest_s: float,
    mb_an_hour: float,
    series: int,
) -> Judgement:
    problems = []
    slopes_of_last = _slopes(last, shortest_s)
    for name in ("anon", "shmem"):
        value = slopes_of_last[name]
        if value is None:
            problems.append(
                f"{process}: too few samples in the last half to judge {MEMORY[name]}"
            )
        elif value > mb_an_hour:
            problems.append(
                f"{process}: {MEMORY[name]} grows by {value:.1f} MB an hour, of"
                f" {mb_an_hour:g} allowed"
            )
    counts_of_last = _counts(max(last, key=_span))
    for name, (begins, ends) in counts_of_last.items():
        if ends > begins + COUNT_MARGIN:
            problems.append(
                f"{process}: {name} grow from {begins:g} to {ends:g}, by {COUNT_MARGIN}"
                " allowed"
            )
    return Judgement(
        process=process,
        series=series,
        anon_mb=_ends(longest, lambda point: point.anon / 1e6),
        rss_mb=_ends(longest, lambda point: point.rss / 1e6),
        first=_slopes(first, shortest_s),
        last=slopes_of_last,
        last_quarter=_slopes(last_quarter, shortest_s),
        counts=_counts(longest),
        counts_of_last=counts_of_last,
        problems=problems,
    )


def _counts(points: list[Sample]) -> dict[str, tuple[float, float]]:
    """Returns each of ``COUNTS`` at the beginning and at the end."""
    return {name: _ends(points, attrgetter(name)) for name in COUNTS}


def _slopes(series: list[list[Sample]], shortest_s: float) -> dict[str, float | None]:
    """Returns the slope of each kind of memory in MB an hour.

    It is None if all series together are too short.
    """
    measured_s = sum(_span(points) for points in series)
    slopes: dict[str, float | None] = {}
    for name in MEMORY:
        lines = []
        for points in series:
            line = []
            for point in points:
                hours = point.second / 3600
                megabytes = getattr(point, name) / 1e6
                line.append((hours, megabytes))
            lines.append(line)
        slopes[name] = slope(lines) if measured_s >= shortest_s else None
    return slopes


def _span(points: list[Sample]) -> float:
    if not points:
        return 0.0
    return points[-1].second - points[0].second


def _ends(
    points: list[Sample],
    value_of: Callable[[Sample], float],
) -> tuple[float, float]:
    """Returns the medians of the first and of the last fifth of the points.

    NaN: there is no point.
    """
    if not points:
        return float("nan"), float("nan")
    count = max(1, len(points) // 5)
    begins = median(value_of(point) for point in points[:count])
    ends = median(value_of(point) for point in points[-count:])
    return begins, ends


def thinned(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Returns at most ``POINTS`` points of each series for the plot.

    The points are columns for JSON.
    """
    all_columns = []
    for process, series in series_of(samples).items():
        for points in series:
            step = math.ceil(len(points) / POINTS)
            thinned_points = points[::step]
            columns: dict[str, Any] = {"process": process}
            for name in ("second", *MEMORY, *COUNTS):
                columns[name] = [getattr(point, name) for point in thinned_points]
            all_columns.append(columns)
    return all_columns


def table_lines(processes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the lines of the table of docs/operations.md.

    Args:
        processes: The judgements as they are in ``soak.json``.
    """

    def slope_of(value: float | None) -> str:
        return "-" if value is None else f"{value:+.1f}"

    def change(values: Sequence[float]) -> str:
        begins, ends = (round(value) for value in values)
        return f"{begins}" if begins == ends else f"{begins} to {ends}"

    columns = (
        "process",
        "starts",
        "resident",
        "anonymous",
        "first half",
        "last half",
        "last quarter",
        "files",
        "threads",
    )
    rows = [columns, ("---",) * len(columns)]
    for process in processes:
        rows.append(
            (
                process["process"],
                str(process["series"]),
                change(process["rss_mb"]),
                change(process["anon_mb"]),
                slope_of(process["first"]["anon"]),
                slope_of(process["last"]["anon"]),
                slope_of(process["last_quarter"]["anon"]),
                change(process["counts"]["files"]),
                change(process["counts"]["threads"]),
            )
        )
    return [f"| {' | '.join(row)} |" for row in rows]


def plot(
    series: Sequence[dict[str, Any]],
    kills: Sequence[tuple[float, str]],
    path: Path,
) -> None:
    """Draws memory, files and threads of each process over the time.

    Args:
        series: The columns of each series; see :func:`thinned`.
        kills: The second and the name of each process that was killed.
        path: The file of the plot.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    panels = {
        "rss": ("resident memory, MB", 1e-6),
        "anon": ("of it anonymous, MB", 1e-6),
        "files": ("open files", 1.0),
        "threads": ("threads", 1.0),
    }
    figure, axes = pyplot.subplots(
        nrows=len(panels),
        figsize=(9, 12),
        sharex=True,
        layout="constrained",
    )
    for axis, (column, (label, scale)) in zip(axes, panels.items(), strict=True):
        _draw_series(axis, series, column, scale)
        for second, _ in kills:
            axis.axvline(
                second / 3600,
                color="grey",
                linewidth=0.6,
                linestyle=":",
            )
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        loc="outside upper center",
        ncols=7,
    )
    axes[-1].set_xlabel(
        "hours; a dotted line is a process that was killed and started again"
    )
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _draw_series(
    axis: Any,
    series: Sequence[dict[str, Any]],
    column: str,
    scale: float,
) -> None:
    """Draws a column of each series, with one label for each process."""
    from matplotlib import pyplot

    colours = pyplot.get_cmap("tab10")
    names = list(dict.fromkeys(columns["process"] for columns in series))
    drawn_names = set()
    for columns in series:
        hours = [second / 3600 for second in columns["second"]]
        values = [value * scale for value in columns[column]]
        name = columns["process"]
        number = names.index(name)
        axis.plot(
            hours,
            values,
            color=colours(number % 10),
            linestyle="-" if number < 10 else "--",
            linewidth=1.3,
            label=None if name in drawn_names else name,
        )
        drawn_names.add(name)
