"""``EmbeddingBagCollection`` over RecStore tables, beside TorchRec's own tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torchrec.distributed.embedding_sharding import EmbeddingSharding
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionContext,
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.types import Awaitable, ParameterSharding, ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_recstore.sharders.collection import RecStoreCollection, RecStoreCollectionSharder
from torchrec_recstore.sharders.kernel import ROW_SPLIT
from torchrec_recstore.sharders.lookup import RecStorePooledLookup
from torchrec_recstore.sharders.plan import RECSTORE_KERNEL


def require_gradient(features: object) -> bool:
    """Whether ``features`` have weights that are to be trained."""
    if not isinstance(features, KeyedJaggedTensor) or not torch.is_grad_enabled():
        return False
    weights = features.weights_or_none()
    return weights is not None and bool(weights.requires_grad)


def check_weight_gradients(
    features: KeyedJaggedTensor,
    configs: Sequence[BaseEmbeddingConfig],
    plan: Mapping[str, ParameterSharding],
    shardings: Sequence[EmbeddingSharding[Any, Any, Any, Any]],
    ranks: int,
) -> None:
    """Refuses weights that require a gradient where the input distribution of a RecStore table loses it.

    TorchRec's collections distribute features without autograd (torchrec 1.8.0). The weights keep their gradient only
    where they are handed on as they are: on one rank, with one sharding that does not split rows, and with the features
    in its order.

    Args:
        features: a batch, before its input distribution.
        configs: of the collection's tables.
        plan: the collection's plan, by table.
        shardings: the collection's shardings, in their order.
        ranks: of the collection's group.

    Raises:
        NotImplementedError: the gradient would be lost; the message names table, features and sharding type.
    """
    names = features.keys()
    order = [name for sharding in shardings for name in sharding.feature_names()]
    for config in configs:
        of_table = [name for name in config.feature_names if name in names]
        if plan[config.name].compute_kernel != RECSTORE_KERNEL or not of_table:
            continue
        sharding_type = plan[config.name].sharding_type
        if ranks == 1 and len(shardings) == 1 and sharding_type not in ROW_SPLIT and names == order:
            continue
        fix = "use a FeatureProcessedEmbeddingBagCollection, which makes weights after it, or detach the weights"
        if ranks == 1 and {sharding.sharding_type for sharding in plan.values()} == {ShardingType.TABLE_WISE.value}:
            fix = f"give the features in the order {order}, {fix}"
        elif ranks == 1:
            fix = f"shard all tables of the collection table_wise, {fix}"
        raise NotImplementedError(
            f"RecStore table {config.name!r}: the weights of feature(s) {', '.join(map(repr, of_table))} require a "
            f"gradient, which TorchRec's input distribution does not carry ({sharding_type} on {ranks} rank(s)): {fix}"
        )


class RecStoreShardedEmbeddingBagCollection(RecStoreCollection, ShardedEmbeddingBagCollection):  # type: ignore[misc]
    """A sharded ``EmbeddingBagCollection`` in which the plan may give tables to RecStore.

    A RecStore table takes any int64 id. Training forwards make rows, backwards update them; evaluation forwards
    change nothing. Initial weights come from the table's options and config, not from the unsharded module.

    Raises:
        ValueError: a RecStore table with a sharding type, data type, ``init_fn``, optimizer, routing or ``max_rows``
            that RecStore does not support; on every rank, also those without a shard of it.
        ColdStoreError, ImportError: a cold store cannot be opened; on every rank.
    """

    _supported = (
        ShardingType.TABLE_WISE.value,
        ShardingType.COLUMN_WISE.value,
        ShardingType.TABLE_COLUMN_WISE.value,
        ShardingType.ROW_WISE.value,
        ShardingType.TABLE_ROW_WISE.value,
        ShardingType.GRID_SHARD.value,
    )
    _configs_name = "embedding_bag_configs"
    _tables_name = "embedding_bags"
    _lookup_type = RecStorePooledLookup

    _embedding_bag_configs: list[EmbeddingBagConfig]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._divided = self._divided_afterwards()
        self._has_mean_pooling_callback = bool(self._divided)

    def input_dist(self, ctx: EmbeddingBagCollectionContext, features: Any) -> Awaitable[Awaitable[KJTList]]:
        """See :meth:`RecStoreCollection.input_dist`.

        Raises:
            NotImplementedError: the weights require a gradient that TorchRec's input distribution loses; on every rank.
        """
        if self._is_weighted and self.training and require_gradient(features):
            check_weight_gradients(
                features,
                self._embedding_bag_configs,
                self.module_sharding_plan,
                self._shardings(),
                self._env.world_size,
            )
        return super().input_dist(ctx, features)

    def update_shards(self, *args: Any, **kwargs: Any) -> None:
        """As TorchRec's, for collections without RecStore tables.

        Raises:
            NotImplementedError: there are RecStore tables: TorchRec would build them anew, without their rows.
        """
        if self.recstore_table_names():
            raise NotImplementedError(
                f"RecStore tables {self.recstore_table_names()} cannot be resharded in place: save a checkpoint, and "
                "load it into a model with the new plan"
            )
        super().update_shards(*args, **kwargs)

    def _shardings(self) -> list[EmbeddingSharding[Any, Any, Any, Any]]:
        shardings: list[EmbeddingSharding[Any, Any, Any, Any]] = self._embedding_shardings
        return shardings

    def _divided_afterwards(self) -> set[str]:
        """Names, as in the output, of what the kernels have summed and is divided by its length after output dist."""
        names = get_embedding_names_by_table(self._embedding_bag_configs)
        divided = set()
        for config, of_table in zip(self._embedding_bag_configs, names, strict=True):
            sharding = self.module_sharding_plan[config.name]
            # torchrec 1.8.0 takes the means of stock grid shards in their kernels, one for each shard of rows.
            grid = sharding.sharding_type == ShardingType.GRID_SHARD.value
            summed = sharding.compute_kernel == RECSTORE_KERNEL if grid else sharding.sharding_type in ROW_SPLIT
            if summed and config.pooling == PoolingType.MEAN:
                divided.update(of_table)
        return divided

    def _init_mean_pooling_callback(self, *args: Any) -> None:
        super()._init_mean_pooling_callback(*args)
        # torchrec 1.8.0 finds what to divide by a feature's name, at its first place: so it also divides what table-
        # and column-wise kernels have divided or only sum, and at further places of a shared feature what is a sum.
        # Without RecStore, CPU plans have no row-wise tables, so this would be met here first. Here each place counts.
        places = []
        for sharding in self._shardings():
            # Column-wise and grid shardings keep a name for each shard, as the features have it; grid's
            # uncombined_embedding_names are the combined ones.
            places += getattr(sharding, "_embedding_names", sharding.embedding_names())
        self._kjt_key_indices = {str(place): place for place in range(len(places))}
        whole = [str(place) for place, name in enumerate(places) if name not in self._divided]
        self._pooling_type_to_rs_features = {PoolingType.SUM.value: whole}
        self._kt_key_ordering = torch.tensor(
            [places.index(name) for name in self._embedding_names], device=self._device
        )


class RecStoreSharder(RecStoreCollectionSharder, EmbeddingBagCollectionSharder):  # type: ignore[misc]
    """Shards ``EmbeddingBagCollection`` with RecStore tables.

    Without a plan, ``DistributedModelParallel`` places every table in RecStore: giving the sharder is asking for it.
    ``RecStorePlanner`` also places tables on TorchRec's kernels, where their constraints name them.

    Rows are stored as the config's ``data_type`` says: FP32, FP16 or BF16. Casting the sharded model, by
    ``bfloat16()``, ``half()`` or ``to(dtype)``, leaves them and their lookups as they are: set ``data_type`` instead.
    ``fused_params["output_dtype"]``, FP32 by default as in TorchRec's kernels, is the dtype of the lookups' results;
    ``fused_params["stochastic_rounding"]``, off by default, rounds updates of 16-bit rows at random.

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

    _sharded = RecStoreShardedEmbeddingBagCollection

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
            NotImplementedError: ``DMPCollection``, with RecStore tables in the plan.
        """
        fused_params, params = self._dealt_out(module, params, env)
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
