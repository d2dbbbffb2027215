"""Sharders and sharded modules that place a model's embedding tables in RecStore.

Importing this package registers RecStore's kernel with TorchRec's stock planner.
"""

from torchrec_recstore.sharders.collection import RecStoreCollection, RecStoreCollectionSharder
from torchrec_recstore.sharders.embedding import (
    RecStoreEmbeddingCollectionSharder,
    RecStoreShardedEmbeddingCollection,
)
from torchrec_recstore.sharders.embeddingbag import RecStoreShardedEmbeddingBagCollection, RecStoreSharder
from torchrec_recstore.sharders.event_time import set_time
from torchrec_recstore.sharders.fp_embeddingbag import RecStoreFeatureProcessedEmbeddingBagCollectionSharder
from torchrec_recstore.sharders.in_place import reshard
from torchrec_recstore.sharders.model_tables import flush_tables, table_stats
from torchrec_recstore.sharders.perf import register_kernel
from torchrec_recstore.sharders.plan import RECSTORE_KERNEL, RecStoreParameterSharding
from torchrec_recstore.sharders.reset import reset_rows
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
    "reset_rows",
    "reshard",
    "set_time",
    "table_stats",
]
