from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.store import Table
from torchrec_recstore.store.cold_tier import ColdTier
from torchrec_recstore.store.memory_tier import holding


class ColdRows:
    """The rows of a group of tables that are in cold stores.

    Args:
        tables: The tables of the group.
        group: The handle of the native group.
    """

    def __init__(self, tables: Sequence[Table], group: int) -> None:
        self._tables = tables
        self._group = group
        self.tiers = [table.tier for table in tables if isinstance(table.tier, ColdTier)]

    @contextmanager
    def resident(self, ids: Tensor, offsets: Tensor | None) -> Iterator[None]:
        """Brings the rows of a training step to memory, and keeps them there while the caller runs the step.

        Args:
            ids: (N,) int64. The ids of the batch, as they are passed to the native group.
            offsets: (F * B + 1,) int32 or int64. The offsets of the bags. None if the group does not pool.
        """
        with holding(self.tiers):
            if self.tiers:
                for table, raw in zip(self._tables, ops.group_table_ids(self._group, ids, offsets), strict=True):
                    table.tier.bring(raw, "lookup")
            yield
            for tier in self.tiers:
                tier.end_step()

    def read(self, ids: Tensor, offsets: Tensor | None, weights: Tensor | None) -> Tensor:
        """Looks up a batch for evaluation. Cold rows are read from their cold store, and stay there.

        Args:
            ids: (N,) int64. The ids of the batch, as they are passed to the native group.
            offsets: (F * B + 1,) int32 or int64. The offsets of the bags. None if the group does not pool.
            weights: (N,) float32. The per-sample weights, or None.

        Returns:
            (B, columns) float32, pooled. (N, columns) if ``offsets`` is None.
        """
        with holding(self.tiers):
            raw_ids = ops.group_table_ids(self._group, ids, offsets)
            cold = [table.tier.read(raw) for table, raw in zip(self._tables, raw_ids, strict=True)]
            cold_ids, images = zip(*cold, strict=True)
            return ops.group_read(self._group, ids, offsets, weights, cold_ids, images)

    def prefetch(self, ids: Tensor, counts: Sequence[int]) -> None:
        """Reads the cold rows of a coming batch, so that its lookup does not wait for the cold stores.

        Args:
            ids: (N,) int64, feature by feature. The ids of the batch.
            counts: The number of ids of each feature.
        """
        if not self.tiers:
            return
        offsets = torch.tensor([0, *counts]).cumsum(0)
        for table, raw in zip(self._tables, ops.group_table_ids(self._group, ids, offsets), strict=True):
            table.tier.prefetch(raw)
