"""Dynamic embedding tables for TorchRec: tables that accept any int64 id and grow
during training.

Names are imported when they are first used, so that ``torchrec_recstore.store`` works
without TorchRec. Options and optimizers need not even torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrec_recstore import optim, options
from torchrec_recstore.optim import *  # noqa: F403
from torchrec_recstore.options import *  # noqa: F403
from torchrec_recstore.utils import lazy_names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrec_recstore.checkpoint import *  # noqa: F403
    from torchrec_recstore.modules import *  # noqa: F403
    from torchrec_recstore.planner import *  # noqa: F403
    from torchrec_recstore.quiet_warnings import quiet as quiet
    from torchrec_recstore.sharders import *  # noqa: F403
    from torchrec_recstore.store import *  # noqa: F403
    from torchrec_recstore.threads import tune_threads as tune_threads
    from torchrec_recstore.utils import RecStoreWarning as RecStoreWarning
    from torchrec_recstore_service import *  # noqa: F403

__version__ = "0.2.0"

# The public names by the module that defines them.
_NAMES = {
    "checkpoint": (
        "CheckpointError",
        "CheckpointInfo",
        "TopRows",
        "compact_checkpoint",
        "neighbours",
        "read_info",
        "top_rows",
    ),
    "modules": (
        "RecStoreEmbedding",
        "RecStoreEmbeddingBag",
        "SparseAdamW",
        "SparseRowWiseAdagrad",
        "SparseSGD",
    ),
    "store": (
        "ColdStoreError",
        "LeftIds",
        "Table",
        "TableStats",
    ),
    "quiet_warnings": ("quiet",),
    "threads": ("tune_threads",),
    "utils": ("RecStoreWarning",),
}
_NAMES_WITH_TORCHREC = {
    "checkpoint": (
        "AsyncSave",
        "apply_delta",
        "async_save",
        "export_dense_weights",
        "load_checkpoint",
        "load_dense_weights",
        "load_distributed_checkpoint",
        "load_distributed_state",
        "load_into_stock",
        "load_stock_state_dict",
        "save_checkpoint",
        "stock_optimizer_state_dict",
        "stock_state_dict",
    ),
    "modules": (
        "RecStoreEmbeddingBagCollection",
        "RecStoreEmbeddingCollection",
    ),
    "planner": (
        "RecStoreConstraints",
        "RecStorePlanner",
    ),
    "sharders": (
        "RecStoreEmbeddingCollectionSharder",
        "RecStoreFeatureProcessedEmbeddingBagCollectionSharder",
        "RecStorePrefetchPipeline",
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
    ),
}
# The public names of other distributions by the plugin that has them.
_NAMES_OF_PLUGINS = {
    "service": (
        "NoInitialRow",
        "RecStoreClient",
        "ServerRestartedError",
        "ServerSetError",
        "ServiceError",
        "get_include",
    ),
}


def _owners(names_by_owner: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Returns the module or plugin of each name."""
    owners = {}
    for owner, names in names_by_owner.items():
        for name in names:
            owners[name] = owner
    return owners


_WITH_TORCHREC = _owners(_NAMES_WITH_TORCHREC)
_MODULES = _owners(_NAMES) | _WITH_TORCHREC
_OF_PLUGINS = _owners(_NAMES_OF_PLUGINS)

# This includes __all__, which has the names of what is installed.
__getattr__, __dir__ = lazy_names(
    __name__,
    _MODULES,
    _OF_PLUGINS,
    public=[
        *_MODULES,
        *_OF_PLUGINS,
        *optim.__all__,
        *options.__all__,
    ],
    with_torchrec=_WITH_TORCHREC,
)
