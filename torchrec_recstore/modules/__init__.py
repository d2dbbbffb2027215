"""Eager modules: RecStore tables in a model that nothing shards, with no process group.

``RecStoreEmbedding`` and ``RecStoreEmbeddingBag`` need torch alone; the collections import torchrec when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from torchrec_recstore.modules.embedding import RecStoreEmbedding
from torchrec_recstore.modules.embedding_bag import RecStoreEmbeddingBag
from torchrec_recstore.modules.sparse_optimizers import SparseAdamW, SparseRowWiseAdagrad, SparseSGD

if TYPE_CHECKING:
    from torchrec_recstore.modules.embedding_bag_collection import RecStoreEmbeddingBagCollection
    from torchrec_recstore.modules.embedding_collection import RecStoreEmbeddingCollection

__all__ = [
    "RecStoreEmbedding",
    "RecStoreEmbeddingBag",
    "RecStoreEmbeddingBagCollection",
    "RecStoreEmbeddingCollection",
    "SparseAdamW",
    "SparseRowWiseAdagrad",
    "SparseSGD",
]


_WITH_TORCHREC = {
    "RecStoreEmbeddingBagCollection": "embedding_bag_collection",
    "RecStoreEmbeddingCollection": "embedding_collection",
}


def __getattr__(name: str) -> object:
    if name not in _WITH_TORCHREC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WITH_TORCHREC[name]}"), name)
