from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_recstore import ops


@dataclass(frozen=True)
class BlockRouting:
    """Undoes TorchRec's row-wise split, so that every shard stores raw ids.

    ``id = local + rank * block_rows`` where ``0 <= local < block_rows``, else ``local * world_size + rank``, mod 2**64.
    Where ``mixed``, ids went through ``ops.mix_ids`` ahead of the split, which is undone last.
    Source: ``block_bucketize_sparse_features`` of fbgemm 1.8.0, as torchrec 1.8.0's ``RwSparseFeaturesDist`` calls it.

    Args:
        block_rows: ids of a block, ``ceil(num_embeddings / world_size)``.
        world_size: ranks that the table's rows are split over.
        rank: this shard's among them.
        mixed: whether ids were mixed ahead of the split.

    Raises:
        ValueError: a number is out of range.
    """

    block_rows: int
    world_size: int
    rank: int
    mixed: bool = False

    def __post_init__(self) -> None:
        if self.block_rows < 0 or self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ValueError(f"BlockRouting needs block_rows >= 0 and 0 <= rank < world_size, got {self}")

    def raw(self, ids: Tensor) -> Tensor:
        """The raw ids of ``ids`` as TorchRec's split gives them to this rank, (N,) int64."""
        local = (ids >= 0) & (ids < self.block_rows)
        raw = torch.where(local, ids + self.rank * self.block_rows, ids * self.world_size + self.rank)
        return ops.mix_ids(raw, True) if self.mixed else raw

    def owned(self, ids: Tensor) -> Tensor:
        """Which raw ``ids``, (N,) int64, TorchRec's split sends to this rank: (N,) bool."""
        if self.mixed:
            ids = ops.mix_ids(ids, False)
        in_blocks = (ids >= 0) & (ids < self.block_rows * self.world_size)
        # As uint64: a negative id stands for id + 2**64.
        wrapped = (ids % self.world_size + (ids < 0) * (2**64 % self.world_size)) % self.world_size
        return ((ids // max(self.block_rows, 1) == self.rank) & in_blocks) | ((wrapped == self.rank) & ~in_blocks)
