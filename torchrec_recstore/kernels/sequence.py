from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.kernels.device_copies import CopyTarget
from torchrec_recstore.kernels.lookup import LookupKernel
from torchrec_recstore.kernels.pooled import PooledKernel
from torchrec_recstore.kernels.routing import BlockRouting
from torchrec_recstore.store import Table
from torchrec_recstore.store.memory_tier import holding


class SequenceKernel(LookupKernel):
    """A kernel that returns a row for each id of the batch, without pooling.

    Forward is one native call for all tables. Backward is one native call for each table.

    Args:
        tables: The tables, in the order of their ids in the batch.
        routings: For each table, the mapping that TorchRec's input distribution has applied to its ids. An entry is
            None if its ids are raw ids. Default: None, which means that all ids are raw ids.
        accumulation_steps: See :class:`PooledKernel`. Default: 1.

    Raises:
        ValueError: An argument has an invalid value or does not fit the other arguments.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        routings: Sequence[BlockRouting | None] | None = None,
        accumulation_steps: int = 1,
    ) -> None:
        super().__init__(tables, len(tables))
        if routings is None:
            routings = [None] * len(tables)
        if len(routings) != len(tables):
            raise ValueError(f"routings must have one entry per table, got {len(routings)} for {len(tables)}")
        self._kernels = [
            PooledKernel([table], [0], "sum", routings=[routing], accumulation_steps=accumulation_steps)
            for table, routing in zip(tables, routings, strict=True)
        ]
        self._groups = [kernel.group for kernel in self._kernels]
        self._columns = [len(table.columns) for table in tables]
        self._has_cold_rows = any(kernel.cold_rows.tiers for kernel in self._kernels)

    @property
    def learning_rate(self) -> Callable[[], float] | None:
        """Returns the learning rate. It is called in each backward. None: each table's ``optimizer.lr``."""
        return self._kernels[0].learning_rate if self._kernels else None

    @learning_rate.setter
    def learning_rate(self, value: Callable[[], float] | None) -> None:
        for kernel in self._kernels:
            kernel.learning_rate = value

    def forward(self, ids: Tensor, counts: Sequence[int], *, train: bool, to: CopyTarget | None = None) -> Tensor:
        """Looks up a batch.

        Args:
            ids: (N,) int64, table by table. The ids of the batch.
            counts: The number of ids of each table. The sum is N.
            train: Whether the lookup is a training step. If it is, and grad is enabled, each id without a row gets one,
                and the backward updates the rows. Otherwise nothing changes, and a backward warns once, unless
                ``frozen`` is set.
            to: See :meth:`PooledKernel.forward`.

        Returns:
            (sum over tables of counts * columns,) float32. The rows, table by table, in the order of the ids.

        Raises:
            TypeError: ``ids`` has another dtype.
            ValueError: ``counts`` does not fit ``ids``, a table is closed, or the batch needs more rows of a table at
                once than its ``max_rows``.
            ColdStoreError: A cold store fails. Every row is where it was before the call.
            MemoryError: There is no memory for the new rows. Nothing has changed.
        """
        if ids.dtype is not torch.int64:
            raise TypeError(f"ids must be int64, got {ids.dtype}")
        return self._run(ids, None, counts, None, train, to)

    def look_up(
        self, ids: Tensor, offsets: Tensor | None, counts: Sequence[int], weights: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See ``LookupKernel.look_up``."""
        if not self._has_cold_rows:
            return ops.rows_forward(self._groups, ids, counts, True)
        with ExitStack() as stack:
            # All locks are taken here, in one order, because resident() takes the lock of one table at a time.
            stack.enter_context(holding([tier for kernel in self._kernels for tier in kernel.cold_rows.tiers]))
            for kernel, part in self._parts(ids, counts):
                stack.enter_context(kernel.cold_rows.resident(part, None))
            return ops.rows_forward(self._groups, ids, counts, True)

    def read(self, ids: Tensor, offsets: Tensor | None, counts: Sequence[int], weights: Tensor | None) -> Tensor:
        """See ``LookupKernel.read``."""
        if self._has_cold_rows:
            rows = (kernel.cold_rows.read(part, None, None) for kernel, part in self._parts(ids, counts))
            return torch.cat([part.flatten() for part in rows])
        return ops.rows_forward(self._groups, ids, counts, False)[0]

    def output_shape(self, offsets: Tensor | None, counts: Sequence[int]) -> tuple[int, ...]:
        """See ``LookupKernel.output_shape``."""
        return (sum(count * columns for count, columns in zip(counts, self._columns, strict=True)),)

    def update(
        self, context: Tensor, grad: Tensor, weight_grads: bool, counts: Sequence[int] = (), rate: float | None = None
    ) -> Tensor | None:
        """See ``LookupKernel.update``."""
        sizes = [count * columns for count, columns in zip(counts, self._columns, strict=True)]
        for i, (kernel, part) in enumerate(zip(self._kernels, torch.split(grad, sizes), strict=True)):
            kernel.update(context[i : i + 1], part.reshape(-1, self._columns[i]), False, rate=rate)
        return None

    def prefetch(self, ids: Tensor, counts: Sequence[int]) -> None:
        """Prepares a batch for its training forward. See :meth:`PooledKernel.prefetch`.

        Args:
            ids: (N,) int64, table by table. The ids of the batch.
            counts: The number of ids of each table.
        """
        for kernel, part in self._parts(ids, counts):
            kernel.prefetch(part, [len(part)])

    def _parts(self, ids: Tensor, counts: Sequence[int]) -> Iterator[tuple[PooledKernel, Tensor]]:
        return zip(self._kernels, torch.split(ids, list(counts)), strict=True)
