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
    """The rows of a group's tables that lie in cold stores.

    Args:
        tables: of the group.
        group: its handle.
    """

    def __init__(self, tables: Sequence[Table], group: int) -> None:
        self._tables = tables
        self._group = group
        self.tiers = [table.tier for table in tables if isinstance(table.tier, ColdTier)]

    @contextmanager
    def resident(self, ids: Tensor, offsets: Tensor | None) -> Iterator[None]:
        """Within it the rows that a training step looks up are in memory, and stay there; the step is done within it.

        Args:
            ids: (N,) int64, as the group is given them.
            offsets: likewise.
        """
        with holding(self.tiers):
            if self.tiers:
                for table, raw in zip(self._tables, ops.group_table_ids(self._group, ids, offsets), strict=True):
                    table.tier.bring(raw, "lookup")
            yield
            for tier in self.tiers:
                tier.end_step()

    def read(self, ids: Tensor, offsets: Tensor | None, weights: Tensor | None) -> Tensor:
        """An evaluation lookup that reads them where they are: pooled (B, columns) float32."""
        with holding(self.tiers):
            raw_ids = ops.group_table_ids(self._group, ids, offsets)
            cold = [table.tier.read(raw) for table, raw in zip(self._tables, raw_ids, strict=True)]
            cold_ids, images = zip(*cold, strict=True)
            return ops.group_read(self._group, ids, offsets, weights, cold_ids, images)

    def prefetch(self, ids: Tensor, counts: Sequence[int]) -> None:
        """Reads those of a batch that is soon to be looked up.

        Args:
            ids: (N,) int64, feature by feature.
            counts: ids of each feature.
        """
        if not self.tiers:
            return
        offsets = torch.tensor([0, *counts]).cumsum(0)
        for table, raw in zip(self._tables, ops.group_table_ids(self._group, ids, offsets), strict=True):
            table.tier.prefetch(raw)
