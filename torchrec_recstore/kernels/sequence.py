from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.kernels.device_copies import CopyTarget
from torchrec_recstore.kernels.lookup import LookupKernel
from torchrec_recstore.kernels.pooled import PooledKernel
from torchrec_recstore.kernels.routing import BlockRouting, one_routing_each
from torchrec_recstore.store import Table
from torchrec_recstore.store.memory_tier import holding


class SequenceKernel(LookupKernel):
    """A kernel that returns a row for each id of the batch, without pooling.

    Forward is one native call for all tables. Backward is one native call for each
    table.

    Args:
        tables: The tables, in the order of their ids in the batch.
        routings, accumulation_steps: See :class:`PooledKernel`.

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
        self._kernels = [
            PooledKernel(
                [table],
                [0],
                "sum",
                routings=[routing],
                accumulation_steps=accumulation_steps,
            )
            for table, routing in zip(
                tables, one_routing_each(tables, routings), strict=True
            )
        ]
        self._groups = [kernel.group for kernel in self._kernels]
        self._columns = [len(table.columns) for table in tables]
        self._has_cold_rows = any(kernel.cold_rows.tiers for kernel in self._kernels)

    @property
    def learning_rate(self) -> Callable[[], float] | None:
        """Returns the learning rate.

        It is called in each backward. None: each table's ``optimizer.lr``.
        """
        return self._kernels[0].learning_rate if self._kernels else None

    @learning_rate.setter
    def learning_rate(self, value: Callable[[], float] | None) -> None:
        for kernel in self._kernels:
            kernel.learning_rate = value

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
            train: See :meth:`PooledKernel.forward`.
            to: See :meth:`PooledKernel.forward`.

        Returns:
            (sum over tables of counts * columns,) float32. The rows, table by table, in
            the order of the ids.

        Raises:
            TypeError, ValueError, ColdStoreError, MemoryError: See
                :meth:`PooledKernel.forward`. ValueError also if ``counts`` does not fit
                ``ids``.
        """
        if ids.dtype is not torch.int64:
            raise TypeError(f"ids must be int64, got {ids.dtype}")
        return self._run(ids, None, counts, None, train, to)

    def look_up(
        self,
        ids: Tensor,
        offsets: Tensor | None,
        counts: Sequence[int],
        weights: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """See ``LookupKernel.look_up``."""
        if not self._has_cold_rows:
            return ops.rows_forward(self._groups, ids, counts, True)
        with ExitStack() as stack:
            # All locks are taken here, in one order, because resident() takes the lock
            # of one table at a time.
            stack.enter_context(
                holding(
                    [
                        tier
                        for kernel in self._kernels
                        for tier in kernel.cold_rows.tiers
                    ]
                )
            )
            for kernel, part in self._parts(ids, counts):
                stack.enter_context(kernel.cold_rows.resident(part, None))
            return ops.rows_forward(self._groups, ids, counts, True)

    def read(
        self,
        ids: Tensor,
        offsets: Tensor | None,
        counts: Sequence[int],
        weights: Tensor | None,
    ) -> Tensor:
        """See ``LookupKernel.read``."""
        if self._has_cold_rows:
            rows = (
                kernel.cold_rows.read(part, None, None)
                for kernel, part in self._parts(ids, counts)
            )
            return torch.cat([part.flatten() for part in rows])
        return ops.rows_forward(self._groups, ids, counts, False)[0]

    def output_shape(
        self, offsets: Tensor | None, counts: Sequence[int]
    ) -> tuple[int, ...]:
        """See ``LookupKernel.output_shape``."""
        return (
            sum(
                count * columns
                for count, columns in zip(counts, self._columns, strict=True)
            ),
        )

    def update(
        self,
        context: Tensor,
        grad: Tensor,
        weight_grads: bool,
        counts: Sequence[int] = (),
        rate: float | None = None,
    ) -> Tensor | None:
        """See ``LookupKernel.update``."""
        sizes = [
            count * columns
            for count, columns in zip(counts, self._columns, strict=True)
        ]
        for i, (kernel, part) in enumerate(
            zip(self._kernels, torch.split(grad, sizes), strict=True)
        ):
            kernel.update(
                context[i : i + 1], part.reshape(-1, self._columns[i]), False, rate=rate
            )
        return None

    def prefetch(self, ids: Tensor, counts: Sequence[int]) -> None:
        """Prepares a batch, with the ``ids`` and ``counts`` of :meth:`forward`.

        See :meth:`PooledKernel.prefetch`.
        """
        for kernel, part in self._parts(ids, counts):
            kernel.prefetch(part, [len(part)])

    def _parts(
        self, ids: Tensor, counts: Sequence[int]
    ) -> Iterator[tuple[PooledKernel, Tensor]]:
        return zip(self._kernels, torch.split(ids, list(counts)), strict=True)
