"""A table of this process, and reads and updates of several tables by one native call.

Tests: tests/service/tables/test_hosted.py.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.kernels import PooledGroup
from torchrec_recstore.store import Table
from torchrec_recstore.store.arguments import among
from torchrec_recstore_service.tables.read_write_lock import ReadWriteLock
from torchrec_recstore_service.wire import row_ops
from torchrec_recstore_service.wire.protocol import NoInitialRow
from torchrec_recstore_service.wire.row_requests import InitialRows, RowRead, RowUpdate
from torchrec_recstore_service.wire.table_spec import TableSpec


@dataclass(eq=False)
class Hosted:
    """A table of this process with its specification."""

    name: str
    spec: TableSpec
    table: Table
    lock: ReadWriteLock = field(default_factory=ReadWriteLock)
    """Held during every call that uses the rows: shared by calls that read, alone by a
    call that changes them.
    """
    dropped: bool = False
    nonfinite_named: bool = False
    """Whether a save has named the table because its rows are not finite."""
    last_used: float = field(default_factory=time.monotonic)
    """The time, on the monotonic clock, of the last call that read or changed the rows.
    """

    def __post_init__(self) -> None:
        self.group = PooledGroup([self.table], [0], "sum")


def check_initial_rows(hosted: Hosted, ids: Tensor) -> None:
    """Raises NoInitialRow if the table has ``initial_rows`` and one of ``ids``, (N,)
    int64, has no row.
    """
    if hosted.spec.initial_rows and not bool(hosted.table.contains(ids).all()):
        raise NoInitialRow(hosted.name, torch.arange(len(ids)))


def read_rows(
    tables: Sequence[Hosted],
    reads: Sequence[RowRead],
    out: Sequence[Tensor],
) -> None:
    """Reads rows.

    Args:
        tables: The table of each read, whose lock the caller shares.
        reads: The ids whose rows are read.
        out: For each read, (N, dim), contiguous, in the dtype of its table. The tensor
            that receives the rows.

    Raises:
        NoInitialRow: An id has no row and does not read as zeros, and its table has
            ``initial_rows``.
        MemoryError, ColdStoreError: See :meth:`Table.lookup`.
    """
    # the reads that one native call makes together
    native_tables = []
    native_ids = []
    native_rows = []
    for hosted, read, rows in zip(tables, reads, out, strict=True):
        if read.missing != "zeros":
            check_initial_rows(hosted, read.ids)
        if rows.dtype is torch.float32 and not hosted.group.cold_rows.tiers:
            native_tables.append(hosted)
            native_ids.append(read.ids)
            native_rows.append(rows)
        else:
            hosted.table.lookup(read.ids, out=rows)
    if native_tables:
        ops.finish_updates()
        groups = [hosted.group.handle for hosted in native_tables]
        with ops.native_errors(_named(native_tables)):
            row_ops.rows_read(groups, native_ids, native_rows)
    for hosted, read, rows in zip(tables, reads, out, strict=True):
        if read.missing == "zeros":
            rows[~hosted.table.contains(read.ids)] = 0


def update_rows(tables: Sequence[Hosted], updates: Sequence[RowUpdate]) -> None:
    """Updates rows: one step of each table. If one update fails, no row is updated.

    Args:
        tables: The table of each update, which the caller has locked. They have no
            ``initial_rows``.
        updates: The gradients. Each table occurs once.

    Raises:
        MemoryError, ColdStoreError: See :meth:`Table.update`.
        ValueError: A table occurs twice, or has no room for the rows.
    """
    ops.finish_updates()
    with ExitStack() as stack:
        stack.enter_context(ops.native_errors(_named(tables)))
        for hosted, update in zip(tables, updates, strict=True):
            if hosted.group.cold_rows.tiers:
                stack.enter_context(hosted.group.cold_rows.resident(update.ids, None))
        row_ops.rows_update(
            [hosted.group.handle for hosted in tables],
            [update.ids for update in updates],
            [update.grads.float() for update in updates],
            list(map(_learning_rate, tables, updates)),
        )


def without_row(
    hosted: Hosted,
    ids: Tensor,
    initial: InitialRows | None,
) -> InitialRows:
    """Returns the initial rows of the ids that have no row.

    Raises:
        NoInitialRow: The table has ``initial_rows``, and an id has neither a row nor an
            initial row in ``initial``.
    """
    missing_ids = torch.unique(ids[~hosted.table.contains(ids)])
    if initial is None:
        initial = (missing_ids[:0], torch.empty(0, hosted.spec.dim))
    initial_ids, initial_rows = initial
    if hosted.spec.initial_rows:
        has_initial_row = among(missing_ids, initial_ids.sort().values)
        if not bool(has_initial_row.all()):
            raise NoInitialRow(hosted.name, torch.arange(len(ids)))
    is_missing = among(initial_ids, missing_ids)
    return initial_ids[is_missing], initial_rows[is_missing]


def _learning_rate(hosted: Hosted, update: RowUpdate) -> float:
    if update.learning_rate is None:
        return hosted.table.optimizer.lr
    return update.learning_rate


def _named(tables: Sequence[Hosted]) -> str:
    if len(tables) == 1:
        return f"table '{tables[0].name}'"
    return f"tables {', '.join(hosted.name for hosted in tables)}"
