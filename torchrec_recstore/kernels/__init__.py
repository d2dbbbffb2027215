"""Groups of tables: modules that look up a batch, and whose backward updates the rows.

They need torch, not TorchRec.
"""

from torchrec_recstore.kernels.pooled_group import PooledGroup
from torchrec_recstore.kernels.routing import BlockRouting
from torchrec_recstore.kernels.row_service import RemoteTable, RowService
from torchrec_recstore.kernels.sequence_group import SequenceGroup

__all__ = [
    "BlockRouting",
    "PooledGroup",
    "RemoteTable",
    "RowService",
    "SequenceGroup",
]
