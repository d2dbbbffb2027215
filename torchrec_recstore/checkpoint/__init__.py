"""Saves and loads models with RecStore tables, and converts their rows from and to other formats.

Names are imported when they are first used, so that code that only inspects checkpoints does not need TorchRec.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrec_recstore.utils import lazy_names

if TYPE_CHECKING:
    from torchrec_recstore.checkpoint.distributed import load_distributed_checkpoint
    from torchrec_recstore.checkpoint.files import CheckpointError
    from torchrec_recstore.checkpoint.fold import compact_checkpoint
    from torchrec_recstore.checkpoint.info import CheckpointInfo, TableInfo, read_info
    from torchrec_recstore.checkpoint.load import load_checkpoint
    from torchrec_recstore.checkpoint.row_search import TopRows, neighbours, top_rows
    from torchrec_recstore.checkpoint.save import AsyncSave, async_save, save_checkpoint
    from torchrec_recstore.checkpoint.stock import (
        export_dense_weights,
        load_dense_weights,
        load_into_stock,
        load_stock_state_dict,
        stock_optimizer_state_dict,
        stock_state_dict,
    )

_NAMES = {
    "distributed": "load_distributed_checkpoint",
    "files": "CheckpointError",
    "fold": "compact_checkpoint",
    "info": "CheckpointInfo TableInfo read_info",
    "load": "load_checkpoint",
    "row_search": "TopRows neighbours top_rows",
    "save": "AsyncSave async_save save_checkpoint",
    "stock": "export_dense_weights load_dense_weights load_into_stock load_stock_state_dict "
    "stock_optimizer_state_dict stock_state_dict",
}

__all__ = [
    "AsyncSave",
    "CheckpointError",
    "CheckpointInfo",
    "TableInfo",
    "TopRows",
    "async_save",
    "compact_checkpoint",
    "export_dense_weights",
    "load_checkpoint",
    "load_dense_weights",
    "load_distributed_checkpoint",
    "load_into_stock",
    "load_stock_state_dict",
    "neighbours",
    "read_info",
    "save_checkpoint",
    "stock_optimizer_state_dict",
    "stock_state_dict",
    "top_rows",
]

_modules = {name: module for module, names in _NAMES.items() for name in names.split()}
__getattr__, __dir__ = lazy_names(__name__, _modules)
