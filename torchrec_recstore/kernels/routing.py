from __future__ import annotations

from dataclasses import dataclass


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
