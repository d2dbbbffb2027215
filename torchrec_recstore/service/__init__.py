"""Tables for clients: in their own process, or on parameter servers.

Needs torch alone for the first, grpcio for the second. Importing it registers ``torch.ops.recstore_ops.emb_read`` and
the other ops of clients.
"""

from torchrec_recstore.rpc.protocol import ServerRestartedError, ServiceError
from torchrec_recstore.service import torch_ops as torch_ops  # registers them
from torchrec_recstore.service.backend import NoInitialRow
from torchrec_recstore.service.client import RecStoreClient

__all__ = ["NoInitialRow", "RecStoreClient", "ServerRestartedError", "ServiceError"]
