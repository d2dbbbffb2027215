"""Rows of RecStore tables in and out of models: dense weights, ``torch.distributed.checkpoint``."""

from torchrec_recstore.checkpoint.dense import export_dense_weights, load_dense_weights
from torchrec_recstore.checkpoint.distributed import load_distributed_checkpoint
from torchrec_recstore.checkpoint.stock import (
    load_into_stock,
    load_stock_state_dict,
    stock_optimizer_state_dict,
    stock_state_dict,
)

__all__ = [
    "export_dense_weights",
    "load_dense_weights",
    "load_distributed_checkpoint",
    "load_into_stock",
    "load_stock_state_dict",
    "stock_optimizer_state_dict",
    "stock_state_dict",
]
