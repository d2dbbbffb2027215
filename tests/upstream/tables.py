"""Whose tables the tests run with: RecStore's, or TorchRec's own where a test is to be seen to fail with those too."""

from __future__ import annotations

import os

from torchrec.distributed.embedding_types import EmbeddingComputeKernel

from torchrec_recstore.sharders import RECSTORE_KERNEL

STOCK: bool = os.environ.get("UPSTREAM_TABLES", "recstore") == "stock"
"""Whether the tables are TorchRec's own."""

KERNEL: str = EmbeddingComputeKernel.FUSED.value if STOCK else RECSTORE_KERNEL
"""The compute kernel of the tables."""
