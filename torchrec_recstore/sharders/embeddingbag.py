"""``EmbeddingBagCollection`` over RecStore tables, beside TorchRec's own."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding_sharding import EmbeddingSharding
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionContext,
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.types import Awaitable, ParameterSharding, ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_recstore.optim import Optimizer
from torchrec_recstore.sharders.kernel import placeholder_parameter
from torchrec_recstore.sharders.lookup import RecStorePooledLookup
from torchrec_recstore.sharders.own_arguments import deal_out, with_own_arguments
from torchrec_recstore.sharders.parameter_sharding import RECSTORE_KERNEL, RecStoreParameterSharding
from torchrec_recstore.sharders.raw_ids import int64_ids
from torchrec_recstore.sharders.resident import ResidentParameter
from torchrec_recstore.sharders.shard_tables import check_table
from torchrec_recstore.store import Table

_SUPPORTED = (
    ShardingType.TABLE_WISE.value,
    ShardingType.COLUMN_WISE.value,
    ShardingType.TABLE_COLUMN_WISE.value,
    ShardingType.ROW_WISE.value,
)


class RecStoreShardedEmbeddingBagCollection(ShardedEmbeddingBagCollection):  # type: ignore[misc]
    """A sharded ``EmbeddingBagCollection`` in which the plan may give tables to RecStore.

    A RecStore table takes any int64 id. Training forwards make rows, backwards update them; evaluation forwards
    change nothing. Initial weights come from the table's options and config, not from the unsharded module.

    Raises:
        ValueError: a RecStore table with a sharding type, data type, ``init_fn`` or optimizer that RecStore does not
            support; on every rank, also those without a shard of it.
    """

    _embedding_bag_configs: list[EmbeddingBagConfig]

    def __init__(
        self,
        module: EmbeddingBagCollection,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
        **kwargs: Any,
    ) -> None:
        for config in module.embedding_bag_configs():
            sharding = table_name_to_parameter_sharding.get(config.name)
            if sharding is not None and sharding.compute_kernel == RECSTORE_KERNEL:
                _check_plan(config, sharding)
        super().__init__(module, table_name_to_parameter_sharding, env, fused_params, device, **kwargs)
        self._keep_means_once()

    def recstore_table_names(self) -> list[str]:
        """The tables that the plan gives to RecStore, in the order of the configs; the same on every rank."""
        plan = self.module_sharding_plan
        return [name for name in self._table_names if plan[name].compute_kernel == RECSTORE_KERNEL]

    def recstore_tables(self) -> Iterator[Table]:
        """The RecStore shards of this rank."""
        for lookup in self._lookups:
            if isinstance(lookup, RecStorePooledLookup):
                yield from lookup.tables()

    def input_dist(self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor) -> Awaitable[Any]:
        """As TorchRec's; ids of other integer types are widened first, since its row-wise split needs int64."""
        features = int64_ids(features)
        if not self._has_uninitialized_input_dist:
            return super().input_dist(ctx, features)
        # The first batch is checked against num_embeddings, which for RecStore is but a hint (torchrec 1.8.0).
        with self._only_stock_configs():
            return super().input_dist(ctx, features)

    def update_shards(self, *args: Any, **kwargs: Any) -> None:
        """As TorchRec's, for collections without RecStore tables.

        Raises:
            NotImplementedError: there are RecStore tables: TorchRec would build them anew, without their rows.
        """
        if self.recstore_table_names():
            raise NotImplementedError(f"resharding in place with RecStore tables {self.recstore_table_names()}")
        super().update_shards(*args, **kwargs)

    def reset_parameters(self) -> None:
        """As TorchRec's, which reads every table's weights, and so must not see RecStore's (torchrec 1.8.0)."""
        with self._only_stock_configs():
            super().reset_parameters()

    @contextmanager
    def _only_stock_configs(self) -> Iterator[None]:
        configs = self._embedding_bag_configs
        hidden = set(self.recstore_table_names())
        self._embedding_bag_configs = [config for config in configs if config.name not in hidden]
        try:
            yield
        finally:
            self._embedding_bag_configs = configs

    def _create_lookups(self) -> None:
        for infos in self.sharding_type_to_sharding_infos.values():
            for info in infos:
                if info.param_sharding.compute_kernel == RECSTORE_KERNEL:
                    check_table(info.embedding_config, info.fused_params)
        # The one seam between shardings and kernels (torchrec 1.8.0).
        for sharding_type, sharding in zip(self._sharding_types, self._embedding_shardings, strict=True):
            groups = _grouped_configs(sharding)
            if not any(group.compute_kernel == EmbeddingComputeKernel.CUSTOMIZED_KERNEL for group in groups):
                self._lookups.append(sharding.create_lookup())
                continue
            self._lookups.append(
                RecStorePooledLookup(
                    grouped_configs=groups,
                    device=self._device,
                    pg=sharding._pg,
                    sharding_type=ShardingType.ROW_WISE if sharding_type == ShardingType.ROW_WISE.value else None,
                    env=sharding._env,
                )
            )

    def _initialize_torch_state(self, skip_registering: bool = False) -> None:
        super()._initialize_torch_state(skip_registering)
        # Ranks must agree on parameter names; for customized kernels TorchRec names none where there is no shard.
        for name in self.recstore_table_names():
            if not hasattr(self.embedding_bags[name], "weight"):
                self.embedding_bags[name].register_parameter("weight", placeholder_parameter())

    def _keep_means_once(self) -> None:
        # torchrec 1.8.0 divides every feature by its length once any row-wise table pools the mean, apart from those
        # listed as SUM: also features of table- and column-wise tables, whose kernels have already divided or sum.
        # Without RecStore, CPU plans have no row-wise tables, so this would be met here first.
        if not self._has_mean_pooling_callback:
            return
        rows_split = set(self._pooling_type_to_rs_features[PoolingType.MEAN.value])
        for config in self._embedding_bag_configs:
            if self.module_sharding_plan[config.name].sharding_type in _ROW_SPLIT:
                continue
            shared = rows_split.intersection(config.feature_names)
            if shared:
                raise ValueError(
                    f"table {config.name!r} shares feature(s) {sorted(shared)} with a row-wise table that pools the "
                    "mean; TorchRec then divides both: shard both row-wise, or neither"
                )
            self._pooling_type_to_rs_features[PoolingType.SUM.value].extend(config.feature_names)


