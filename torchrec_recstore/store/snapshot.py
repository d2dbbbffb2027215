from __future__ import annotations

import weakref
from types import TracebackType

from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.optim import Optimizer, state_names


class Snapshot:
    """A table's rows as they were when it was made, while the table goes on: :meth:`Table.snapshot`.

    Rows that change before they have been read are copied first, so a snapshot takes as much memory as the rows that
    change meanwhile. Slots of rows that are removed are not reused until it is closed. Also a context manager.
    """

    def __init__(self, name: str, optimizer: Optimizer, handle: int) -> None:
        self._name = name
        self._optimizer = optimizer
        self._handle = handle
        self._close = weakref.finalize(self, ops.snapshot_close, handle)
        self.mark, self.table_rows, self.steps, self.optimizer_steps = ops.snapshot_moment(handle)
        """A mark of its moment, and what ``len(table)``, ``steps`` and ``optimizer_steps`` were."""
        self.left = ops.snapshot_left(handle)
        """(N,) int64: ids, ascending, that had a row at the mark given to :meth:`Table.snapshot` and have none any
        more. None where they are no longer known, because more have left than stay, or where no mark was given."""

    def __len__(self) -> int:
        """Rows that have not been read."""
        with ops.native_errors(f"table '{self._name}'"):
            return ops.snapshot_rows_left(self._handle)

    def read(self, n: int, *, polite: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
        """The next ``n`` rows, at most ``len(self)``, ids ascending.

        Args:
            n: how many.
            polite: on the calling thread alone, with the table locked for short: beside training.

        Returns:
            ids (n,) int64, and what :meth:`Table.read_rows` gives for them.

        Raises:
            ValueError: there are not so many rows left, or the table is closed.
            MemoryError: there was no room to keep a row that changed; the snapshot is of no use any more.
        """
        with ops.native_errors(f"table '{self._name}'"):
            ids, *rows = ops.snapshot_read(self._handle, n, polite)
        weight, elements, state, last_step, frequency = rows
        return ids, named_rows(self._optimizer, (weight, elements, state, last_step, frequency))

    def close(self) -> None:
        """Ends it; closing twice is fine."""
        self._close()

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def named_rows(optimizer: Optimizer, rows: ops.RowTensors) -> dict[str, Tensor]:
    """The tensors of :func:`torchrec_recstore.ops.table_export` under the names of :meth:`Table.read_rows`."""
    weight, elements, state, last_step, frequency = rows
    taken = iter(elements.unbind(0))
    states = {name: next(taken) if kind == "element" else state for name, kind in state_names(optimizer).items()}
    return {"weight": weight, **states, "last_step": last_step, "frequency": frequency}
