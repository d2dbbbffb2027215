"""Checkpoints that lose nothing, and rows of RecStore tables in and out of other formats."""

from torchrec_recstore.checkpoint.dense import export_dense_weights, load_dense_weights
from torchrec_recstore.checkpoint.distributed import load_distributed_checkpoint
from torchrec_recstore.checkpoint.files import CheckpointError
from torchrec_recstore.checkpoint.info import CheckpointInfo, TableInfo, read_info
from torchrec_recstore.checkpoint.load import load_checkpoint
from torchrec_recstore.checkpoint.save import AsyncSave, async_save, save_checkpoint
from torchrec_recstore.checkpoint.stock import (
    load_into_stock,
    load_stock_state_dict,
    stock_optimizer_state_dict,
    stock_state_dict,
)

__all__ = [
    "AsyncSave",
    "CheckpointError",
    "CheckpointInfo",
    "TableInfo",
    "async_save",
    "export_dense_weights",
    "load_checkpoint",
    "load_dense_weights",
    "load_distributed_checkpoint",
    "load_into_stock",
    "load_stock_state_dict",
    "read_info",
    "save_checkpoint",
    "stock_optimizer_state_dict",
    "stock_state_dict",
]
