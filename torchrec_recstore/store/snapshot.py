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
        self, handle: int, tier: ColdTier, snapshot: int, since: int | None
    ) -> None:
        left = ops.snapshot_left(snapshot)
        self.left: Tensor | None = None
        """See :attr:`Snapshot.left`.

        Ids that have expired in the store are not known.
        """
        wanted: Tensor | None = None
        resident: Tensor | None = None
        self.table_rows = tier.rows
        """The number of rows in the store and not in memory."""
        self.rows = tier.expiry.changed_since(
            since or 0, ops.snapshot_moment(snapshot)[0]
        )
        """The number of these rows that the snapshot has."""
        if since is not None and left is not None:
            moved = [
                (ids, last_marks(images))
                for ids, images in map(tier.read, torch.split(left, _BATCH))
            ]
            here = torch.cat([ids for ids, _ in moved])
            wanted = here[torch.cat([marks for _, marks in moved]) >= since]
            self.rows = len(wanted)
            self.left = None if tier.expiry.expires else left[~among(left, here)]
        elif since is not None:
            resident = ops.table_ids(handle)
        batches: Batches = iter(())
        if tier.shared:
            self.rows, batches = _spooled(tier, tier.cold_ids())
            self.table_rows = self.rows
        elif self.rows:
            batches = (
                tier.scan()
                if tier.store.ascending_snapshots
                else _spooled(tier, wanted)[1]
            )
        before, dead = tier.expiry.before, tier.dead

        def belongs(ids: Tensor, images: Tensor) -> Tensor:
            if wanted is not None:
                return among(ids, wanted)
            alive = (last_steps(images) >= before) & ~among(ids, dead)
            return (
                alive
                if resident is None
                else alive
                & (last_marks(images) >= (since or 0))
                & ~among(ids, resident)
            )

        kept = ((ids, images, belongs(ids, images)) for ids, images in batches)
        self.batches: Batches = (
            (ids[keep], images[keep]) for ids, images, keep in kept if keep.any()
        )


def _spooled(tier: ColdTier, wanted: Tensor | None) -> tuple[int, Batches]:
    """Copies the wanted rows, or all rows if ``wanted`` is None, to a file.

    Returns their number and their batches.
    """
    file = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the iterator)
    parts = [torch.empty(0, dtype=torch.int64)]
    rows = (
        tier.scan()
        if wanted is None
        else (tier.read(ids) for ids in torch.split(wanted, _BATCH))
    )
    for ids, images in rows:
        file.write(images.numpy().data)
        parts.append(ids)
    file.flush()
    ids = torch.cat(parts)
    return len(ids), _spooled_ascending(file, ids, tier.image_bytes)


def _spooled_ascending(file: BinaryIO, ids: Tensor, image_bytes: int) -> Batches:
    with file:
        if len(ids) == 0:
            return
        images = np.memmap(file, np.uint8, "r", shape=(len(ids), image_bytes))
        for places in torch.split(ids.argsort(), _BATCH):
            yield ids[places], torch.from_numpy(images[places.numpy()])


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
        self.mark, self.table_rows, self.steps, self.optimizer_steps = (
            ops.snapshot_moment(handle)
        )
        """The mark of the snapshot, and the values of ``len(table)``, ``steps`` and
        ``optimizer_steps`` at its time.
        """
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
        none = self._read_resident(0, False)
        # Rows that have been read and not merged yet, and rows that have been merged
        # and not returned yet.
        self._resident, self._cold_rows, self._merged = none, none, none

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
            self._handle, n, polite
        )
        return self._part(ids, (weight, elements, state, last_step, frequency))

    def _read_merged(self, cold_batches: Batches, n: int, polite: bool) -> Part:
        while len(self._merged) < n:
            left = ops.snapshot_rows_left(self._handle)
            if len(self._resident) == 0 and left:
                self._resident = self._read_resident(
                    min(max(n, _MERGED_ROWS), left), polite
                )
            if (
                len(self._cold_rows) == 0
                and (batch := next(cold_batches, None)) is not None
            ):
                self._cold_rows = self._part(batch[0], self._layout.unpacked(batch[1]))
            # Both sources are read in the order of ids, so that all rows up to the
            # lesser of the two last ids are here.
            ends = [
                int(part.ids[-1])
                for part in (self._resident, self._cold_rows)
                if len(part)
            ]
            if not ends:
                raise ColdStoreError(
                    f"table '{self._name}': the cold store has lost rows while they"
                    " were being saved"
                )
            resident, self._resident = self._resident.up_to(min(ends))
            cold, self._cold_rows = self._cold_rows.up_to(min(ends))
            # the copy in the store of a row in memory is outdated
            in_date = ~among(cold.ids, resident.ids)
            arrived = Part.concatenated([resident, cold.take(in_date)]).sorted()
            self._merged = Part.concatenated([self._merged, arrived])
        part, self._merged = (
            self._merged.take(slice(0, n)),
            self._merged.take(slice(n, None)),
        )
        return part

    def _part(self, ids: Tensor, rows: ops.RowTensors) -> Part:
        return Part(ids, self._columns, named_rows(self._optimizer, rows))
