"""The protocol of a client's tables, which the client is written against."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch import Tensor

from torchrec_recstore.rpc.table_spec import TableSpec
from torchrec_recstore.store import TableStats

InitialRows = tuple[Tensor, Tensor]
"""Ids (n,) int64, distinct, and the rows float32 (n, dim) that they begin with."""


class NoInitialRow(ValueError):
    """An id without a row is wanted, and only the client's ``init_func`` can tell how its row begins.

    Args:
        name: of the table.
        pending: (n,) int64: the positions, among the ids given, whose part of the call has not been carried out, so
            that these can be given again. None where that is not known.
    """

    def __init__(self, name: str, pending: Tensor | None = None) -> None:
        super().__init__(
            f"table {name!r} has rows that an init_func makes, and an id has none yet: "
            "call init_data with that init_func first"
        )
        self.pending = pending


class Backend(Protocol):
    """Named tables. The client is written against this; it checks what it passes on.

    Ids are (N,) int64, rows (N, dim) of the table's dtype or float32, all on
    the CPU; they are not changed, and not kept after the call. Any thread may call. A call either does all of its work
    or raises with everything as it was.

    Raises:
        ValueError: there is no such table; the message names it and those that there are. Or the tables are closed.
        MemoryError, ColdStoreError: as :class:`torchrec_recstore.store.Table`.
    """

    def create(self, name: str, spec: TableSpec) -> None:
        """Makes a table. One that is there with the same specification stays as it is.

        Raises:
            ValueError: there is one with another specification; the message names what differs.
        """

    def spec(self, name: str) -> TableSpec | None:
        """What the table was made with, with ``shard=(0, 1)``; None where there is no such table."""

    def pull(self, name: str, ids: Tensor) -> Tensor:
        """Reads rows: (N, dim) of the table's dtype. An id without a row reads as its initial row and gets none.

        Raises:
            NoInitialRow: an id has no row, and the table has ``initial_rows``.
        """

    def found_rows(self, name: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Which ids have a row, (N,) bool, and the rows of these, (found, dim) of the table's dtype, in their order."""

    def push(self, name: str, ids: Tensor, values: Tensor) -> None:
        """Writes weights: new rows start with zero optimizer state, others keep theirs; of duplicates the last wins."""

    def update(self, name: str, ids: Tensor, grads: Tensor, initial: InitialRows | None = None) -> None:
        """Applies the optimizer once to each distinct id's row, on the sum of its gradients in the order given.

        One update is one step: of the clock by which rows are evicted and expire, and of what admission counts.

        Args:
            name: of the table.
            ids: (N,) int64.
            grads: (N, dim).
            initial: some of the ids with the rows they are to begin with; used for those that have no row when the
                update is carried out. Nobody sees the rows without the update. For a table with ``initial_rows``.

        Raises:
            NoInitialRow: an id has neither a row nor one in ``initial``, and the table has ``initial_rows``.
        """

    def delete(self, name: str, ids: Tensor) -> int:
        """Forgets rows; returns how many there were."""

    def exists(self, name: str, ids: Tensor) -> Tensor:
        """Tells which ids have a row: (N,) bool."""

    def stats(self, name: str) -> TableStats:
        """What the table holds and has done."""

    def save(self, path: str | Path, overwrite: bool = False) -> None:
        """Saves all tables but temporary ones, as they are at one moment on each server.

        Raises:
            FileExistsError: there is something at ``path``, and no ``overwrite``, or it is no checkpoint.
            OSError: a file cannot be written. Either way there is nothing new at ``path``.
        """

    def load(self, path: str | Path) -> None:
        """Replaces all tables by those saved; temporary ones stay.

        Raises:
            FileNotFoundError: there is no checkpoint.
            CheckpointError: a file is missing or damaged.
            ValueError: a table of these is not in the checkpoint, or with another specification.
        """

    def close(self) -> None:
        """Frees what this holds: the tables, or the connections. Closing twice is fine."""
