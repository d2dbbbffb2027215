"""The tables that the tests run with: RecStore's, or TorchRec's own to show that a test
fails with these too.
"""

from __future__ import annotations

import os

from torchrec.distributed.embedding_types import EmbeddingComputeKernel

from torchrec_recstore.sharders import RECSTORE_KERNEL

STOCK: bool = os.environ.get("UPSTREAM_TABLES", "recstore") == "stock"
"""Whether the tests run with TorchRec's own tables."""

KERNEL: str = EmbeddingComputeKernel.FUSED.value if STOCK else RECSTORE_KERNEL
"""The compute kernel of the tables."""
