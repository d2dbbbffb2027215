"""Progress bars on stderr with the rate and the remaining time.

Nothing is shown if stderr is not a terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal

from rich import progress as bars
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

Unit = Literal["rows", "bytes"]


class _RateColumn(bars.ProgressColumn):
    """A column with the recent rate: ``1.2M rows/s`` or ``310.4 MB/s``."""

    def __init__(self, unit: Unit) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: bars.Task) -> Text:
        speed = task.finished_speed or task.speed
        text = "" if speed is None else rate(speed, self._unit)
        return Text(text, style="progress.data.speed")


class TimeLeftColumn(bars.ProgressColumn):
    """A column with the elapsed time, and the remaining time if a step has ended."""

    def render(self, task: bars.Task) -> Text:
        """Returns the elapsed time, and the remaining time if it is known."""
        elapsed_s = task.elapsed or 0.0
        text = str(timedelta(seconds=int(elapsed_s)))
        if task.completed and task.total is not None:
            # The rate is that at the end of the last step: the current rate falls until
            # the next one ends.
            total_s = task.fields["done_after"] / task.completed * task.total
            remaining_s = max(0.0, total_s - elapsed_s)
            remaining = timedelta(seconds=int(remaining_s))
            text += f", about {remaining} left"
        return Text(text, style="progress.remaining")


def rate(per_second: float, unit: Unit) -> str:
    """Formats a number of rows or bytes per second with about three digits."""
    if unit == "bytes":
        return f"{decimal(int(per_second))}/s"
    for size, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if per_second >= size:
            return f"{per_second / size:.1f}{name} rows/s"
    return f"{per_second:.0f} rows/s"


@contextmanager
def progress(
    description: str,
    total: int,
    unit: Unit = "rows",
) -> Iterator[Callable[[int], object]]:
    """Shows a bar with the rate and the remaining time while the body runs.

    Yields a function to be called with the number of rows or bytes that were completed
    since its last call.
    """
    count = bars.DownloadColumn() if unit == "bytes" else bars.MofNCompleteColumn()
    with _bar(count, _RateColumn(unit), bars.TimeRemainingColumn()) as bar:
        task = bar.add_task(description, total=total)
        yield lambda done: bar.advance(task, done)


@contextmanager
def steps(total: int) -> Iterator[Callable[[str], object]]:
    """Shows a bar over a few long steps, with the elapsed and the remaining time.

    Yields a function to be called with the name of each step when the step begins.
    """
    with _bar(bars.MofNCompleteColumn(), TimeLeftColumn()) as bar:
        task = bar.add_task("", total=total)
        begun = False

        def begin(name: str) -> None:
            nonlocal begun
            bar.update(
                task,
                description=name,
                advance=1 if begun else 0,
                done_after=bar.tasks[0].elapsed,
            )
            begun = True

        yield begin


def _bar(*columns: bars.ProgressColumn) -> bars.Progress:
    # rich must not decide whether stderr is a terminal: with FORCE_COLOR it would write
    # bars to files.
    quiet = not sys.stderr.isatty()
    return bars.Progress(
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        *columns,
        console=Console(stderr=True),
        transient=True,
        disable=quiet,
    )
