from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from torchrec_recstore import ops
from torchrec_recstore.kernels.pooled import PooledKernel
from torchrec_recstore.kernels.routing import BlockRouting
from torchrec_recstore.store import Table
from torchrec_recstore.store.tier import holding


class SequenceKernel(nn.Module):
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
        super().__init__()
        if routings is None:
            routings = [None] * len(tables)
        if len(routings) != len(tables):
            raise ValueError(f"routings must have one entry a table, got {len(routings)} for {len(tables)}")
        self._kernels = [
            PooledKernel([table], [0], "sum", routings=[routing], accumulation_steps=accumulation_steps)
            for table, routing in zip(tables, routings, strict=True)
        ]
        self._columns = [len(table.columns) for table in tables]
        self._anchor = torch.empty(0, requires_grad=True)
        self._name = ", ".join(table.name for table in tables)

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
        with ops.native_errors(f"tables {self._name}"):
            cold = any(kernel.cold_rows.tiers for kernel in self._kernels)
            if not (train and torch.is_grad_enabled()):
                if cold:
                    rows = (kernel.cold_rows.read(part, None, None) for kernel, part in self._parts(ids, counts))
                    return torch.cat([part.flatten() for part in rows])
                return ops.rows_forward(self._groups(), ids, counts, False)[0]
            with ExitStack() as stack:
                if cold:  # the locks of all tables, in their order, before any is taken alone
                    stack.enter_context(holding([tier for kernel in self._kernels for tier in kernel.cold_rows.tiers]))
                for kernel, part in self._parts(ids, counts) if cold else ():
                    stack.enter_context(kernel.cold_rows.resident(part, None))
                out: Tensor = _Rows.apply(self._anchor, self, ids, list(counts))  # type: ignore[no-untyped-call]
            return out

    def prefetch(self, ids: Tensor, counts: Sequence[int]) -> None:
        """As :meth:`PooledKernel.prefetch`, with the ids of each table counted."""
        for kernel, part in self._parts(ids, counts):
            kernel.prefetch(part, [len(part)])

    def _parts(self, ids: Tensor, counts: Sequence[int]) -> Iterator[tuple[PooledKernel, Tensor]]:
        return zip(self._kernels, torch.split(ids, list(counts)), strict=True)

    def _groups(self) -> list[int]:
        return [kernel.group for kernel in self._kernels]


class _Rows(torch.autograd.Function):
    """Backward is the fused optimizer's step of each table."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, kernel: SequenceKernel, ids: Tensor, counts: list[int]) -> Tensor:
        out, contexts = ops.rows_forward(kernel._groups(), ids, counts, True)
        ctx.save_for_backward(*contexts)
        ctx.kernel, ctx.counts = kernel, counts
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        kernel = ctx.kernel
        sizes = [count * columns for count, columns in zip(ctx.counts, kernel._columns, strict=True)]
        parts = torch.split(grads[0].float(), sizes)
        with ops.native_errors(f"tables {kernel._name}"):
            for one, context, grad, columns in zip(
                kernel._kernels, ctx.saved_tensors, parts, kernel._columns, strict=True
            ):
                one.update(context, grad.reshape(-1, columns), False)
        return None, None, None, None
