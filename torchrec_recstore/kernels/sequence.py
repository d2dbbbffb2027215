from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from torchrec_recstore.kernels.pooled import PooledKernel
from torchrec_recstore.kernels.routing import BlockRouting
from torchrec_recstore.store import Table


class SequenceKernel(nn.Module):
    """Rows in the order of the batch, for several tables: one native call a table, as bags of one id each.

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
        super().__init__()
        if routings is None:
            routings = [None] * len(tables)
        if len(routings) != len(tables):
            raise ValueError(f"routings must have one entry a table, got {len(routings)} for {len(tables)}")
        self._kernels = [
            PooledKernel([table], [0], "sum", routings=[routing], accumulation_steps=accumulation_steps)
            for table, routing in zip(tables, routings, strict=True)
        ]
        self._counting = torch.empty(0, dtype=torch.int32)

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
        if len(counts) != len(self._kernels) or sum(counts) != len(ids):
            raise ValueError(
                f"counts must say how many of the {len(ids)} ids belong to each of the {len(self._kernels)} tables, "
                f"got {list(counts)}"
            )
        offsets = self._one_id_bags(max(counts, default=0))
        rows = [
            kernel(part, offsets[: len(part) + 1], train=train).view(-1)
            for kernel, part in zip(self._kernels, torch.split(ids, list(counts)), strict=True)
        ]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def prefetch(self, ids: Tensor, counts: Sequence[int]) -> None:
        """As :meth:`PooledKernel.prefetch`, with the ids of each table counted."""
        for kernel, part in zip(self._kernels, torch.split(ids, list(counts)), strict=True):
            kernel.prefetch(part, [len(part)])

    def _one_id_bags(self, count: int) -> Tensor:
        # Kept, since it is the same in every step; the native side copies what it needs of it.
        if len(self._counting) <= count:
            self._counting = torch.arange(count + count // 2 + 1, dtype=torch.int32)
        return self._counting
