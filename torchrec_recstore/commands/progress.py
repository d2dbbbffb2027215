"""A bar on stderr for long work: how much is done, how fast, and the time left. Silent where that is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

Unit = Literal["rows", "bytes"]


class RateColumn(ProgressColumn):
    """What was done a second of late: ``1.2M rows/s`` or ``310.4 MB/s``."""

    def __init__(self, unit: Unit) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        """The rate, empty as long as none is known."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else rate(speed, self._unit), style="progress.data.speed")


class TimeLeftColumn(ProgressColumn):
    """The time since the first step, and what the others take at the pace of those done."""

    def render(self, task: Task) -> Text:
        """Both, the second as long as it is known."""
        elapsed = task.elapsed or 0.0
        said = str(timedelta(seconds=int(elapsed)))
        if task.completed and task.total is not None:
            # Counted down from the end of the last step: at the pace of this moment it would grow with the time gone.
            left = max(0.0, task.fields["done_after"] / task.completed * task.total - elapsed)
            said += f", about {timedelta(seconds=int(left))} left"
        return Text(said, style="progress.remaining")


def rate(per_second: float, unit: Unit) -> str:
    """A rate in three digits or so.

    Args:
        per_second: rows or bytes.
        unit: which.
    """
    if unit == "bytes":
        return f"{decimal(int(per_second))}/s"
    for size, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if per_second >= size:
            return f"{per_second / size:.1f}{name} rows/s"
    return f"{per_second:.0f} rows/s"


@contextmanager
def progress(what: str, total: int, unit: Unit = "rows") -> Iterator[Callable[[int], object]]:
    """A bar with rate and time left, gone when its body ends.

    Args:
        what: is being done.
        total: rows or bytes that there are to do.
        unit: which.

    Yields:
        What is called with how many more are done.
    """
    count = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    with _bar(count, RateColumn(unit), TimeRemainingColumn()) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)


@contextmanager
def steps(total: int) -> Iterator[Callable[[str], object]]:
    """A bar over a few long steps, with the time since the first and the time left.

    Yields:
        What is called as each step begins, with its name.
    """
    with _bar(MofNCompleteColumn(), TimeLeftColumn()) as bar:
        task = bar.add_task("", total=total)
        begun = False

        def begin(name: str) -> None:
            nonlocal begun
            bar.update(task, description=name, advance=1 if begun else 0, done_after=bar.tasks[0].elapsed)
            begun = True

        yield begin


def _bar(*columns: ProgressColumn) -> Progress:
    # Not rich's own judgement: FORCE_COLOR and the like would have it write to files.
    quiet = not sys.stderr.isatty()
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"), BarColumn(), *columns, console=console, transient=True, disable=quiet
    )
