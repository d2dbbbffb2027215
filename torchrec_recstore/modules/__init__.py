"""Eager modules: RecStore tables in a model without sharding or process group.

``RecStoreEmbedding`` and ``RecStoreEmbeddingBag`` need torch only. The collections
import torchrec when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrec_recstore.modules.drop_in import RecStoreEmbedding, RecStoreEmbeddingBag
from torchrec_recstore.modules.sparse_optimizers import (
    SparseAdamW,
    SparseRowWiseAdagrad,
    SparseSGD,
)
from torchrec_recstore.utils import lazy_names

if TYPE_CHECKING:
    from torchrec_recstore.modules.embedding_modules import (
        RecStoreEmbeddingBagCollection,
        RecStoreEmbeddingCollection,
    )

__all__ = [
    "RecStoreEmbedding",
    "RecStoreEmbeddingBag",
    "RecStoreEmbeddingBagCollection",
    "RecStoreEmbeddingCollection",
    "SparseAdamW",
    "SparseRowWiseAdagrad",
    "SparseSGD",
]

_WITH_TORCHREC = ("RecStoreEmbeddingBagCollection", "RecStoreEmbeddingCollection")
__getattr__, __dir__ = lazy_names(
    __name__,
    dict.fromkeys(_WITH_TORCHREC, "embedding_modules"),
    public=__all__,
    with_torchrec=_WITH_TORCHREC,
)
del __all__  # __getattr__ returns it, with the names of what is installed
