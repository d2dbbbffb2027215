"""Dynamic embedding tables for TorchRec: tables that take any int64 id and grow as they are trained.

Names are imported when first used, so that ``torchrec_recstore.store`` works where torchrec is absent.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchrec_recstore.checkpoint import (
        AsyncSave,
        CheckpointError,
        CheckpointInfo,
        async_save,
        compact_checkpoint,
        export_dense_weights,
        load_checkpoint,
        load_dense_weights,
        load_distributed_checkpoint,
        load_into_stock,
        load_stock_state_dict,
        read_info,
        save_checkpoint,
        stock_optimizer_state_dict,
        stock_state_dict,
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
    from torchrec_recstore.optim import (
        LAMB,
        LARSSGD,
        SGD,
        Adagrad,
        Adam,
        AdamW,
        Ftrl,
        PartialRowWiseAdam,
        PartialRowWiseLAMB,
        RMSprop,
        RowWiseAdagrad,
        state_names,
    )
    from torchrec_recstore.options import (
        LFU,
        LRU,
        ConstantInit,
        Expiry,
        MinFrequency,
        NormalInit,
        RedisStore,
        RocksDBStore,
        ServerStore,
        TableOptions,
        UniformInit,
    )
    from torchrec_recstore.planner import RecStoreConstraints, RecStorePlanner
    from torchrec_recstore.service import NoInitialRow, RecStoreClient, ServerRestartedError, ServiceError
    from torchrec_recstore.sharders import (
        RecStoreEmbeddingCollectionSharder,
        RecStoreFeatureProcessedEmbeddingBagCollectionSharder,
        RecStorePrefetchPipeline,
        RecStoreSharder,
        flush_tables,
        table_stats,
    )
    from torchrec_recstore.store import ColdStoreError, Table, TableStats

__version__ = "0.1.0"

_MODULES = {
    "Adagrad": "optim",
    "Adam": "optim",
    "AdamW": "optim",
    "AsyncSave": "checkpoint",
    "CheckpointError": "checkpoint",
    "CheckpointInfo": "checkpoint",
    "ColdStoreError": "store",
    "ConstantInit": "options",
    "Expiry": "options",
    "Ftrl": "optim",
    "LAMB": "optim",
    "LARSSGD": "optim",
    "LFU": "options",
    "LRU": "options",
    "MinFrequency": "options",
    "NoInitialRow": "service",
    "NormalInit": "options",
    "PartialRowWiseAdam": "optim",
    "PartialRowWiseLAMB": "optim",
    "RMSprop": "optim",
    "RecStoreClient": "service",
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
    "RedisStore": "options",
    "RocksDBStore": "options",
    "RowWiseAdagrad": "optim",
    "SGD": "optim",
    "ServerRestartedError": "service",
    "ServerStore": "options",
    "ServiceError": "service",
    "SparseAdamW": "modules",
    "SparseRowWiseAdagrad": "modules",
    "SparseSGD": "modules",
    "Table": "store",
    "TableOptions": "options",
    "TableStats": "store",
    "UniformInit": "options",
    "async_save": "checkpoint",
    "compact_checkpoint": "checkpoint",
    "export_dense_weights": "checkpoint",
    "flush_tables": "sharders",
    "load_checkpoint": "checkpoint",
    "load_dense_weights": "checkpoint",
    "load_distributed_checkpoint": "checkpoint",
    "load_into_stock": "checkpoint",
    "load_stock_state_dict": "checkpoint",
    "read_info": "checkpoint",
    "save_checkpoint": "checkpoint",
    "state_names": "optim",
    "stock_optimizer_state_dict": "checkpoint",
    "stock_state_dict": "checkpoint",
    "table_stats": "sharders",
}

__all__ = [
    "LAMB",
    "LARSSGD",
    "LFU",
    "LRU",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "AsyncSave",
    "CheckpointError",
    "CheckpointInfo",
    "ColdStoreError",
    "ConstantInit",
    "Expiry",
    "Ftrl",
    "MinFrequency",
    "NoInitialRow",
    "NormalInit",
    "PartialRowWiseAdam",
    "PartialRowWiseLAMB",
    "RMSprop",
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
    "RedisStore",
    "RocksDBStore",
    "RowWiseAdagrad",
    "ServerRestartedError",
    "ServerStore",
    "ServiceError",
    "SparseAdamW",
    "SparseRowWiseAdagrad",
    "SparseSGD",
    "Table",
    "TableOptions",
    "TableStats",
    "UniformInit",
    "async_save",
    "compact_checkpoint",
    "export_dense_weights",
    "flush_tables",
    "load_checkpoint",
    "load_dense_weights",
    "load_distributed_checkpoint",
    "load_into_stock",
    "load_stock_state_dict",
    "read_info",
    "save_checkpoint",
    "state_names",
    "stock_optimizer_state_dict",
    "stock_state_dict",
    "table_stats",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
