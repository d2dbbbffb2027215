"""A table's rows as they were at one moment, in memory and in the cold store."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.optim import Optimizer
from torchrec_recstore.store.arguments import among
from torchrec_recstore.store.cold_store import ColdStoreError
from torchrec_recstore.store.cold_tier import ColdTier
from torchrec_recstore.store.parts import (
    ImageLayout,
    Part,
    last_marks,
    last_steps,
    named_rows,
)

_BATCH = 1 << 16
# the least number of resident rows in a read, if they are merged with cold rows
_MERGED_ROWS = 1 << 16

Batches = Iterator[tuple[Tensor, Tensor]]
"""Batches of ids, (n,) int64, ascending over all batches, and images, (n, image bytes)
uint8.
"""


class ColdSnapshot:
    """A snapshot of the rows in a table's cold store, which can be read while the table
    changes.

    The caller holds the tier's lock while it creates the snapshot. A store without
    ascending snapshots is copied to a temporary file at once. A shared store is copied
    too, because the number of its rows is not known.

    If ``since`` is given, the snapshot has only the rows that have changed after this
    mark. Otherwise, the reader also reads all rows in memory, of which ``snapshot`` is
    the handle, and so finds outdated copies in the store itself.
    """

    def __init__(
        self,
        handle: int,
        tier: ColdTier,
        snapshot: int,
        since: int | None,
    ) -> None:
        self.left: Tensor | None = None
        """See :attr:`Snapshot.left`.

        Ids that have expired in the store are not known.
        """
        self.table_rows = tier.rows
        """The number of rows in the store and not in memory."""
        mark, *_ = ops.snapshot_moment(snapshot)
        self.rows = tier.expiry.changed_since(since or 0, mark)
        """The number of these rows that the snapshot has."""

        rows = _RowsOfSnapshot(tier, since or 0)
        left_ids = ops.snapshot_left(snapshot)
        if since is not None and left_ids is not None:
            cold_ids, rows.ids = _moved_rows(tier, left_ids, since)
            self.rows = len(rows.ids)
            if not tier.expiry.expires:
                is_cold = among(left_ids, cold_ids)
                self.left = left_ids[~is_cold]
        elif since is not None:
            rows.resident = ops.table_ids(handle)

        batches: Batches = iter(())
        if tier.shared:
            shared_rows = _read(tier, tier.cold_ids())
            self.rows, batches = _spooled(tier, shared_rows)
            self.table_rows = self.rows
        elif self.rows and tier.store.ascending_snapshots:
            batches = tier.scan()
        elif self.rows:
            if rows.ids is None:
                batches = tier.scan()
            else:
                batches = _read(tier, rows.ids)
            _, batches = _spooled(tier, batches)
        self.batches: Batches = rows.among(batches)


def _moved_rows(
    tier: ColdTier,
    left_ids: Tensor,
    since: int,
) -> tuple[Tensor, Tensor]:
    """Returns which of the ids that have left memory are in the store, and which of
    these rows have changed since the mark.
    """
    parts_of_ids: list[Tensor] = []
    parts_of_marks: list[Tensor] = []
    # Only the marks are kept: the images of all batches may be as many as all rows.
    for ids, images in _read(tier, left_ids):
        parts_of_ids.append(ids)
        parts_of_marks.append(last_marks(images))
    cold_ids = torch.cat(parts_of_ids)
    marks = torch.cat(parts_of_marks)
    is_changed = marks >= since
    return cold_ids, cold_ids[is_changed]


class _RowsOfSnapshot:
    """Tells which rows of the store belong to a snapshot of this moment."""

    def __init__(self, tier: ColdTier, since: int) -> None:
        self.ids: Tensor | None = None
        """The ids of the rows, ascending, if they are known."""
        self.resident: Tensor | None = None
        """The ids of the rows in memory, if the reader does not read all of them."""
        self._since = since
        # later, the tier may have others
        self._valid_from = tier.expiry.valid_from
        self._dead = tier.dead

    def among(self, batches: Batches) -> Batches:
        """Returns the rows of batches that belong to the snapshot."""
        for ids, images in batches:
            belongs = self._belongs(ids, images)
            if belongs.any():
                yield ids[belongs], images[belongs]

    def _belongs(self, ids: Tensor, images: Tensor) -> Tensor:
        if self.ids is not None:
            return among(ids, self.ids)
        is_alive = last_steps(images) >= self._valid_from
        is_dead = among(ids, self._dead)
        is_valid = is_alive & ~is_dead
        if self.resident is None:
            return is_valid
        is_changed = last_marks(images) >= self._since
        is_resident = among(ids, self.resident)
        return is_valid & is_changed & ~is_resident


def _read(tier: ColdTier, ids: Tensor) -> Batches:
    """Returns the rows of ``ids``, (N,) int64, that are in the store."""
    return map(tier.read, torch.split(ids, _BATCH))


def _spooled(tier: ColdTier, batches: Batches) -> tuple[int, Batches]:
    """Copies rows to a file. Returns their number, and their batches in ascending
    order.
    """
    file = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the iterator)
    parts = [torch.empty(0, dtype=torch.int64)]
    for batch_ids, images in batches:
        file.write(images.numpy().data)
        parts.append(batch_ids)
    file.flush()
    ids = torch.cat(parts)
    return len(ids), _spooled_ascending(file, ids, tier.image_bytes)


def _spooled_ascending(
    file: BinaryIO,
    ids: Tensor,
    image_bytes: int,
) -> Batches:
    with file:
        if len(ids) == 0:
            return
        images = np.memmap(
            file,
            np.uint8,
            "r",
            shape=(len(ids), image_bytes),
        )
        order = ids.argsort()
        for places in torch.split(order, _BATCH):
            batch_images = images[places.numpy()]
            yield ids[places], torch.from_numpy(batch_images)


class Snapshot(AbstractContextManager["Snapshot"]):
    """A snapshot of a table's rows, which can be read while the table changes.

    See :meth:`Table.snapshot`.

    A row that changes before it has been read is copied first, so a snapshot needs
    memory for the rows that change in the meantime. The slot of a row that is removed
    before it has been read is not reused until the snapshot is closed. A snapshot is
    also a context manager, which closes it.
    """

    def __init__(
        self,
        name: str,
        optimizer: Optimizer,
        columns: range,
        layout: ImageLayout,
        handle: int,
        cold: ColdSnapshot | None,
    ) -> None:
        self._name = name
        self._optimizer = optimizer
        self._columns = columns
        self._layout = layout
        self._handle = handle
        self._cold = cold
        self._close = weakref.finalize(self, ops.snapshot_close, handle)

        mark, table_rows, steps, optimizer_steps = ops.snapshot_moment(handle)
        self.mark = mark
        """The mark of the snapshot."""
        self.table_rows = table_rows
        """The value of ``len(table)`` at the time of the snapshot."""
        self.steps = steps
        """The value of ``table.steps`` at the time of the snapshot."""
        self.optimizer_steps = optimizer_steps
        """The value of ``table.optimizer_steps`` at the time of the snapshot."""
        self.left = ops.snapshot_left(handle) if cold is None else cold.left
        """(N,) int64, ascending.

        The ids that had a row at the mark passed to :meth:`Table.snapshot` and have no
        row now. None if no mark was passed, or if these ids are not known, because more
        rows have left than stayed, or because rows have expired in the cold store.
        """
        self._rows_left = ops.snapshot_rows_left(handle)
        if cold is not None:
            self.table_rows += cold.table_rows
            self._rows_left += cold.rows
        no_rows = self._read_resident(0, False)
        # rows that have been read and not merged yet
        self._resident = no_rows
        self._cold_rows = no_rows
        # rows that have been merged and not returned yet
        self._merged = no_rows

    def __len__(self) -> int:
        """Returns the number of rows that have not been read."""
        return self._rows_left

    def read(self, n: int, *, polite: bool = False) -> Part:
        """Returns the next rows, in ascending order of their ids.

        Args:
            n: The number of rows to read, at most ``len(self)``.
            polite: Whether to work only on the calling thread and to lock the table for
                short times, so that training is not held up.

        Raises:
            ValueError: Fewer than ``n`` rows are left, or the table is closed.
            MemoryError: There was no memory to copy a row that changed. The snapshot
                cannot be used any more.
            ColdStoreError: The cold store fails. The snapshot cannot be used any more.
        """
        with ops.native_errors(f"table '{self._name}'"):
            # raises in a forked process, which must not touch the cold store
            ops.snapshot_rows_left(self._handle)
            if self._cold is None:
                rows = self._read_resident(n, polite)
            elif n > self._rows_left:
                raise ValueError(
                    f"table '{self._name}': the snapshot has {self._rows_left} rows"
                    f" left, not {n}"
                )
            else:
                rows = self._read_merged(self._cold.batches, n, polite)
        self._rows_left -= n
        if self._cold is not None and self._rows_left == 0 and len(self._merged):
            raise ColdStoreError(
                f"table '{self._name}': the cold store has more rows than the table"
                " knows of"
            )
        return rows

    def close(self) -> None:
        """Closes the snapshot. It may be closed twice."""
        self._close()
        self._cold = None

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read_resident(self, n: int, polite: bool) -> Part:
        ids, weight, elements, state, last_step, frequency = ops.snapshot_read(
            self._handle,
            n,
            polite,
        )
        rows = (weight, elements, state, last_step, frequency)
        return self._part(ids, rows)

    def _read_merged(
        self,
        cold_batches: Batches,
        n: int,
        polite: bool,
    ) -> Part:
        while len(self._merged) < n:
            self._read_ahead(cold_batches, n, polite)
            self._merge()
        first_rows = slice(0, n)
        other_rows = slice(n, None)
        part = self._merged.take(first_rows)
        self._merged = self._merged.take(other_rows)
        return part

    def _read_ahead(
        self,
        cold_batches: Batches,
        n: int,
        polite: bool,
    ) -> None:
        """Reads rows of each source of which none are left."""
        resident_left = ops.snapshot_rows_left(self._handle)
        if len(self._resident) == 0 and resident_left:
            rows = min(max(n, _MERGED_ROWS), resident_left)
            self._resident = self._read_resident(rows, polite)
        if len(self._cold_rows) == 0:
            batch = next(cold_batches, None)
            if batch is not None:
                ids, images = batch
                unpacked_rows = self._layout.unpacked(images)
                self._cold_rows = self._part(ids, unpacked_rows)

    def _merge(self) -> None:
        """Moves rows that have been read to the merged rows.

        Both sources are read in the order of ids, so that all rows up to the lesser of
        the two last ids have been read.
        """
        last_ids = []
        for part in (self._resident, self._cold_rows):
            if len(part):
                last_ids.append(int(part.ids[-1]))
        if not last_ids:
            raise ColdStoreError(
                f"table '{self._name}': the cold store has lost rows while they"
                " were being saved"
            )

        last_id = min(last_ids)
        resident, self._resident = self._resident.up_to(last_id)
        cold, self._cold_rows = self._cold_rows.up_to(last_id)
        # the copy in the store of a row in memory is outdated
        is_outdated = among(cold.ids, resident.ids)
        arrived = Part.concatenated([resident, cold.take(~is_outdated)])
        self._merged = Part.concatenated([self._merged, arrived.sorted()])

    def _part(self, ids: Tensor, rows: ops.RowTensors) -> Part:
        tensors = named_rows(self._optimizer, rows)
        return Part(ids, self._columns, tensors)
