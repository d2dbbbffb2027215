from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.kernels.lookup import LookupKernel
from torchrec_recstore.kernels.pooled import PooledKernel
from torchrec_recstore.kernels.routing import BlockRouting
from torchrec_recstore.store import Table
from torchrec_recstore.store.memory_tier import holding


class SequenceKernel(LookupKernel):
    """Rows in the order of the batch, for several tables, one native call forward and one a table backward.

    Args:
        tables: in the order in which their ids stand in the batch.
        routings: for each table how its ids were mapped on their way here; ``None`` for raw ids.
        accumulation_steps: as for :class:`PooledKernel`.

    Raises:
        ValueError: arguments that do not fit each other.
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
            raise ValueError(f"routings must have one entry a table, got {len(routings)} for {len(tables)}")
        self._kernels = [
            PooledKernel([table], [0], "sum", routings=[routing], accumulation_steps=accumulation_steps)
            for table, routing in zip(tables, routings, strict=True)
        ]
        self._columns = [len(table.columns) for table in tables]
        self._has_cold_rows = any(kernel.cold_rows.tiers for kernel in self._kernels)

    @property
    def learning_rate(self) -> Callable[[], float] | None:
        """Read in each backward; ``None``: each table's ``optimizer.lr``."""
        return self._kernels[0].learning_rate if self._kernels else None

    @learning_rate.setter
    def learning_rate(self, value: Callable[[], float] | None) -> None:
        for kernel in self._kernels:
            kernel.learning_rate = value

    def forward(self, ids: Tensor, counts: Sequence[int], *, train: bool) -> Tensor:
        """Looks a batch up.

        Args:
            ids: (N,) int64, table by table.
            counts: of ids of each table; they sum up to N.
            train: with grad enabled: ids without a row get one, and backward updates the rows. Otherwise nothing
                changes and the output takes no part in autograd.

        Returns:
            (sum over tables of ids * columns,) float32: table by table, each id's row in the order of the ids.

        Raises:
            TypeError: ids of another dtype.
            ValueError: counts that do not fit, a closed table.
            MemoryError: no room for the new rows of a table.
        """
        if ids.dtype is not torch.int64:
            raise TypeError(f"ids must be int64, got {ids.dtype}")
        return self._run(ids, None, counts, None, train)

    def look_up(
        self, ids: Tensor, offsets: Tensor | None, counts: Sequence[int], weights: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See ``LookupKernel.look_up``."""
        with ExitStack() as stack:
            if self._has_cold_rows:
                # The locks of all tables, in their order, before any is taken alone.
                stack.enter_context(holding([tier for kernel in self._kernels for tier in kernel.cold_rows.tiers]))
                for kernel, part in self._parts(ids, counts):
                    stack.enter_context(kernel.cold_rows.resident(part, None))
            return ops.rows_forward(self._groups(), ids, counts, True)

    def read(self, ids: Tensor, offsets: Tensor | None, counts: Sequence[int], weights: Tensor | None) -> Tensor:
        """See ``LookupKernel.read``."""
        if self._has_cold_rows:
            rows = (kernel.cold_rows.read(part, None, None) for kernel, part in self._parts(ids, counts))
            return torch.cat([part.flatten() for part in rows])
        return ops.rows_forward(self._groups(), ids, counts, False)[0]

    def output_shape(self, offsets: Tensor | None, counts: Sequence[int]) -> tuple[int, ...]:
        """See ``LookupKernel.output_shape``."""
        return (sum(count * columns for count, columns in zip(counts, self._columns, strict=True)),)

    def update(self, context: Tensor, grad: Tensor, weight_grads: bool, counts: Sequence[int] = ()) -> Tensor | None:
        """See ``LookupKernel.update``."""
        sizes = [count * columns for count, columns in zip(counts, self._columns, strict=True)]
        for i, (kernel, part) in enumerate(zip(self._kernels, torch.split(grad, sizes), strict=True)):
            kernel.update(context[i : i + 1], part.reshape(-1, self._columns[i]), False)
        return None

    def prefetch(self, ids: Tensor, counts: Sequence[int]) -> None:
        """As :meth:`PooledKernel.prefetch`, with the ids of each table counted."""
        for kernel, part in self._parts(ids, counts):
            kernel.prefetch(part, [len(part)])

    def _parts(self, ids: Tensor, counts: Sequence[int]) -> Iterator[tuple[PooledKernel, Tensor]]:
        return zip(self._kernels, torch.split(ids, list(counts)), strict=True)

    def _groups(self) -> list[int]:
        return [kernel.group for kernel in self._kernels]