_ROW_SPLIT = (ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value)


class RecStoreSharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]
    """Shards ``EmbeddingBagCollection`` with RecStore tables.

    Without a plan, ``DistributedModelParallel`` places every table in RecStore: giving the sharder is asking for it.
    ``RecStorePlanner`` also places tables on TorchRec's kernels, where their constraints name them.

    Example::

        sharder = RecStoreSharder(fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.01})
        model = DistributedModelParallel(model, sharders=[sharder])

    Args:
        fused_params: as for TorchRec's sharder; selects the optimizer unless ``apply_optimizer_in_backward`` does.
        optimizer: of the RecStore tables, instead; the only way to those that TorchRec has no name for.
        accumulation_steps: backward passes whose gradients are summed before the rows of the RecStore tables are
            updated, once, with the learning rate of the last; forwards in between read the rows as they were.
        args, kwargs: TorchRec's other arguments.

    Raises:
        ValueError: ``optimizer`` and ``fused_params`` disagree.
    """

    _offers_stock = False

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        *args: Any,
        optimizer: Optimizer | None = None,
        accumulation_steps: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(with_own_arguments(fused_params, optimizer, accumulation_steps), *args, **kwargs)

    def with_stock_kernels(self) -> RecStoreSharder:
        """A copy that offers TorchRec's own kernels as well, for planners that choose by constraint."""
        offer = copy.copy(self)
        offer._offers_stock = True
        return offer

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> RecStoreShardedEmbeddingBagCollection:
        """The sharded module.

        Raises:
            ValueError: the plan or ``fused_params`` ask of a RecStore table what RecStore does not support, or ways of
                selecting its optimizer disagree.
        """
        fused_params, params = deal_out(self.fused_params, params, super().shardable_parameters(module))
        return RecStoreShardedEmbeddingBagCollection(
            module,
            params,
            env,
            fused_params=fused_params,
            device=device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
            sharded_module_order_overwrite=self._sharded_module_order_overwrite,
        )

    def shardable_parameters(self, module: EmbeddingBagCollection) -> dict[str, nn.Parameter]:
        """The tables by name; for planning they weigh what their resident rows weigh."""
        parameters: dict[str, nn.Parameter] = super().shardable_parameters(module)
        if self._offers_stock:
            return parameters  # whose weight depends on the kernel: left to the planner's estimator
        return {name: ResidentParameter.of(parameter) for name, parameter in parameters.items()}

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """The sharding types that RecStore supports, on any device, and what TorchRec's sharder offers on request."""
        stock = super().sharding_types(compute_device_type) if self._offers_stock else []
        return list(dict.fromkeys([*_SUPPORTED, *stock]))

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """RecStore's kernel for the sharding types it supports, and TorchRec's kernels on request."""
        kernels = [RECSTORE_KERNEL] if sharding_type in _SUPPORTED else []
        if self._offers_stock and sharding_type in super().sharding_types(compute_device_type):
            kernels += super().compute_kernels(sharding_type, compute_device_type)
        return kernels

    @property
    def sharded_module_type(self) -> type[RecStoreShardedEmbeddingBagCollection]:
        """The class of the sharded module."""
        return RecStoreShardedEmbeddingBagCollection


def _grouped_configs(sharding: EmbeddingSharding[Any, Any, Any, Any]) -> list[GroupedEmbeddingConfig]:
    # No public accessor in torchrec 1.8.0; of this rank, for all but table-row-wise and grid shardings.
    groups: list[GroupedEmbeddingConfig] = getattr(sharding, "_grouped_embedding_configs", [])
    return groups


def _check_plan(config: EmbeddingBagConfig, sharding: ParameterSharding) -> None:
    if sharding.sharding_type not in _SUPPORTED:
        raise ValueError(
            f"RecStore table {config.name!r}: sharding type {sharding.sharding_type!r} is not supported; "
            f"supported are {', '.join(_SUPPORTED)}"
        )
    initializer = sharding.options.initializer if isinstance(sharding, RecStoreParameterSharding) else None
    if initializer is None and not _is_default_init(config):
        raise ValueError(
            f"RecStore table {config.name!r}: init_fn initialises whole tables, but rows are made one at a time: "
            "set TableOptions.initializer, or the config's weight_init_min and weight_init_max"
        )


def _is_default_init(config: EmbeddingBagConfig) -> bool:
    """Whether ``init_fn`` is the one that TorchRec fills in (``BaseEmbeddingConfig.__post_init__``, torchrec 1.8.0)."""
    filled_in: Mapping[str, float] = {"a": config.get_weight_init_min(), "b": config.get_weight_init_max()}
    init_fn = config.init_fn
    return init_fn is None or (
        isinstance(init_fn, partial) and init_fn.func is nn.init.uniform_ and init_fn.keywords == filled_in
    )
