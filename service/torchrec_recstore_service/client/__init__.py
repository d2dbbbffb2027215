"""The plain client of tables by name, in the client's process or on parameter servers,
and what is built on it.

Importing this package registers ``torch.ops.recstore_ops.emb_read`` and the other
``emb_*`` ops.
"""

from torchrec_recstore_service.client import torch_ops as torch_ops  # registers the ops
from torchrec_recstore_service.client.plain_client import PlainClient

__all__ = ["PlainClient"]
