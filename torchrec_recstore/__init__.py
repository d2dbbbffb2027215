"""Dynamic embedding tables for TorchRec: tables that accept any int64 id and grow during training.

Names are imported when they are first used, so that ``torchrec_recstore.store`` works without TorchRec. Options and
optimizers need not even torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrec_recstore import optim, options
from torchrec_recstore.optim import *  # noqa: F403
from torchrec_recstore.options import *  # noqa: F403
from torchrec_recstore.utils import lazy_names

if TYPE_CHECKING:
    from torchrec_recstore.checkpoint import (
        AsyncSave,
        CheckpointError,
        CheckpointInfo,
        TopRows,
        async_save,
        compact_checkpoint,
        export_dense_weights,
        load_checkpoint,
        load_dense_weights,
        load_distributed_checkpoint,
        load_into_stock,
        load_stock_state_dict,
        neighbours,
        read_info,
        save_checkpoint,
        stock_optimizer_state_dict,
        stock_state_dict,
        top_rows,
    )
    from torchrec_recstore.modules import (
        RecStoreEmbedding,
        RecStoreEmbeddingBag,
        RecStoreEmbeddingBagCollection,
        RecStoreEmbeddingCollection,
        SparseAdamW,
        SparseRowWiseAdagrad,
        SparseSGD,
    )
    from torchrec_recstore.planner import RecStoreConstraints, RecStorePlanner
    from torchrec_recstore.sharders import (
        RecStoreEmbeddingCollectionSharder,
        RecStoreFeatureProcessedEmbeddingBagCollectionSharder,
        RecStorePrefetchPipeline,
        RecStoreSharder,
        flush_tables,
        reset_rows,
        reshard,
        set_time,
        table_stats,
    )
    from torchrec_recstore.store import ColdStoreError, Table, TableStats
    from torchrec_recstore.threads import tune_threads
    from torchrec_recstore.utils import RecStoreWarning
    from torchrec_recstore_service import (
        NoInitialRow,
        RecStoreClient,
        ServerRestartedError,
        ServerSetError,
        ServiceError,
        get_include,
    )

__version__ = "0.2.0"

_MODULES = {
    "AsyncSave": "checkpoint",
    "CheckpointError": "checkpoint",
    "CheckpointInfo": "checkpoint",
    "ColdStoreError": "store",
    "RecStoreConstraints": "planner",
    "RecStoreEmbedding": "modules",
    "RecStoreEmbeddingBag": "modules",
    "RecStoreEmbeddingBagCollection": "modules",
    "RecStoreEmbeddingCollection": "modules",
    "RecStoreEmbeddingCollectionSharder": "sharders",
    "RecStoreFeatureProcessedEmbeddingBagCollectionSharder": "sharders",
    "RecStorePlanner": "planner",
    "RecStorePrefetchPipeline": "sharders",
    "RecStoreSharder": "sharders",
    "RecStoreWarning": "utils",
    "SparseAdamW": "modules",
    "SparseRowWiseAdagrad": "modules",
    "SparseSGD": "modules",
    "Table": "store",
    "TableStats": "store",
    "TopRows": "checkpoint",
    "async_save": "checkpoint",
    "compact_checkpoint": "checkpoint",
    "export_dense_weights": "checkpoint",
    "flush_tables": "sharders",
    "load_checkpoint": "checkpoint",
    "load_dense_weights": "checkpoint",
    "load_distributed_checkpoint": "checkpoint",
    "load_into_stock": "checkpoint",
    "load_stock_state_dict": "checkpoint",
    "neighbours": "checkpoint",
    "read_info": "checkpoint",
    "reset_rows": "sharders",
    "reshard": "sharders",
    "save_checkpoint": "checkpoint",
    "set_time": "sharders",
    "stock_optimizer_state_dict": "checkpoint",
    "stock_state_dict": "checkpoint",
    "table_stats": "sharders",
    "top_rows": "checkpoint",
    "tune_threads": "threads",
}

__all__ = [
    "AsyncSave",
    "CheckpointError",
    "CheckpointInfo",
    "ColdStoreError",
    "NoInitialRow",
    "RecStoreClient",
    "RecStoreConstraints",
    "RecStoreEmbedding",
    "RecStoreEmbeddingBag",
    "RecStoreEmbeddingBagCollection",
    "RecStoreEmbeddingCollection",
    "RecStoreEmbeddingCollectionSharder",
    "RecStoreFeatureProcessedEmbeddingBagCollectionSharder",
    "RecStorePlanner",
    "RecStorePrefetchPipeline",
    "RecStoreSharder",
    "RecStoreWarning",
    "ServerRestartedError",
    "ServerSetError",
    "ServiceError",
    "SparseAdamW",
    "SparseRowWiseAdagrad",
    "SparseSGD",
    "Table",
    "TableStats",
    "TopRows",
    "async_save",
    "compact_checkpoint",
    "export_dense_weights",
    "flush_tables",
    "get_include",
    "load_checkpoint",
    "load_dense_weights",
    "load_distributed_checkpoint",
    "load_into_stock",
    "load_stock_state_dict",
    "neighbours",
    "read_info",
    "reset_rows",
    "reshard",
    "save_checkpoint",
    "set_time",
    "stock_optimizer_state_dict",
    "stock_state_dict",
    "table_stats",
    "top_rows",
    "tune_threads",
]

_OF_THE_SERVICE = (
    "NoInitialRow",
    "RecStoreClient",
    "ServerRestartedError",
    "ServerSetError",
    "ServiceError",
    "get_include",
)

__all__ += optim.__all__
__all__ += options.__all__

__getattr__, __dir__ = lazy_names(__name__, _MODULES, dict.fromkeys(_OF_THE_SERVICE, "service"))
