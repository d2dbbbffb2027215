"""The sharders and sharded modules of TorchRec's collections.

Tests: tests/sharders/test_embeddingbag.py, tests/sharders/test_embedding.py.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torchrec.distributed.embedding import (
    EmbeddingCollectionSharder,
    ShardedEmbeddingCollection,
)
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.fp_embeddingbag import (
    FeatureProcessedEmbeddingBagCollectionSharder,
    ShardedFeatureProcessedEmbeddingBagCollection,
)
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingType,
)
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    get_embedding_names_by_table,
)
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_recstore.options import LFU
from torchrec_recstore.sharders.collection import (
    InverseIndices,
    ModuleTypeOfSharder,
    RecStoreCollection,
    RecStoreCollectionSharder,
)
from torchrec_recstore.sharders.kernel import ROW_SPLIT
from torchrec_recstore.sharders.plan_entries import RECSTORE_KERNEL
from torchrec_recstore.sharders.sharding_kernels import (
    RecStorePooledShardingKernels,
    RecStoreSequenceShardingKernels,
)
from torchrec_recstore.torchrec_seams.models import (
    BagCollectionSeams,
    FeatureProcessedSharderSeams,
    SequenceCollectionSeams,
    collection_inside,
    is_weighted,
    module_order,
    need_indices,
    on_meta_device,
    uses_index_dedup,
)
from torchrec_recstore.utils import warn_user


def _has_trained_weights(features: KeyedJaggedTensor) -> bool:
    """Returns whether ``features`` have weights that get a gradient."""
    if not torch.is_grad_enabled():
        return False
    weights = features.weights_or_none()
    return weights is not None and bool(weights.requires_grad)


def _bags_of_examples(
    pooled: KeyedTensor,
    *,
    inverse: InverseIndices,
    feature_of: Mapping[str, str],
) -> KeyedTensor:
    """Returns the pooled rows of the bag of each example.

    Args:
        pooled: (bags, sum of dims). The pooled rows.
        inverse: The number of the bag of each example.
        feature_of: The feature of each output, by name.
    """
    features, bags_of_features = inverse
    places = {name: place for place, name in enumerate(features)}
    dims = pooled.length_per_key()
    rows_of_outputs = pooled.values().split(dims, dim=1)
    expanded = []
    for name, rows in zip(pooled.keys(), rows_of_outputs, strict=True):
        bags = bags_of_features[places[feature_of[name]]]
        expanded.append(rows.index_select(0, bags))
    return KeyedTensor(
        keys=pooled.keys(),
        length_per_key=dims,
        values=torch.cat(expanded, dim=1),
    )


class RecStoreShardedEmbeddingBagCollection(
    RecStoreCollection,
    BagCollectionSeams,
    ShardedEmbeddingBagCollection,  # type: ignore[misc]
):
    """A sharded ``EmbeddingBagCollection`` with tables in RecStore.

    Its other tables are on TorchRec's kernels, as the plan says.

    A RecStore table accepts any int64 id. In training, the forward pass makes rows and
    the backward pass updates them. In evaluation, nothing changes. The initial weights
    come from the table's options and config, not from the unsharded module.

    Raises:
        ValueError: RecStore does not support the sharding type, data type, ``init_fn``,
            optimizer, routing or ``max_rows`` of a RecStore table.
        ColdStoreError: A cold store cannot be opened.
        ImportError: The package of a cold store is not installed. All of these errors
            are raised on every rank.
    """

    _supported = (
        "table_wise",
        "column_wise",
        "table_column_wise",
        "row_wise",
        "table_row_wise",
        "grid_shard",
    )
    _configs_name = "embedding_bag_configs"
    _tables_name = "embedding_bags"
    _sharding_kernels_type = RecStorePooledShardingKernels
    _uses_inverse_indices = True

    weights_come_later = False
    """Whether feature processors make the per-sample weights between the input
    distribution and the lookup.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.divide_afterwards(self._divided_afterwards())

    def input_dist(self, ctx: Any, features: Any) -> Awaitable[Awaitable[KJTList]]:
        """Distributes a batch to the ranks. See :meth:`RecStoreCollection.input_dist`.

        Raises NotImplementedError on every rank if the per-sample weights require a
        gradient that TorchRec's input distribution loses. In evaluation, it is a
        warning. Raises ValueError if the collection is weighted and the batch has no
        weights.
        """
        if not isinstance(features, KeyedJaggedTensor):
            features = maybe_td_to_kjt(features)
        # TorchRec's kernels would use the weight 1 for each id (torchrec 1.8.0). The
        # unsharded collection raises.
        needs_weights = is_weighted(self) and not self.weights_come_later
        if needs_weights and features.weights_or_none() is None:
            raise ValueError(
                f"is_weighted=True needs weights of the features {features.keys()}:"
                " give the batch weights, or shard feature processors that make them"
                " with RecStoreFeatureProcessedEmbeddingBagCollectionSharder"
            )
        if is_weighted(self) and _has_trained_weights(features):
            lost = self._lost_weight_gradients(features)
            if lost and self.training:
                raise NotImplementedError(lost)
            if lost:
                warn_user(
                    "a backward of this lookup in evaluation mode loses a gradient:"
                    f" {lost}"
                )
        return super().input_dist(ctx, features)

    def output_dist(self, ctx: Any, output: Any) -> LazyAwaitable[KeyedTensor]:
        """Distributes the results, and applies inverse indices."""
        return self._by_inverse_indices(ctx, super().output_dist(ctx, output))

    def compute_and_output_dist(
        self,
        ctx: Any,
        input: Any,
    ) -> LazyAwaitable[KeyedTensor]:
        """Looks up the batch and distributes the results. See :meth:`output_dist`."""
        return self._by_inverse_indices(
            ctx,
            super().compute_and_output_dist(ctx, input),
        )

    def _by_inverse_indices(
        self,
        ctx: Any,
        pooled: LazyAwaitable[KeyedTensor],
    ) -> LazyAwaitable[KeyedTensor]:
        # The unsharded collection applies the inverse indices of every batch, and
        # TorchRec's sharded one only those of batches whose sizes vary by feature
        # (torchrec 1.8.0).
        if ctx.inverse_indices is not None and not ctx.variable_batch_per_feature:
            inverse = ctx.inverse_indices
            pooled.callbacks.append(
                partial(
                    _bags_of_examples,
                    inverse=inverse,
                    feature_of=self._feature_of,
                )
            )
        return pooled

    @cached_property
    def _feature_of(self) -> dict[str, str]:
        """The feature of each output, by name."""
        features: dict[str, str] = {}
        configs = self.table_configs
        names_by_table = get_embedding_names_by_table(configs)
        for config, names in zip(configs, names_by_table, strict=True):
            features.update(zip(names, config.feature_names, strict=True))
        return features

    def _uses_weights(self) -> bool:
        return is_weighted(self)

    def _lost_weight_gradients(self, features: KeyedJaggedTensor) -> str:
        """Describes the gradients of weights that the input distribution would lose.

        Returns an empty text if there are none.
        """
        # TorchRec distributes features outside of autograd (torchrec 1.8.0). Weights
        # keep their gradient only if they are returned unchanged: on one rank, with one
        # sharding that does not split rows, and with the features in the order of that
        # sharding.
        plan = self.module_sharding_plan
        shardings = self.shardings_in_order
        ranks = self.ranks_env.world_size
        order = self.features_in_order
        names = features.keys()
        if not self.awaits_first_batch:
            # The input distribution brings the features into this order.
            names = list(self._first_keys)
        keeps_weights = ranks == 1 and len(shardings) == 1 and names == order
        for config in self.table_configs:
            in_batch = [name for name in config.feature_names if name in names]
            sharding = plan[config.name]
            if sharding.compute_kernel != RECSTORE_KERNEL or not in_batch:
                continue
            sharding_type = sharding.sharding_type
            if keeps_weights and sharding_type not in ROW_SPLIT:
                continue
            return (
                f"RecStore table {config.name!r}: the weights of feature(s)"
                f" {', '.join(map(repr, in_batch))} require a gradient, which"
                f" TorchRec's input distribution does not carry ({sharding_type} on"
                f" {ranks} rank(s)): {self._fix_of_lost_gradients(order)}"
            )
        return ""

    def _fix_of_lost_gradients(self, order: Sequence[str]) -> str:
        """Suggests a fix; ``order`` are the features in the order of the shardings."""
        fix = (
            "use a FeatureProcessedEmbeddingBagCollection, which makes weights"
            " after it, or detach the weights"
        )
        if self.ranks_env.world_size > 1:
            return fix
        types = {
            sharding.sharding_type for sharding in self.module_sharding_plan.values()
        }
        if types == {ShardingType.TABLE_WISE.value}:
            return f"give the features in the order {order}, {fix}"
        return f"shard all tables of the collection table_wise, {fix}"

    def _divided_afterwards(self) -> set[str]:
        """Returns the outputs that are divided after the output distribution.

        These are means whose kernels return sums.
        """
        names_by_table = get_embedding_names_by_table(self.table_configs)
        divided: set[str] = set()
        for config, names in zip(self.table_configs, names_by_table, strict=True):
            sharding = self.module_sharding_plan[config.name]
            is_summed = sharding.sharding_type in ROW_SPLIT
            if sharding.sharding_type == ShardingType.GRID_SHARD.value:
                # The stock kernels of a grid sharding return means, one for each shard
                # of rows (torchrec 1.8.0).
                is_summed = sharding.compute_kernel == RECSTORE_KERNEL
            if is_summed and config.pooling == PoolingType.MEAN:
                divided.update(names)
        return divided


