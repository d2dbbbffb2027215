"""The interface between the client and the place where its tables are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from torchrec_recstore.store import TableStats
from torchrec_recstore_service.wire.row_requests import RowRead, RowUpdate
from torchrec_recstore_service.wire.table_spec import TableSpec

InitialRows = tuple[Tensor, Tensor]
"""Distinct ids, (n,) int64, and their initial rows, (n, dim) float32."""


class NoInitialRow(ValueError):
    """An id has no row, and the row can only be made by a client that has the table's ``init_func``.

    Args:
        name: The name of the table.
        pending: (n,) int64. The positions in the call's ``ids`` for which the call was not carried out, so that the
            caller can repeat the call for these ids. None: unknown.
    """

    def __init__(self, name: str, pending: Tensor | None = None) -> None:
        super().__init__(
            f"table {name!r} has rows that an init_func makes, and an id has none yet: "
            "call init_data with that init_func first"
        )
        self.pending = pending


class Backend(Protocol):
    """A set of named tables that a client reads and writes.

    The client checks all arguments before it calls a backend. Ids are (N,) int64. Rows are (N, dim) in the table's
    dtype or float32. All tensors are on the CPU; a backend neither changes them nor keeps them after the call. Methods
    may be called from any thread. A call either completes, or raises an error and changes nothing.

    Raises:
        ValueError: The table does not exist, or the backend is closed. The message names the table and the tables that
            exist.
        MemoryError, ColdStoreError: See :class:`torchrec_recstore.store.Table`.
    """

    def create(self, name: str, spec: TableSpec) -> None:
        """Creates a table. A table that exists with the same specification is not changed.

        Raises:
            ValueError: The table exists with another specification. The message names the difference.
        """

    def spec(self, name: str) -> TableSpec | None:
        """Returns the specification of a table, with ``shard=(0, 1)``, or None if the table does not exist."""

    def pull(self, name: str, ids: Tensor) -> Tensor:
        """Reads rows: (N, dim) in the table's dtype. An id without a row reads as its initial row; no row is made.

        Raises:
            NoInitialRow: An id has no row, and the table has ``initial_rows``.
        """

    def found_rows(self, name: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Reads the rows that exist.

        Returns:
            (N,) bool, True for the ids that have a row, and (found, dim) in the table's dtype, the rows of these ids
            in the order of ``ids``.
        """

    def push(self, name: str, ids: Tensor, values: Tensor) -> None:
        """Writes weights.

        New rows start with zero optimizer state. Existing rows keep their optimizer state. If an id occurs several
        times, its last row is written.
        """

    def update(self, name: str, ids: Tensor, grads: Tensor, initial: InitialRows | None = None) -> None:
        """Applies the optimizer once to the row of each distinct id, with the sum of the id's gradients.

        The gradients are summed in the order of ``ids``. One update is one step of the table's clock: eviction, expiry
        and admission count updates.

        Args:
            name: The name of the table.
            ids: (N,) int64. The ids whose rows are updated. Duplicates are allowed.
            grads: (N, dim). The gradients.
            initial: The initial rows of some of the ids, for a table with ``initial_rows``. An initial row is used if
                its id has no row when the update is carried out. The row becomes visible together with the update.

        Raises:
            NoInitialRow: The table has ``initial_rows``, and an id has neither a row nor an initial row in ``initial``.
        """

    def pull_each(self, reads: Sequence[RowRead]) -> list[Tensor]:
        """Reads rows of several tables without ``initial_rows``. See :class:`RowRead`.

        Returns:
            For each read, (N, dim) in the table's dtype. No row is made.
        """

    def update_each(self, updates: Sequence[RowUpdate]) -> None:
        """Makes an :meth:`update` of each of several tables without ``initial_rows``, also of those without ids.

        If one update fails, no row of this process, or of the server of the update, is updated. Other servers may have
        carried out their part.
        """

    def delete(self, name: str, ids: Tensor) -> int:
        """Deletes rows and returns the number of rows that existed."""

    def exists(self, name: str, ids: Tensor) -> Tensor:
        """Returns (N,) bool, True for the ids that have a row."""

    def stats(self, name: str) -> TableStats:
        """Returns the statistics of a table."""

    def save(self, path: str | Path, overwrite: bool = False) -> None:
        """Saves all tables except temporary tables. On each server, the tables are saved as of one moment.

        Raises:
            FileExistsError: ``path`` exists and ``overwrite`` is False, or ``path`` is not a checkpoint. Nothing is
                written.
            OSError: A file cannot be written. Nothing new is left at ``path``.
        """

    def load(self, path: str | Path) -> None:
        """Replaces all tables except temporary tables by the tables of a checkpoint.

        Raises:
            FileNotFoundError: The checkpoint does not exist.
            CheckpointError: A file is missing or damaged.
            ValueError: A table is not in the checkpoint, or has another specification there.
        """

    def close(self) -> None:
        """Frees the tables or closes the connections. It may be called twice."""
