from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Literal

import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.kernels.cold_rows import ColdRows
from torchrec_recstore.kernels.lookup import LookupKernel
from torchrec_recstore.kernels.routing import BlockRouting
from torchrec_recstore.store import Table


class PooledKernel(LookupKernel):
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
        super().__init__(tables, 1)
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
        self._features = len(feature_tables)
        self._columns = sum(len(self.tables[number].columns) for number in feature_tables)

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
        return self._run(ids, offsets, (), weights, train)

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

    def look_up(
        self, ids: Tensor, offsets: Tensor | None, counts: Sequence[int], weights: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See ``LookupKernel.look_up``."""
        assert offsets is not None
        with self.cold_rows.resident(ids, offsets):
            return ops.group_forward(self._group, ids, offsets, weights, True)

    def read(self, ids: Tensor, offsets: Tensor | None, counts: Sequence[int], weights: Tensor | None) -> Tensor:
        """See ``LookupKernel.read``."""
        assert offsets is not None
        if self.cold_rows.tiers:
            return self.cold_rows.read(ids, offsets, weights)
        return ops.group_forward(self._group, ids, offsets, weights, False)[0]

    def output_shape(self, offsets: Tensor | None, counts: Sequence[int]) -> tuple[int, ...]:
        """See ``LookupKernel.output_shape``."""
        assert offsets is not None
        return (offsets.shape[0] - 1) // max(self._features, 1), self._columns

    def update(self, context: Tensor, grad: Tensor, weight_grads: bool, counts: Sequence[int] = ()) -> Tensor | None:
        """The fused optimizer's step of one training forward, or what awaits it where passes are accumulated.

        The arguments and the result are those of ``LookupKernel.update``.
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
