"""Sharders and sharded modules that place a model's embedding tables in RecStore.

Importing this package registers RecStore's kernel with TorchRec's stock planner.
"""

from torchrec_recstore.sharders.all_kinds import get_recstore_sharders
from torchrec_recstore.sharders.arrow_rows import insert_rows, table_rows
from torchrec_recstore.sharders.collection import (
    RecStoreCollection,
    RecStoreCollectionSharder,
)
from torchrec_recstore.sharders.model_functions import (
    flush_tables,
    reset_rows,
    reshard,
    set_time,
    table_stats,
)
from torchrec_recstore.sharders.perf_config import register_kernel
from torchrec_recstore.sharders.plan_entries import (
    RECSTORE_KERNEL,
    RecStoreParameterSharding,
)
from torchrec_recstore.sharders.row_functions import left_ids, set_scores
from torchrec_recstore.sharders.sharded_collections import (
    RecStoreEmbeddingCollectionSharder,
    RecStoreFeatureProcessedEmbeddingBagCollectionSharder,
    RecStoreShardedEmbeddingBagCollection,
    RecStoreShardedEmbeddingCollection,
    RecStoreSharder,
)
from torchrec_recstore.sharders.train_pipeline import RecStorePrefetchPipeline

register_kernel()

__all__ = [
    "RECSTORE_KERNEL",
    "RecStoreCollection",
    "RecStoreCollectionSharder",
    "RecStoreEmbeddingCollectionSharder",
    "RecStoreFeatureProcessedEmbeddingBagCollectionSharder",
    "RecStoreParameterSharding",
    "RecStorePrefetchPipeline",
    "RecStoreShardedEmbeddingBagCollection",
    "RecStoreShardedEmbeddingCollection",
    "RecStoreSharder",
    "flush_tables",
    "get_recstore_sharders",
    "insert_rows",
    "left_ids",
    "reset_rows",
    "reshard",
    "set_scores",
    "set_time",
    "table_rows",
    "table_stats",
]
