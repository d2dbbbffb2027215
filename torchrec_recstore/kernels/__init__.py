"""Compute kernels: modules that look up a batch in a group of tables, and whose backward updates the rows.

The kernels need torch, not TorchRec.
"""

from torchrec_recstore.kernels.pooled import PooledKernel
from torchrec_recstore.kernels.remote import RemoteKernel, RemotePooledKernel, RemoteSequenceKernel
from torchrec_recstore.kernels.routing import BlockRouting
from torchrec_recstore.kernels.row_service import RemoteTable, RowService
from torchrec_recstore.kernels.sequence import SequenceKernel
from torchrec_recstore.rpc.row_requests import RowRead, RowUpdate

__all__ = [
    "BlockRouting",
    "PooledKernel",
    "RemoteKernel",
    "RemotePooledKernel",
    "RemoteSequenceKernel",
    "RemoteTable",
    "RowRead",
    "RowService",
    "RowUpdate",
    "SequenceKernel",
]
