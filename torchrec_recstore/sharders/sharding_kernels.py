"""The kernels of one sharding: RecStore's and TorchRec's.

TorchRec calls the module with these kernels a lookup.

Tests: tests/distributed/test_sharded_equals_unsharded.py,
tests/distributed/test_several_modules.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import reduce
from typing import Any

import torch
from torchrec.distributed.embedding_lookup import (
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
)
from torchrec.distributed.embedding_types import (
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
)
from torchrec.distributed.types import ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_recstore.sharders.delta_tracker import Record, tracking
from torchrec_recstore.sharders.fused_params import output_dtype, table_options
from torchrec_recstore.sharders.kernel import (
    IN_NODE,
    RecStoreKernel,
    RecStorePooledKernel,
    RecStoreSequenceKernel,
    row_split,
)
from torchrec_recstore.torchrec_seams.models import (
    PooledShardingKernelsSeams,
    Sharding,
    ShardingKernelsSeams,
    grouped_configs,
    grouped_configs_of_all_ranks,
    kernels_of,
    process_group,
    sharding_env,
)


class RecStoreShardingKernels(ShardingKernelsSeams):
    """The compute kernels of one sharding.

    RecStore's kernel is for the groups that the plan places in RecStore, and TorchRec's
    kernels are for the others.

    A mixin for the modules that TorchRec calls lookups.
    """

    def __init__(
        self,
        sharding: Sharding,
        type_name: str,
        device: torch.device | None,
        **kwargs: Any,
    ) -> None:
        env = sharding_env(sharding)
        # TorchRec's constructor makes the kernels, which need these attributes.
        self._split = row_split(sharding, type_name)
        self._rank = env.rank
        self._rows_device = device
        self._groups_of_all_ranks = grouped_configs_of_all_ranks(sharding)
        super().__init__(
            grouped_configs=grouped_configs(sharding),
            pg=process_group(sharding),
            device=device,
            env=env,
            **kwargs,
        )
        self._dtype = _dtype_of_all_ranks(self._groups_of_all_ranks)
        self.set_dtype_without_tables(self._dtype)
        # The kernel that the whole batch is for. In a tuple, so that it does not become
        # a submodule a second time.
        self._only: tuple[RecStoreKernel, ...] = ()
        if len(kernels_of(self)) == 1:
            self._only = tuple(
                kernel
                for kernel in self.kernels()
                if not kernel.config.is_weighted
                and not kernel.config.has_feature_processor
            )

    def forward(self, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """Looks up a batch, as TorchRec's method does.

        The results have the same data type on every rank.
        """
        rows = self._rows(sparse_features)
        return rows if rows.dtype is self._dtype else rows.to(self._dtype)

    def _rows(self, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        if self._only and self.optim_state_tracker_fn is None:
            # TorchRec's method would split the batch into one part, and then
            # concatenate the one result.
            return self._only[0](sparse_features)  # type: ignore[no-any-return]
        values = sparse_features.values()
        kernels = [] if values.is_cpu else list(self.kernels())
        for kernel in kernels:
            kernel.batch = values
        try:
            return super().forward(sparse_features)  # type: ignore[no-any-return]
        finally:
            for kernel in kernels:
                kernel.batch = None

    def make_kernel(self, config: GroupedEmbeddingConfig) -> RecStoreKernel | None:
        """Returns RecStore's kernel for a group of RecStore tables.

        Returns None for a group on TorchRec's kernels.
        """
        recstore = config.compute_kernel == EmbeddingComputeKernel.CUSTOMIZED_KERNEL
        return self._recstore_kernel(config) if recstore else None

    def _recstore_kernel(self, config: GroupedEmbeddingConfig) -> RecStoreKernel:
        raise NotImplementedError

    def prefetch(
        self,
        sparse_features: KeyedJaggedTensor,
        forward_stream: Any = None,
    ) -> None:
        """Prepares the rows of a batch before its forward.

        TorchRec's train pipelines call this method.
        """
        super().prefetch(sparse_features, forward_stream)
        if not kernels_of(self):
            return
        for kernel, features in self.features_by_kernel(sparse_features):
            if isinstance(kernel, RecStoreKernel) and kernel.training:
                kernel.prefetch(features, sparse_features.values())

    def register_optim_state_tracker_fn(self, record_fn: Record) -> None:
        """Registers a function that is called after the lookup of each group.

        TorchRec's trackers call this method.
        """
        for group in self._groups_of_all_ranks:
            for table in group.embedding_tables:
                if table_options(table.fused_params).servers is not None:
                    raise NotImplementedError(
                        f"RecStore table {table.name!r} is on servers: trackers of ids"
                        " and embeddings do not support it"
                    )
        super().register_optim_state_tracker_fn(
            tracking(
                record_fn,
                self._groups_of_all_ranks,
                list(self.kernels()),
            )
        )

    def kernels(self) -> Iterator[RecStoreKernel]:
        """Yields RecStore's kernels on this rank."""
        for kernel in kernels_of(self):
            if isinstance(kernel, RecStoreKernel):
                yield kernel


def _dtype_of_all_ranks(groups: Iterable[GroupedEmbeddingConfig]) -> torch.dtype:
    """Returns the data type that holds the results of all groups of a sharding.

    The ranks exchange the results of a sharding in one collective, which does not check
    that all ranks send the same data type (torchrec 1.8.0). A rank may have no table,
    or only tables whose results have another type.
    """
    dtypes = [output_dtype(group.fused_params, group.table_names()) for group in groups]
    return reduce(torch.promote_types, dtypes)


class RecStorePooledShardingKernels(
    RecStoreShardingKernels,
    PooledShardingKernelsSeams,
    GroupedPooledEmbeddingsLookup,  # type: ignore[misc]
):
    """The kernels of one sharding of an embedding bag collection."""

    def __init__(
        self,
        sharding: Sharding,
        type_name: str,
        device: torch.device | None,
    ) -> None:
        # TorchRec's shardings pass these types to their kernels.
        self._pools_as: ShardingType | None = None
        if type_name == ShardingType.ROW_WISE.value:
            self._pools_as = ShardingType.ROW_WISE
        elif type_name in IN_NODE:
            self._pools_as = ShardingType.TABLE_ROW_WISE
        super().__init__(
            sharding,
            type_name,
            device,
            sharding_type=self._pools_as,
        )

    def _recstore_kernel(self, config: GroupedEmbeddingConfig) -> RecStoreKernel:
        return RecStorePooledKernel(
            config,
            self._pools_as,
            self._split,
            self._rank,
            self._rows_device,
        )


class RecStoreSequenceShardingKernels(RecStoreShardingKernels, GroupedEmbeddingsLookup):  # type: ignore[misc]
    """The kernels of one sharding of an embedding collection."""

    def _recstore_kernel(self, config: GroupedEmbeddingConfig) -> RecStoreKernel:
        return RecStoreSequenceKernel(
            config,
            self._split,
            self._rank,
            self._rows_device,
        )
