"""A table's rows as they were at one moment, in memory and in the cold store."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.optim import Optimizer, state_names
from torchrec_recstore.store.arguments import among
from torchrec_recstore.store.cold_store import ColdStoreError, last_steps, unpacked
from torchrec_recstore.store.cold_tier import ColdTier


def column_weighted_mean(states: Sequence[Tensor], widths: Sequence[int]) -> Tensor:
    """One row-wise state in the place of those of several column shards.

    Args:
        states: (N,) float32 each. The state of the same N rows in each column shard.
        widths: The number of columns that each state counts for.

    Returns:
        (N,) float32. A single state is returned as it is, bit for bit.
    """
    if len(states) == 1:
        return states[0]
    columns = sum(widths)
    weighted = [state.double() * (width / columns) for state, width in zip(states, widths, strict=True)]
    return torch.stack(weighted).sum(0).float()


_BATCH = 1 << 16

Batches = Iterator[tuple[Tensor, Tensor]]
"""Ids (n,) int64, ascending over all batches, and images (n, image bytes) uint8."""


class ColdSnapshot:
    """The rows that a table has in its cold store, as they are now, to be read while the table goes on.

    Made while nothing moves. A store without ascending snapshots is copied to a temporary file at once, and so is a
    shared one, whose rows nobody has counted.

    Args:
        handle: of the native table.
        tier: of the table.
        left: (N,) int64, ascending: ids that have left memory since a mark, where only what has changed since is wanted
            and that is known; else None. None of a shared store.
        whole: whether all rows are wanted, whose resident ones are read with them, so that copies which are out of date
            can be told.
    """

    def __init__(self, handle: int, tier: ColdTier, left: Tensor | None, *, whole: bool) -> None:
        self.wanted: Tensor | None = None
        """(n,) int64, ascending: the ids in it; None for all that are in the store and not in memory."""
        resident: Tensor | None = None
        if left is not None:
            self.wanted = tier.found(left)
        elif not whole:
            resident = ops.table_ids(handle)
        self.knows_left = not tier.expires
        """Whether the ids are known that have left the store since a mark: those that expire there are not."""
        self.table_rows = tier.rows
        """All that are in the store and not in memory."""
        self.rows = tier.rows if self.wanted is None else len(self.wanted)
        """Those of them that the snapshot has."""
        batches: Batches = iter(())
        if tier.shared:
            self.rows, batches = _spooled(tier, tier.cold_ids())
            self.table_rows = self.rows
        elif self.rows:
            batches = tier.scan() if tier.store.ascending_snapshots else _spooled(tier, self.wanted)[1]
        self._batches = self._filtered(batches, resident, tier.expired_before, tier.dead)

    def next_batch(self) -> tuple[Tensor, Tensor] | None:
        """The next rows; None behind the last one."""
        return next(self._batches, None)

    def _filtered(self, batches: Batches, resident: Tensor | None, expired_before: int, dead: Tensor) -> Batches:
        for ids, images in batches:
            keep = (last_steps(images) >= expired_before) & ~among(ids, dead)
            if self.wanted is not None:
                keep &= among(ids, self.wanted)
            elif resident is not None:
                keep &= ~among(ids, resident)
            if keep.any():
                yield ids[keep], images[keep]


def _spooled(tier: ColdTier, wanted: Tensor | None) -> tuple[int, Batches]:
    """How many rows the store has, or those that are wanted, and a copy of them."""
    file = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the iterator)
    parts = []
    rows = tier.scan() if wanted is None else (tier.read(ids) for ids in torch.split(wanted, _BATCH))
    for ids, images in rows:
        file.write(images.numpy().data)
        parts.append(ids)
    file.flush()
    ids = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
    return len(ids), _spooled_ascending(file, ids, tier.image_bytes)


def _spooled_ascending(file: BinaryIO, ids: Tensor, image_bytes: int) -> Batches:
    ascending = ids.sort()
    with file:
        if len(ids) == 0:
            return
        images = np.memmap(file, np.uint8, "r", shape=(len(ids), image_bytes))
        for some, places in zip(
            torch.split(ascending.values, _BATCH), torch.split(ascending.indices, _BATCH), strict=True
        ):
            yield some, torch.from_numpy(images[places.numpy()])


_MERGED_ROWS = 1 << 16  # resident rows that are read at least where cold ones are merged with them

Rows = tuple[Tensor, dict[str, Tensor]]
"""Ids (n,) int64, ascending, and their rows by the names of :meth:`Table.read_rows`."""


class Snapshot:
    """A table's rows as they were when it was made, while the table goes on: :meth:`Table.snapshot`.

    Rows that change before they have been read are copied first, so a snapshot takes as much memory as the rows that
    change meanwhile. Slots of rows that leave before they have been read are not reused until it is closed. Also a
    context manager.
    """

    def __init__(
        self,
        name: str,
        optimizer: Optimizer,
        dtype: torch.dtype,
        columns: int,
        handle: int,
        cold: ColdSnapshot | None = None,
    ) -> None:
        self._name = name
        self._optimizer = optimizer
        self._dtype = dtype
        self._columns = columns
        self._handle = handle
        self._cold = cold
        self._close = weakref.finalize(self, ops.snapshot_close, handle)
        self.mark, self.table_rows, self.steps, self.optimizer_steps = ops.snapshot_moment(handle)
        """A mark of its moment, and what ``len(table)``, ``steps`` and ``optimizer_steps`` were."""
        self.left = ops.snapshot_left(handle)
        """(N,) int64: ids, ascending, that had a row at the mark given to :meth:`Table.snapshot` and have none any
        more. None where they are no longer known, because more have left than stay or rows have expired in the cold
        store, or where no mark was given."""
        self._rows_left = ops.snapshot_rows_left(handle)
        if cold is not None:
            self.table_rows += cold.table_rows
            self._rows_left += cold.rows
            if self.left is not None and cold.wanted is not None:  # what is in the cold store has not left the table
                self.left = self.left[~among(self.left, cold.wanted)] if cold.knows_left else None
        # Read and not merged yet, or merged and not asked for yet:
        self._resident, self._cold_rows, self._merged = self._no_rows(), self._no_rows(), self._no_rows()

    def __len__(self) -> int:
        """Rows that have not been read."""
        return self._rows_left

    def read(self, n: int, *, polite: bool = False) -> Rows:
        """The next ``n`` rows, at most ``len(self)``, ids ascending.

        Args:
            n: how many.
            polite: on the calling thread alone, with the table locked for short: beside training.

        Returns:
            ids (n,) int64, and what :meth:`Table.read_rows` gives for them.

        Raises:
            ValueError: there are not so many rows left, or the table is closed.
            MemoryError: there was no room to keep a row that changed; the snapshot is of no use any more.
            ColdStoreError: the cold store fails; likewise.
        """
        with ops.native_errors(f"table '{self._name}'"):
            ops.snapshot_rows_left(self._handle)  # raises in a forked process, which must not touch the cold store
            if self._cold is None:
                rows = self._read_resident(n, polite)
            elif n > self._rows_left:
                raise ValueError(f"table '{self._name}': the snapshot has {self._rows_left} rows left, not {n}")
            else:
                rows = self._read_merged(n, polite)
        self._rows_left -= n
        if self._cold is not None and self._rows_left == 0 and len(self._merged[0]):
            raise ColdStoreError(f"table '{self._name}': the cold store has more rows than the table knows of")
        return rows

    def close(self) -> None:
        """Ends it; closing twice is fine."""
        self._close()
        self._cold = None

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _read_resident(self, n: int, polite: bool) -> Rows:
        ids, *rows = ops.snapshot_read(self._handle, n, polite)
        weight, elements, state, last_step, frequency = rows
        return ids, named_rows(self._optimizer, (weight, elements, state, last_step, frequency))

    def _read_cold(self) -> Rows | None:
        batch = None if self._cold is None else self._cold.next_batch()
        if batch is None:
            return None
        return batch[0], named_rows(self._optimizer, unpacked(batch[1], self._dtype, self._columns))

    def _read_merged(self, n: int, polite: bool) -> Rows:
        more_cold = True
        while len(self._merged[0]) < n:
            left = ops.snapshot_rows_left(self._handle)
            if len(self._resident[0]) == 0 and left:
                self._resident = self._read_resident(min(max(n, _MERGED_ROWS), left), polite)
            if len(self._cold_rows[0]) == 0 and more_cold:
                batch = self._read_cold()
                more_cold = batch is not None
                self._cold_rows = batch or self._cold_rows
            # What is there of both is complete up to the lesser of their last ids, unless the other one has no more.
            ends = [int(ids[-1]) for ids in (self._resident[0], self._cold_rows[0]) if len(ids)]
            if not ends:
                raise ColdStoreError(f"table '{self._name}': the cold store has lost rows while they were being saved")
            resident, self._resident = _up_to(self._resident, min(ends))
            cold, self._cold_rows = _up_to(self._cold_rows, min(ends))
            in_date = ~among(cold[0], resident[0])  # of a row in memory the copy in the store counts for nothing
            self._merged = _joined([self._merged, _sorted(_joined([resident, _taken(cold, in_date)]))])
        rows = _taken(self._merged, slice(0, n))
        self._merged = _taken(self._merged, slice(n, None))
        return rows

    def _no_rows(self) -> Rows:
        image_bytes = -(-self._columns * self._dtype.itemsize // 4) * 4 + 12
        states = sum(kind == "element" for kind in state_names(self._optimizer).values())
        images = torch.empty(0, image_bytes + 4 * self._columns * states, dtype=torch.uint8)
        rows = named_rows(self._optimizer, unpacked(images, self._dtype, self._columns))
        return torch.empty(0, dtype=torch.int64), rows


def named_rows(optimizer: Optimizer, rows: ops.RowTensors) -> dict[str, Tensor]:
    """The tensors of :func:`torchrec_recstore.ops.table_export` under the names of :meth:`Table.read_rows`."""
    weight, elements, state, last_step, frequency = rows
    taken = iter(elements.unbind(0))
    states = {name: next(taken) if kind == "element" else state for name, kind in state_names(optimizer).items()}
    return {"weight": weight, **states, "last_step": last_step, "frequency": frequency}


def _taken(rows: Rows, which: Tensor | slice) -> Rows:
    return rows[0][which], {key: value[which] for key, value in rows[1].items()}


def _up_to(rows: Rows, last_id: int) -> tuple[Rows, Rows]:
    """The rows up to an id, and those behind it."""
    end = int(torch.searchsorted(rows[0], last_id, right=True))
    return _taken(rows, slice(0, end)), _taken(rows, slice(end, None))


def _joined(parts: list[Rows]) -> Rows:
    return torch.cat([ids for ids, _ in parts]), {
        key: torch.cat([rows[key] for _, rows in parts]) for key in parts[0][1]
    }


def _sorted(rows: Rows) -> Rows:
    return _taken(rows, rows[0].argsort())
