"""How TorchRec splits a table's rows over ranks, and what a shard has to undo."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torchrec.distributed.embedding_sharding import EmbeddingSharding
from torchrec.distributed.embedding_types import ShardedEmbeddingTable
from torchrec.distributed.types import ShardingType

from torchrec_recstore.kernels import BlockRouting
from torchrec_recstore.sharders.fused_params import table_options

ROW_SPLIT = frozenset({ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value})
"""The sharding types that split rows."""

IN_NODE = frozenset({ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value})
"""Those of them that split rows over the ranks of one node."""

MOST_ROWS_IN_NODE = 2**31 - 1
"""``TwRwSparseFeaturesDist`` keeps block sizes in int32 (torchrec 1.8.0). A RecStore table's ``num_embeddings`` is
but a hint and moves only the border between blocks, so that a larger one is lowered to this."""


def row_split(sharding: EmbeddingSharding[Any, Any, Any, Any], sharding_type: str) -> tuple[int, int] | None:
    """(ranks, this rank) among which the sharding splits each table's rows; None where it does not."""
    # No public accessors of these in torchrec 1.8.0.
    if sharding_type == ShardingType.ROW_WISE.value:
        return dist.get_world_size(sharding._pg), dist.get_rank(sharding._pg)
    if sharding_type in IN_NODE:
        return sharding._local_size, sharding._rank % sharding._local_size
    return None


def routing(table: ShardedEmbeddingTable, split: tuple[int, int] | None) -> BlockRouting | None:
    """What the shard has to undo on the ids that it is given; None where they are raw.

    Args:
        table: TorchRec's description of the shard.
        split: of :func:`row_split`.
    """
    if split is None:
        return None
    ranks, rank = split
    # The block of RwSparseFeaturesDist and TwRwSparseFeaturesDist, torchrec 1.8.0: ceil(num_embeddings / ranks).
    return BlockRouting(
        block_rows=-(-table.num_embeddings // ranks),
        world_size=ranks,
        rank=rank,
        mixed=table_options(table.fused_params).routing == "hash",
    )
