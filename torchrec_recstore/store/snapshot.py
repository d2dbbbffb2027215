from __future__ import annotations

import weakref
from types import TracebackType

import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.ids import among
from torchrec_recstore.optim import Optimizer, state_names
from torchrec_recstore.store.cold import ColdStoreError
from torchrec_recstore.store.cold_snapshot import ColdSnapshot
from torchrec_recstore.store.images import unpacked

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
