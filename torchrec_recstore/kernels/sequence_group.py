from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.kernels.device_copies import CopyTarget
from torchrec_recstore.kernels.device_lookups import HostBatch, RowLookups
from torchrec_recstore.kernels.pooled_group import PooledGroup
from torchrec_recstore.kernels.routing import BlockRouting, one_routing_each
from torchrec_recstore.kernels.table_group import TableGroup
from torchrec_recstore.store import Table
from torchrec_recstore.store.memory_tier import holding


class SequenceGroup(TableGroup):
    """A group of tables whose lookup returns the row of each id, without pooling.

    Forward is one native call for all tables. Backward is one native call for each
    table.

    Args:
        tables: The tables, in the order of their ids in the batch.
        routings, accumulation_steps: See :class:`PooledGroup`.

    Raises:
        ValueError: An argument has an invalid value or does not fit the other
            arguments.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        routings: Sequence[BlockRouting | None] | None = None,
        accumulation_steps: int = 1,
    ) -> None:
        super().__init__(tables, len(tables))
        self.tables = list(tables)
        self._groups = []
        for table, routing in zip(
            tables, one_routing_each(tables, routings), strict=True
        ):
            group = PooledGroup(
                [table],
                [0],
                "sum",
                routings=[routing],
                accumulation_steps=accumulation_steps,
            )
            self._groups.append(group)
        self.keeps_gradient = accumulation_steps > 1
        self._handles = [group.handle for group in self._groups]
        self._columns = [len(table.columns) for table in tables]
        self._has_cold_rows = any(group.cold_rows.tiers for group in self._groups)

    @property
    def learning_rate(self) -> Callable[[], float] | None:
        """Returns the learning rate.

        It is called in each backward. None: each table's ``optimizer.lr``.
        """
        return self._groups[0].learning_rate if self._groups else None

    @learning_rate.setter
    def learning_rate(self, value: Callable[[], float] | None) -> None:
        for group in self._groups:
            group.learning_rate = value

    def forward(
        self,
        ids: Tensor,
        counts: Sequence[int],
        *,
        train: bool,
        to: CopyTarget | None = None,
    ) -> Tensor:
        """Looks up a batch.

        Args:
            ids: (N,) int64, table by table. The ids of the batch.
            counts: The number of ids of each table. The sum is N.
            train: See :meth:`PooledGroup.forward`.
            to: See :meth:`PooledGroup.forward`.

        Returns:
            (sum over tables of counts * columns,) float32. The rows, table by table, in
            the order of the ids.

        Raises:
            TypeError, ValueError, ColdStoreError, MemoryError: See
                :meth:`PooledGroup.forward`. ValueError also if ``counts`` does not fit
                ``ids``.
        """
        if ids.dtype is not torch.int64:
            raise TypeError(f"ids must be int64, got {ids.dtype}")
        return self._run(ids, None, counts, None, train, to)

    def training_lookup(
        self,
        ids: Tensor,
        offsets: Tensor | None,
        counts: Sequence[int],
        weights: Tensor | None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See ``TableGroup.training_lookup``."""
        if self.device_rows is not None:
            return self.lookup_on_host(HostBatch(ids, None, counts, None), out)
        if not self._has_cold_rows:
            return self._lookup(ids, counts, True, out)
        with self.resident(ids, None, counts):
            return self._lookup(ids, counts, True, out)

    @contextmanager
    def resident(
        self, ids: Tensor, offsets: Tensor | None, counts: Sequence[int]
    ) -> Iterator[None]:
        """See ``TableGroup.resident``."""
        if not self._has_cold_rows:
            yield
            return
        with ExitStack() as stack:
            # All locks are taken here, in one order, because resident() takes the lock
            # of one table at a time.
            tiers = []
            for group in self._groups:
                tiers.extend(group.cold_rows.tiers)
            stack.enter_context(holding(tiers))
            for group, table_ids in self._ids_of_groups(ids, counts):
                stack.enter_context(group.cold_rows.resident(table_ids, None))
            yield

    def evaluation_lookup(
        self,
        ids: Tensor,
        offsets: Tensor | None,
        counts: Sequence[int],
        weights: Tensor | None,
        out: Tensor | None = None,
    ) -> Tensor:
        """See ``TableGroup.evaluation_lookup``."""
        if self.device_rows is None:
            return self._read(ids, counts, out)
        with self.device_rows.settled_batch(HostBatch(ids, None, counts, None)):
            return self._read(ids, counts, out)

    def _read(self, ids: Tensor, counts: Sequence[int], out: Tensor | None) -> Tensor:
        """Returns the output of an evaluation lookup on the host."""
        if self._has_cold_rows:
            rows = []
            for group, table_ids in self._ids_of_groups(ids, counts):
                rows.append(group.cold_rows.read(table_ids, None, None).flatten())
            return torch.cat(rows)
        return self._lookup(ids, counts, False, out)[0]

    def _lookup(
        self, ids: Tensor, counts: Sequence[int], train: bool, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns the rows, in ``out`` unless that is None, and the contexts."""
        if out is None:
            return ops.rows_forward(self._handles, ids, counts, train)
        contexts = ops.rows_forward_into(self._handles, ids, counts, train, out)
        return out, contexts

    def output_shape(
        self, offsets: Tensor | None, counts: Sequence[int]
    ) -> tuple[int, ...]:
        """See ``TableGroup.output_shape``."""
        return (sum(self._sizes(counts)),)

    def update(
        self,
        context: Tensor,
        grad: Tensor,
        weight_grads: bool,
        counts: Sequence[int] = (),
        rate: float | None = None,
    ) -> Tensor | None:
        """See ``TableGroup.update``."""
        if self.device_rows is None:
            self._update(context, grad, counts, rate)
            return None
        with self.device_rows.lock:
            self.device_rows.settle_pass(context)
            self._update(context, grad, counts, rate)
        return None

    def _update(
        self,
        context: Tensor,
        grad: Tensor,
        counts: Sequence[int],
        rate: float | None,
    ) -> None:
        grads = torch.split(grad, self._sizes(counts))
        for number, group in enumerate(self._groups):
            table_grads = grads[number].reshape(-1, self._columns[number])
            group.update(context[number : number + 1], table_grads, False, rate=rate)

    def put_on_device(self, device: torch.device, rows: Sequence[int]) -> None:
        """Gives each table ``rows`` device slots on a device, before the first lookup.

        Raises:
            ValueError: The rows of a table cannot be on a device. The message names the
                table and the option.
        """
        lookups = RowLookups(self._handles, self.tables)
        rows_on_device = self.make_device_rows(lookups, self.tables, device, rows)
        for group in self._groups:
            group.rows_lock = rows_on_device.lock

    def trains_on_device(self) -> bool:
        """See ``TableGroup.trains_on_device``. Gradients are accumulated on the host."""
        return super().trains_on_device() and not self._is_accumulated

    @property
    def _is_accumulated(self) -> bool:
        return any(group.accumulation_steps > 1 for group in self._groups)

    def learning_rates(self, rate: float | None) -> list[float]:
        """See ``TableGroup.learning_rates``."""
        rates = []
        for group in self._groups:
            rates.extend(group.learning_rates(rate))
        return rates

    def prefetch(self, ids: Tensor, counts: Sequence[int]) -> None:
        """Prepares a batch, with the ``ids`` and ``counts`` of :meth:`forward`.

        See :meth:`PooledGroup.prefetch`.
        """
        for group, table_ids in self._ids_of_groups(ids, counts):
            group.prefetch(table_ids, [len(table_ids)])
        has_rows = self.device_rows is not None and not self._is_accumulated
        if has_rows and not self.frozen:
            assert self.device_rows is not None
            with ops.native_errors(self._label):
                self.device_rows.prefetch()

    def _sizes(self, counts: Sequence[int]) -> list[int]:
        """Returns the number of elements of each table's output."""
        return [
            count * columns
            for count, columns in zip(counts, self._columns, strict=True)
        ]

    def _ids_of_groups(
        self, ids: Tensor, counts: Sequence[int]
    ) -> Iterator[tuple[PooledGroup, Tensor]]:
        """Yields the group of each table, and the ids of the table."""
        return zip(self._groups, torch.split(ids, list(counts)), strict=True)
