"""The strategy of a table whose rows are in memory alone, the interface of all tiers,
and their lock.

Tests: tests/store/test_bounds.py, tests/store/test_fork.py.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Literal

import torch
from torch import Tensor

from torchrec_recstore import ops

Arrival = Literal["lookup", "update", "write"]
"""The call for which rows are brought to memory: a training lookup, an update or a
write.

A write ignores admission.
"""


class MemoryTier:
    """The strategy of a table without a cold store, whose rows are all in memory, and
    the base class of :class:`~.cold_tier.ColdTier`.
    """

    shared = False
    """Whether the rows lie in a cold store that other jobs use, too."""
    rows = 0
    """The number of rows in the cold store that are not in memory.

    It is 0 for a shared cold store.
    """

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self.image_bytes = ops.table_image_bytes(handle)
        """The size in bytes of a row with all of its state, as a cold store stores it.
        """
        self.settle: Callable[[Tensor], object] | None = None
        """Brings the rows of ids, (N,) int64, up to date in memory. None if they always
        are, because no row is also on a device.
        """
        self.lock: AbstractContextManager[object] = nullcontext()
        """Keeps rows from moving between memory and the cold store."""

    def resident(
        self,
        ids: Tensor,
        arrival: Arrival | None = None,
    ) -> AbstractContextManager[object]:
        """Brings the rows of ``ids``, (N,) int64, to memory unless ``arrival`` is None,
        and keeps rows from moving.
        """
        return self.lock

    def bring(self, ids: Tensor, arrival: Arrival) -> None:
        """Moves the rows of ``ids``, (N,) int64, into memory, and makes room for new
        rows.

        Raises ValueError if they need more rows at once than ``max_rows``. If the store
        fails, no row has moved.
        """

    def end_step(self) -> None:
        """Ends a training step."""

    def read(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the ids, (n,) int64, ascending, and images, (n, image bytes) uint8,
        of those rows that are cold.
        """
        no_ids = torch.empty(0, dtype=torch.int64)
        no_images = torch.empty(0, self.image_bytes, dtype=torch.uint8)
        return no_ids, no_images

    def prefetch(self, ids: Tensor) -> None:
        """Reads the cold rows of ``ids``, (N,) int64, ahead of the :meth:`bring` that
        needs them.
        """

    def read_into(self, rows: Tensor, ids: Tensor) -> None:
        """Overwrites the weights ``rows``, (N, columns), of those ``ids``, (N,) int64,
        whose rows are cold.
        """

    def export(self, ids: Tensor) -> ops.RowTensors:
        """Reads everything that is stored of the rows of ``ids``, (N,) int64, which all
        have a row.
        """
        return ops.table_export(self._handle, ids)

    def contains(self, ids: Tensor) -> Tensor:
        """Returns which of ``ids``, (N,) int64, have a row: (N,) bool."""
        return ops.table_contains(self._handle, ids)

    def remove(self, ids: Tensor) -> int:
        """Removes the rows of ``ids``, (N,) int64, and returns how many rows there
        were.
        """
        return int(ops.table_remove(self._handle, ids))

    def set_scores(self, ids: Tensor, scores: Tensor) -> int:
        """Sets the scores, (N,) float32, of the rows of distinct ids, (N,) int64.

        Returns the number of these rows.
        """
        return int(ops.table_set_scores(self._handle, ids, scores))

    def bury_expired(self) -> None:
        """Deletes the rows of the cold store that have expired, and records their ids
        if the table records them.
        """

    def ids(self) -> Tensor:
        """Returns the ids of all rows, (N,) int64, ascending."""
        return ops.table_ids(self._handle)

    def set_clock(self, steps: int, times: list[int]) -> None:
        """Sets the number of the table's steps, and their times, if any, which
        ``ops.table_times`` has returned.
        """
        ops.table_set_steps(self._handle, steps)
        if times:
            ops.table_set_times(self._handle, times)

    def exchange(self, other: MemoryTier) -> None:
        """Exchanges the cold stores with another tier of the same class, when the
        native tables exchange rows.
        """

    def close(self) -> None:
        """Closes the cold store."""


@contextmanager
def holding(tiers: Sequence[MemoryTier]) -> Iterator[None]:
    """Keeps the rows of several tables from moving.

    The locks are taken in the order of the tables' handles.
    """
    with ExitStack() as stack:
        for tier in sorted(tiers, key=lambda tier: tier._handle):
            stack.enter_context(tier.lock)
        yield


class ProcessLock:
    """A reentrant lock of the process that created it.

    In a forked process, the thread that held it may not exist, so that it would never
    be released: entering it there raises the error of the native table's calls.
    """

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._lock = threading.RLock()
        self._process = os.getpid()

    def __enter__(self) -> None:
        if os.getpid() != self._process:
            ops.table_image_bytes(self._handle)  # raises
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()
