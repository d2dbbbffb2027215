"""Embedding tables for clients, in the client's process or on parameter servers.

Tables in the client's process need torch only. Tables on parameter servers also need grpcio. Importing this package
registers ``torch.ops.recstore_ops.emb_read`` and the other ``emb_*`` ops.
"""

from torchrec_recstore.rpc.protocol import ServerRestartedError, ServerSetError, ServiceError
from torchrec_recstore.service import torch_ops as torch_ops  # registers the ops
from torchrec_recstore.service.backend import NoInitialRow
from torchrec_recstore.service.client import RecStoreClient

__all__ = ["NoInitialRow", "RecStoreClient", "ServerRestartedError", "ServerSetError", "ServiceError"]
