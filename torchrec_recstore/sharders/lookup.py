"""The lookup of one sharding: RecStore's kernel for its groups, TorchRec's own for the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torchrec.distributed.embedding_lookup import GroupedEmbeddingsLookup, GroupedPooledEmbeddingsLookup
from torchrec.distributed.embedding_sharding import EmbeddingSharding
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig
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
from torchrec_recstore.torchrec_seams import (
    LookupSeams,
    PooledLookupSeams,
    grouped_configs,
    grouped_configs_of_all_ranks,
    kernels_of,
    process_group,
    sharding_env,
)


class RecStoreLookup(LookupSeams):
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
        self._split, self._rank = row_split(sharding, type_name), sharding_env(sharding).rank
        self._groups_of_all_ranks = grouped_configs_of_all_ranks(sharding)
        super().__init__(
            grouped_configs=grouped_configs(sharding),
            pg=process_group(sharding),
            device=device,
            env=sharding_env(sharding),
            **more,
        )

    def make_kernel(self, config: GroupedEmbeddingConfig) -> RecStoreKernel | None:
        """RecStore's kernel for a group of RecStore tables, or None for TorchRec's own."""
        recstore = config.compute_kernel == EmbeddingComputeKernel.CUSTOMIZED_KERNEL
        return self._recstore_kernel(config) if recstore else None

    def _recstore_kernel(self, config: GroupedEmbeddingConfig) -> RecStoreKernel:
        raise NotImplementedError

    def prefetch(self, sparse_features: KeyedJaggedTensor, forward_stream: Any = None) -> None:
        """TorchRec's hook for pipelines: prepares the batch's rows; its own kernels fetch as they do."""
        super().prefetch(sparse_features, forward_stream)
        for kernel, features in self.features_by_kernel(sparse_features):
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
        for kernel in kernels_of(self):
            if isinstance(kernel, RecStoreKernel):
                yield kernel


class RecStorePooledLookup(RecStoreLookup, PooledLookupSeams, GroupedPooledEmbeddingsLookup):  # type: ignore[misc]
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


class RecStoreSequenceLookup(RecStoreLookup, GroupedEmbeddingsLookup):  # type: ignore[misc]
    """TorchRec's sequence lookup with RecStore's kernel."""

    def _recstore_kernel(self, config: GroupedEmbeddingConfig) -> RecStoreKernel:
        return RecStoreSequenceKernel(config, self._split, self._rank)
