from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from torchrec_recstore import ops
from torchrec_recstore.kernels.cold_rows import ColdRows
from torchrec_recstore.kernels.routing import BlockRouting
from torchrec_recstore.store import Table


class PooledKernel(nn.Module):
    """Embedding bags over a group of tables, one native call forward and one backward.

    Symbols: ``F`` features, ``B`` batch size, ``N`` ids in the batch.

    Args:
        tables: the group's tables.
        feature_tables: for each feature, in the order of the batch, the position of its table.
        pooling: of a bag's rows.
        routings: for each table how its ids were mapped on their way here; ``None`` for raw ids.
        accumulation_steps: backward passes whose gradients are summed before the rows are updated, once, with the
            learning rate of the last of them. Lookups in between read the rows as they were. A pass whose backward
            never comes does not count.

    Raises:
        ValueError: arguments that do not fit each other.
    """

    learning_rate: Callable[[], float] | None
    """Read in each backward; ``None``: each table's ``optimizer.lr``."""

    def __init__(
        self,
        tables: Sequence[Table],
        feature_tables: Sequence[int],
        pooling: Literal["sum", "mean"],
        *,
        routings: Sequence[BlockRouting | None] | None = None,
        accumulation_steps: int = 1,
    ) -> None:
        super().__init__()
        if pooling not in ("sum", "mean"):
            raise ValueError(f"pooling must be 'sum' or 'mean', got {pooling!r}")
        if routings is None:
            routings = [None] * len(tables)
        if len(routings) != len(tables):
            raise ValueError(f"routings must have one entry a table, got {len(routings)} for {len(tables)}")
        if accumulation_steps < 1:
            raise ValueError(f"accumulation_steps must be at least 1, got {accumulation_steps}")
        self.tables = list(tables)
        self.accumulation_steps = accumulation_steps
        self._pending: list[tuple[Tensor, Tensor]] = []  # (context, grad) of each pass that awaits the update
        self.learning_rate = None
        numbers = [(0, 0, 0, False) if r is None else astuple(r) for r in routings]
        self._group = ops.group_create([t.handle for t in self.tables], feature_tables, numbers, pooling == "mean")
        self._free = weakref.finalize(self, ops.group_destroy, self._group)
        self.cold_rows = ColdRows(self.tables, self._group)
        self._anchor = torch.empty(0, requires_grad=True)
        self._name = ", ".join(table.name for table in self.tables)

    def forward(self, ids: Tensor, offsets: Tensor, weights: Tensor | None = None, *, train: bool) -> Tensor:
        """Looks a batch up and pools it.

        Args:
            ids: (N,) int64, feature by feature.
            offsets: (F * B + 1,) int32 or int64: where each bag begins.
            weights: (N,) float32 per-sample weights, or None; they get a gradient where they require one.
            train: with grad enabled: ids without a row get one, and backward updates the rows. Otherwise nothing
                changes and the output takes no part in autograd.

        Returns:
            (B, sum of the features' columns) float32, whatever the rows are stored as.

        Raises:
            TypeError: a tensor of the wrong dtype; the message names it.
            ValueError: a tensor of the wrong shape, offsets that do not ascend, a closed table, or a batch that needs
                more rows of a table at once than its ``max_rows``.
            ColdStoreError: a cold store fails; every row is where it was.
            MemoryError: no room for the new rows; nothing has changed.
        """
        self._check(ids, offsets, weights)
        with ops.native_errors(f"tables {self._name}"):
            if not (train and torch.is_grad_enabled()):
                if self.cold_rows.tiers:
                    return self.cold_rows.read(ids, offsets, weights)
                return ops.group_forward(self._group, ids, offsets, weights, False)[0]
            with self.cold_rows.resident(ids, offsets):
                out: Tensor = _PooledLookup.apply(self._anchor, self, ids, offsets, weights)  # type: ignore[no-untyped-call]
            return out

    def prefetch(self, ids: Tensor, counts: Sequence[int]) -> None:
        """Prepares a batch ahead of its training forward; may run in a thread beside other work.

        Missing rows are made, save those of tables with ``max_rows`` or ``admission``, and cold rows are read.

        Args:
            ids: (N,) int64, feature by feature.
            counts: ids of each feature.

        Raises:
            TypeError, ValueError, MemoryError, ColdStoreError: as :meth:`forward`.
        """
        if ids.dtype is not torch.int64:
            raise TypeError(f"ids must be int64, got {ids.dtype}")
        with ops.native_errors(f"tables {self._name}"):
            ops.group_prefetch(self._group, ids, counts)
            self.cold_rows.prefetch(ids, counts)

    def _check(self, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> None:
        if ids.dtype is not torch.int64:
            raise TypeError(f"ids must be int64, got {ids.dtype}")
        if offsets.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"offsets must be int32 or int64, got {offsets.dtype}")
        if weights is not None and weights.dtype is not torch.float32:
            raise TypeError(f"weights must be float32, got {weights.dtype}")

    @property
    def group(self) -> int:
        """The handle of the native group, for other lookups of the same tables; valid as long as the kernel."""
        return self._group

    def update(self, context: Tensor, grad: Tensor, weight_grads: bool) -> Tensor | None:
        """The fused optimizer's step of one training forward, or what awaits it where passes are accumulated.

        Args:
            context: which the forward of the kernel's group gave.
            grad: (B, sum of the features' columns) float32.
            weight_grads: whether the per-sample weights get a gradient.

        Returns:
            (N,) float32 where ``weight_grads`` is set.
        """
        if self.accumulation_steps == 1:
            grad_weights = ops.group_backward(context, grad, self._learning_rates(), weight_grads)
            return grad_weights if weight_grads else None
        # By the rows of its own forward, so before the update.
        later = ops.group_weight_gradients(context, grad) if weight_grads else None
        self._pending.append((context, grad.clone()))  # whose memory is the caller's
        if len(self._pending) == self.accumulation_steps:
            pending, self._pending = self._pending, []
            contexts, grads = zip(*pending, strict=True)
            ops.group_accumulated_backward(contexts, grads, self._learning_rates())
        return later

    def _learning_rates(self) -> list[float]:
        if self.learning_rate is not None:
            return [self.learning_rate()] * len(self.tables)
        return [table.optimizer.lr for table in self.tables]


class _PooledLookup(torch.autograd.Function):
    """Backward is the fused optimizer's step: the rows are changed there, and only the weights get a gradient."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, kernel: PooledKernel, ids: Tensor, offsets: Tensor, weights: Tensor | None
    ) -> Tensor:
        out, context = ops.group_forward(kernel._group, ids, offsets, weights, True)
        # The native side reads the weights again: saved, so that autograd refuses ones changed in place.
        ctx.save_for_backward(context, weights)
        ctx.kernel = kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None, Tensor | None]:
        context = ctx.saved_tensors[0]
        grad = grads[0]
        if grad.dtype is not torch.float32:
            grad = grad.float()
        with ops.native_errors(f"tables {ctx.kernel._name}"):
            grad_weights = ctx.kernel.update(context, grad, ctx.needs_input_grad[4])
        return None, None, None, None, grad_weights
