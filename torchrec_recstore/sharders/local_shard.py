"""A shard of a table on this rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_recstore.kernels import BlockRouting
from torchrec_recstore.store import Table


@dataclass(frozen=True)
class LocalShard:
    """A shard on this rank, and which ids belong to it."""

    table: Table
    routing: BlockRouting | None

    def owned(self, ids: Tensor) -> Tensor:
        """(N,) bool: whether this shard is the one for each of ``ids``, (N,) int64."""
        if self.routing is None:
            return torch.ones_like(ids, dtype=torch.bool)
        return self.routing.owned(ids)
