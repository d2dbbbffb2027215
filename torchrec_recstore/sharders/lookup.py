"""The lookup of one sharding: RecStore's kernel for its groups, TorchRec's own for the others."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig
from torchrec.distributed.types import ShardingEnv, ShardingType

from torchrec_recstore.sharders.kernel import RecStoreEmbeddingBag


class RecStorePooledLookup(GroupedPooledEmbeddingsLookup):  # type: ignore[misc]
    """TorchRec's pooled lookup, with RecStore's kernel for the groups that the plan gives to it."""

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        device: torch.device | None,
        pg: dist.ProcessGroup | None,
        sharding_type: ShardingType | None,
        env: ShardingEnv | None,
    ) -> BaseEmbedding:
        # The one seam for kernels: the stock method refuses CUSTOMIZED_KERNEL (torchrec 1.8.0).
        if config.compute_kernel != EmbeddingComputeKernel.CUSTOMIZED_KERNEL:
            return super()._create_embedding_kernel(config, device, pg, sharding_type, env)
        row_split = (dist.get_world_size(pg), dist.get_rank(pg)) if sharding_type == ShardingType.ROW_WISE else None
        return RecStoreEmbeddingBag(config, sharding_type, row_split)

    def kernels(self) -> Iterator[RecStoreEmbeddingBag]:
        """RecStore's kernels of this rank."""
        for kernel in self._emb_modules:
            if isinstance(kernel, RecStoreEmbeddingBag):
                yield kernel
