"""The calls of a client that read or update several tables at once, as the kernels of models do."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchrec_recstore.rpc.row_requests import RowRead, RowUpdate
from torchrec_recstore.rpc.table_spec import TableSpec
from torchrec_recstore.service.backend import Backend, NoInitialRow
from torchrec_recstore.service.background import Prefetches, Updates

_THREADS = 2  # prefetches of several tables that run at the same time: of this batch and of the next one


class SeveralTables:
    """A mixin for ``RecStoreClient`` with the calls of :class:`torchrec_recstore.kernels.RowService`.

    The tables have no ``init_func``.
    """

    _updates: Updates

    def __init__(self) -> None:
        self._groups: Prefetches[list[Tensor]] = Prefetches(_THREADS)

    def spec(self, name: str) -> TableSpec:
        """See ``RecStoreClient``."""
        raise NotImplementedError

    def _open(self) -> Backend:
        raise NotImplementedError

    def pull_each(self, reads: Sequence[RowRead]) -> list[Tensor]:
        """Reads rows of several tables, by one request to each server. The servers answer at the same time.

        Args:
            reads: The tables and their ids.

        Returns:
            For each read, (N, dim) in the table's dtype.

        Raises:
            NoInitialRow: A table has an ``init_func``.
        """
        tables = self._open()
        self._check(reads)
        return tables.pull_each(reads)

    def prefetch_each(self, reads: Sequence[RowRead]) -> int:
        """Starts :meth:`pull_each` in another thread and returns a handle for :meth:`wait_for_each`.

        The ids must not change until then.
        """
        tables = self._open()
        self._check(reads)
        return self._groups.start(lambda: tables.pull_each(reads))

    def wait_for_each(self, handle: int) -> list[Tensor]:
        """Waits for :meth:`prefetch_each` and returns its rows, or raises its error.

        Raises:
            ValueError: The handle does not exist, or its rows have already been fetched.
        """
        self._open()
        return self._groups.wait(handle)

    def update_each(self, updates: Sequence[RowUpdate]) -> None:
        """Makes an ``update`` of each of several tables, by one request to each server.

        Each table makes one step of its clock and of its optimizer, also if its update has no ids. A server applies the
        updates of one request to all of its tables, or to none if one of them fails, and it applies a repeated request
        once. Updates of more than 64 MiB are sent as several requests.

        Raises:
            NoInitialRow: A table has an ``init_func``.
        """
        tables = self._open()
        self._check(updates)
        if self._updates.are_pending:  # updates are carried out in the order of the calls
            self._updates.wait(self._updates.start(lambda: tables.update_each(updates)))
        else:
            tables.update_each(updates)

    def update_each_async(self, updates: Sequence[RowUpdate]) -> int:
        """Starts :meth:`update_each` in another thread, after all earlier updates.

        The tensors must not change until then.

        Returns:
            A handle for ``wait``. ``save``, ``load`` and ``close`` wait for all updates.
        """
        tables = self._open()
        self._check(updates)
        return self._updates.start(lambda: tables.update_each(updates))

    def _check(self, calls: Sequence[RowRead] | Sequence[RowUpdate]) -> None:
        for call in calls:
            if self.spec(call.table).initial_rows:
                raise NoInitialRow(call.table)
