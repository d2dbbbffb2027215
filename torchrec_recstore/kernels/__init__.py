"""Compute kernels: modules that look a batch up in a group of tables and update them in backward. Need torch alone."""

from torchrec_recstore.kernels.pooled import PooledKernel
from torchrec_recstore.kernels.routing import BlockRouting
from torchrec_recstore.kernels.sequence import SequenceKernel

__all__ = ["BlockRouting", "PooledKernel", "SequenceKernel"]
