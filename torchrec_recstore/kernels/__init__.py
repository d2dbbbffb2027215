"""Compute kernels: modules that look up a batch in a group of tables, and whose
backward updates the rows.

The kernels need torch, not TorchRec.
"""

from torchrec_recstore.kernels.pooled import PooledKernel
from torchrec_recstore.kernels.routing import BlockRouting
from torchrec_recstore.kernels.row_service import RemoteTable, RowService
from torchrec_recstore.kernels.sequence import SequenceKernel

__all__ = [
    "BlockRouting",
    "PooledKernel",
    "RemoteTable",
    "RowService",
    "SequenceKernel",
]