class RecStoreSharder(RecStoreCollectionSharder, EmbeddingBagCollectionSharder):  # type: ignore[misc]
    """The sharder of ``EmbeddingBagCollection`` that places tables in RecStore.

    If ``DistributedModelParallel`` gets this sharder and no plan, it places every table
    in RecStore. ``RecStorePlanner`` also places tables on TorchRec's kernels if their
    constraints name these kernels.

    Rows are stored in the ``data_type`` of the table's config: FP32, FP16, BF16 or
    INT8. Casting the sharded model with ``bfloat16()``, ``half()`` or ``to(dtype)``
    changes neither the rows nor the dtype of lookups; set ``data_type`` instead.
    ``fused_params["output_dtype"]`` is the dtype of the results of lookups. Default:
    FP32, as in TorchRec's kernels. If ``fused_params["stochastic_rounding"]`` is True,
    updates of 16-bit rows are rounded stochastically. Default: False. Updates of INT8
    rows always are.

    Example::

        fused_params = {
            "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "learning_rate": 0.01,
        }
        sharder = RecStoreSharder(fused_params=fused_params)
        model = DistributedModelParallel(model, sharders=[sharder])

    Args:
        fused_params: The arguments of the fused optimizer, as for TorchRec's sharder.
            They select the optimizer of tables that have none from
            ``apply_optimizer_in_backward``.
        optimizer: The optimizer of the RecStore tables, from
            ``torchrec_recstore.optim``. It can be an optimizer that ``fused_params``
            cannot select. Default: None, the optimizer that ``fused_params`` select.
        accumulation_steps: The number of backward passes whose gradients are summed
            before one update of the RecStore tables. The update uses the learning rate
            of the last backward pass. Until then, forward passes read the rows without
            these gradients. Default: 1.
        args, kwargs: The other arguments of TorchRec's sharder.

    Raises:
        TypeError: ``optimizer`` is not an optimizer of ``torchrec_recstore.optim``, or
            ``accumulation_steps`` is not an int.
        ValueError: ``optimizer`` and ``fused_params`` select different optimizers, or
            ``accumulation_steps`` is less than 1.
    """

    _sharded = RecStoreShardedEmbeddingBagCollection
    module_type = ModuleTypeOfSharder(EmbeddingBagCollection)

    def own_arguments(self) -> dict[str, Any]:
        """Returns the arguments that only the sharded module of this sharder has."""
        return {"sharded_module_order_overwrite": module_order(self)}


