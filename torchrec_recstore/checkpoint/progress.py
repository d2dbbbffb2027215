"""How far a save or a load is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], object]
"""Is called with the rows done and the rows of all, of this rank's shards."""


class RowCount:
    """Counts rows and tells.

    Args:
        progress: is told; None for nobody.
        total: rows that there are to do.
    """

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0

    def add(self, rows: int) -> None:
        """So many more are done."""
        self._done += rows
        if self._progress is not None:
            self._progress(self._done, self._total)
