"""The lookup of one sharding: RecStore's kernel for its groups, TorchRec's own for the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_lookup import GroupedEmbeddingsLookup, GroupedPooledEmbeddingsLookup
from torchrec.distributed.embedding_sharding import EmbeddingSharding
from torchrec.distributed.embedding_types import (
    BaseEmbeddingLookup,
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
)
from torchrec.distributed.types import ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_recstore.sharders.delta_tracker import Record, tracking
from torchrec_recstore.sharders.kernel import (
    IN_NODE,
    RecStoreKernel,
    RecStorePooledKernel,
    RecStoreSequenceKernel,
    row_split,
)


class RecStoreLookup(BaseEmbeddingLookup):  # type: ignore[misc]
    """Mixed into TorchRec's lookups: RecStore's kernel for the groups that the plan gives to it.

    Args:
        sharding: whose tables of this rank are looked up.
        type_name: its sharding type.
        device: of TorchRec's own kernels.
        more: the arguments that only one of TorchRec's lookups takes.
    """

    def __init__(
        self,
        sharding: EmbeddingSharding[Any, Any, Any, Any],
        type_name: str,
        device: torch.device | None,
        **more: Any,
    ) -> None:
        # Before TorchRec's constructor, which makes the kernels.
        self._split, self._rank = row_split(sharding, type_name), sharding._env.rank
        self._groups_of_all_ranks = grouped_configs_of_all_ranks(sharding)
        super().__init__(
            grouped_configs=grouped_configs(sharding), pg=sharding._pg, device=device, env=sharding._env, **more
        )

    def _create_embedding_kernel(self, config: GroupedEmbeddingConfig, *args: Any, **kwargs: Any) -> BaseEmbedding:
        # The one seam for kernels: the stock method refuses CUSTOMIZED_KERNEL (torchrec 1.8.0).
        if config.compute_kernel != EmbeddingComputeKernel.CUSTOMIZED_KERNEL:
            return super()._create_embedding_kernel(config, *args, **kwargs)
        return self._recstore_kernel(config)

    def _recstore_kernel(self, config: GroupedEmbeddingConfig) -> RecStoreKernel:
        raise NotImplementedError

    def prefetch(self, sparse_features: KeyedJaggedTensor, forward_stream: Any = None) -> None:
        """TorchRec's hook for pipelines: prepares the batch's rows; its own kernels fetch as they do."""
        super().prefetch(sparse_features, forward_stream)
        by_group = sparse_features.split(self._feature_splits)
        for kernel, features in zip(self._emb_modules, by_group, strict=True):
            if isinstance(kernel, RecStoreKernel) and kernel.training:
                kernel.prefetch(features)

    def register_optim_state_tracker_fn(self, record_fn: Record) -> None:
        """TorchRec's hook for trackers: ``record_fn`` is called after the lookup of each group.

        Raises:
            ValueError: a delta tracker in a mode that needs a state which a table's optimizer does not keep.
        """
        super().register_optim_state_tracker_fn(tracking(record_fn, self._groups_of_all_ranks, list(self.kernels())))

    def kernels(self) -> Iterator[RecStoreKernel]:
        """RecStore's kernels of this rank."""
        for kernel in self._emb_modules:
            if isinstance(kernel, RecStoreKernel):
                yield kernel


class RecStorePooledLookup(RecStoreLookup, GroupedPooledEmbeddingsLookup):  # type: ignore[misc]
    """TorchRec's pooled lookup with RecStore's kernel."""

    def __init__(
        self, sharding: EmbeddingSharding[Any, Any, Any, Any], type_name: str, device: torch.device | None
    ) -> None:
        # As TorchRec's shardings name themselves to their lookups: where rows are split, the mean is pooled as a sum.
        self._pools_as = None
        if type_name == ShardingType.ROW_WISE.value:
            self._pools_as = ShardingType.ROW_WISE
        elif type_name in IN_NODE:
            self._pools_as = ShardingType.TABLE_ROW_WISE
        super().__init__(sharding, type_name, device, sharding_type=self._pools_as)

    def _recstore_kernel(self, config: GroupedEmbeddingConfig) -> RecStoreKernel:
        return RecStorePooledKernel(config, self._pools_as, self._split, self._rank)

    def _forward_with_vbe_merging(
        self, features_by_group: list[KeyedJaggedTensor], device: torch.device
    ) -> torch.Tensor:
        # The stock way hands kernels a preallocated output, which neither ours nor FBGEMM's on CPU take; this is
        # the one that it keeps for devices without (torchrec 1.8.0).
        merged: torch.Tensor = self._merge_variable_batch_embeddings(
            self._forward(features_by_group), self._vbe_splits(features_by_group)
        )
        return merged


class RecStoreSequenceLookup(RecStoreLookup, GroupedEmbeddingsLookup):  # type: ignore[misc]
    """TorchRec's sequence lookup with RecStore's kernel."""

    def _recstore_kernel(self, config: GroupedEmbeddingConfig) -> RecStoreKernel:
        return RecStoreSequenceKernel(config, self._split, self._rank)


def grouped_configs(sharding: EmbeddingSharding[Any, Any, Any, Any]) -> list[GroupedEmbeddingConfig]:
    """This rank's groups of tables."""
    # No public accessor in torchrec 1.8.0; table-row-wise and grid shardings keep those of every rank.
    per_rank = getattr(sharding, "_grouped_embedding_configs_per_rank", None)
    groups: list[GroupedEmbeddingConfig] | None = getattr(sharding, "_grouped_embedding_configs", None)
    if groups is None:
        groups = [] if per_rank is None else per_rank[sharding._rank]
    return groups


def grouped_configs_of_all_ranks(sharding: EmbeddingSharding[Any, Any, Any, Any]) -> list[GroupedEmbeddingConfig]:
    """The groups of tables of every rank; none for data-parallel shardings."""
    # No public accessor in torchrec 1.8.0.
    per_rank = getattr(sharding, "_grouped_embedding_configs_per_rank", [])
    return [group for groups in per_rank for group in groups]