class RecStoreFeatureProcessedEmbeddingBagCollectionSharder(
    FeatureProcessedSharderSeams,
    FeatureProcessedEmbeddingBagCollectionSharder,  # type: ignore[misc]
):
    """The sharder of ``FeatureProcessedEmbeddingBagCollection`` for RecStore.

    The feature processors are trained as with TorchRec's sharder. TorchRec's sharder
    itself cannot place tables in RecStore, because it does not ask ``ebc_sharder`` for
    its compute kernels (torchrec 1.8.0).

    Args:
        ebc_sharder: The sharder of the inner ``EmbeddingBagCollection``. Default:
            ``RecStoreSharder()``.
        qcomm_codecs_registry: The codecs of quantized communication, as for TorchRec's
            sharder. Default: None.

    Raises:
        TypeError: ``ebc_sharder`` is not a :class:`RecStoreSharder`.
    """

    module_type = ModuleTypeOfSharder(FeatureProcessedEmbeddingBagCollection)

    def __init__(
        self,
        ebc_sharder: RecStoreSharder | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        if ebc_sharder is None:
            ebc_sharder = RecStoreSharder(qcomm_codecs_registry=qcomm_codecs_registry)
        if not isinstance(ebc_sharder, RecStoreSharder):
            raise TypeError(
                "ebc_sharder must be a RecStoreSharder, got"
                f" {type(ebc_sharder).__name__}"
            )
        super().__init__(ebc_sharder, qcomm_codecs_registry)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(ebc_sharder={self.inner_sharder!r})"

    def with_stock_kernels(
        self,
    ) -> RecStoreFeatureProcessedEmbeddingBagCollectionSharder:
        """Returns a copy that also offers TorchRec's kernels.

        It is for planners that choose the kernel by constraint.
        """
        offering = copy.copy(self)
        offering.inner_sharder = self.inner_sharder.with_stock_kernels()
        return offering

    def shard(
        self,
        module: FeatureProcessedEmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedFeatureProcessedEmbeddingBagCollection:
        """Returns the sharded module, on the CPU by default.

        See ``RecStoreSharder.shard``.
        """
        sharded = super().shard(
            module,
            params,
            env,
            device or torch.device("cpu"),
            module_fqn,
        )
        collection = collection_inside(sharded)
        assert isinstance(collection, RecStoreShardedEmbeddingBagCollection)
        collection.weights_come_later = True
        return sharded

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Returns the sharding types that ``ebc_sharder`` supports."""
        return self.inner_sharder.sharding_types(compute_device_type)  # type: ignore[no-any-return]

    def compute_kernels(
        self,
        sharding_type: str,
        compute_device_type: str,
    ) -> list[str]:
        """Returns the compute kernels that ``ebc_sharder`` offers."""
        return self.inner_sharder.compute_kernels(sharding_type, compute_device_type)  # type: ignore[no-any-return]


class RecStoreShardedEmbeddingCollection(
    RecStoreCollection,
    SequenceCollectionSeams,
    ShardedEmbeddingCollection,  # type: ignore[misc]
):
    """A sharded ``EmbeddingCollection`` with tables in RecStore.

    Its other tables are on TorchRec's kernels, as the plan says.

    The output has one row for each id. Rows are made and updated as in
    :class:`RecStoreShardedEmbeddingBagCollection`. TorchRec 1.8.0 has no
    table-column-wise, table-row-wise and grid sharding for ``EmbeddingCollection``. The
    errors are those of :class:`RecStoreShardedEmbeddingBagCollection`.
    """

    _supported = ("table_wise", "column_wise", "row_wise")
    _configs_name = "embedding_configs"
    _tables_name = "embeddings"
    _sharding_kernels_type = RecStoreSequenceShardingKernels
    _uses_inverse_indices = False

    def __init__(
        self,
        module: EmbeddingCollection,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        # The stock constructor loads the weights of all tables of a module that is not
        # on the meta device (torchrec 1.8.0), but RecStore tables do not take the
        # weights of the unsharded module. So the constructor gets a module on the meta
        # device, and the weights of the tables on TorchRec's kernels are loaded below.
        super().__init__(on_meta_device(module), *args, **kwargs)
        hashed = sorted(self._hashed_features())
        if hashed and need_indices(self):
            raise ValueError(
                f"need_indices is not supported with routing='hash': features {hashed}"
            )
        if uses_index_dedup(self):
            self._refuse_counts_of_occurrences()
        if module.device != torch.device("meta"):
            stock_weights = dict(module.state_dict())
            for name in self.recstore_table_names():
                stock_weights.pop(f"embeddings.{name}.weight", None)
            self.load_state_dict(stock_weights, strict=False)

    def _refuse_counts_of_occurrences(self) -> None:
        for name, state in self.recstore_state.tables.items():
            eviction = state.options.eviction
            if isinstance(eviction, LFU) and eviction.count == "occurrences":
                raise ValueError(
                    f"RecStore table {name!r}: LFU(count='occurrences') cannot be used"
                    " with use_index_dedup=True, which sends each id of a rank's batch"
                    " once: leave use_index_dedup out, or use LFU(count='steps')"
                )

    @property
    def unsharded_module_type(self) -> type[EmbeddingCollection]:
        """The class of the unsharded module.

        ``DistributedModelParallel.reshard`` finds the sharder by it.
        """
        return EmbeddingCollection  # type: ignore[no-any-return]

    def input_dist(self, ctx: Any, features: Any) -> Awaitable[Any]:
        """Distributes a batch to the ranks.

        Raises NotImplementedError in training if batch sizes vary by feature.
        """
        # TorchRec 1.8.0 expands the rows of these batches with
        # fbgemm::permute_1D_sparse_data, which has no gradient on CPU, so that the
        # gradients would be wrong.
        varies = (
            isinstance(features, KeyedJaggedTensor)
            and features.variable_stride_per_key()
        )
        if varies and self.training and torch.is_grad_enabled():
            names = self.recstore_table_names()
            if names:
                raise NotImplementedError(
                    f"RecStore tables {names}: an EmbeddingCollection cannot train on"
                    " batches of varying size: TorchRec has no gradient for it on CPU;"
                    " give all features the same batch size"
                )
        return super().input_dist(ctx, features)

    def _uses_weights(self) -> bool:
        # TorchRec's virtual tables take the weights of sequences for scores, by which
        # they evict rows (torchrec 1.8.0).
        return any(config.use_virtual_table for config in self.table_configs)


class RecStoreEmbeddingCollectionSharder(
    RecStoreCollectionSharder,
    EmbeddingCollectionSharder,  # type: ignore[misc]
):
    """The sharder of ``EmbeddingCollection`` that places tables in RecStore.

    See :class:`RecStoreSharder`; the arguments are the same.
    """

    _sharded = RecStoreShardedEmbeddingCollection
    module_type = ModuleTypeOfSharder(EmbeddingCollection)

    def own_arguments(self) -> dict[str, Any]:
        """Returns the arguments that only the sharded module of this sharder has."""
        return {"use_index_dedup": uses_index_dedup(self)}

    def reshard(
        self,
        sharded_module: RecStoreShardedEmbeddingCollection,
        changed_shard_to_params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> RecStoreShardedEmbeddingCollection:
        """Changes the plan of a sharded module in place.

        ``DistributedModelParallel.reshard`` calls this method.

        See :func:`torchrec_recstore.reshard`. TorchRec has the method for
        ``EmbeddingBagCollection`` only.
        """
        sharded_module.update_shards(changed_shard_to_params, env, device)
        return sharded_module
