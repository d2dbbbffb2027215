"""The private parts of TorchRec's shardings, sharded modules and kernels.

A seam that gives no other reason exists because TorchRec has no public accessor.

Tests: tests/test_torchrec_seams.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, ClassVar, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_sharding import EmbeddingSharding
from torchrec.distributed.embedding_types import (
    BaseEmbeddingLookup,
    GroupedEmbeddingConfig,
    ShardedEmbeddingModule,
)
from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec
from torchrec.distributed.model_tracker.types import TrackingMode
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, PoolingType
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

Sharding: TypeAlias = EmbeddingSharding[Any, Any, Any, Any]
"""The tables of one collection that have one sharding type."""

process_group: Callable[[Sharding], dist.ProcessGroup | None] = attrgetter("_pg")


def sharding_env(sharded: Any) -> ShardingEnv:
    """Returns the environment of a sharding or of a sharded module.

    ``torch.compile`` traces this, no attrgetter.
    """
    env: ShardingEnv = sharded._env
    return env


def split_in_node(sharding: Sharding) -> tuple[int, int]:
    """Returns the ranks of a node and this rank among them.

    It is for table-row-wise and grid shardings.
    """
    return sharding._local_size, sharding._rank % sharding._local_size


def grouped_configs(sharding: Sharding) -> list[GroupedEmbeddingConfig]:
    """Returns the groups of tables on this rank.

    Table-row-wise and grid shardings keep those of every rank only.
    """
    groups: list[GroupedEmbeddingConfig] | None
    groups = getattr(sharding, "_grouped_embedding_configs", None)
    if groups is None:
        groups = []
        groups_of_ranks = getattr(sharding, "_grouped_embedding_configs_per_rank", None)
        if groups_of_ranks is not None:
            groups = groups_of_ranks[sharding._rank]
    return groups


def grouped_configs_of_all_ranks(sharding: Sharding) -> list[GroupedEmbeddingConfig]:
    """Returns the groups of tables of every rank, none for data-parallel shardings."""
    groups_of_ranks = getattr(
        sharding,
        "_grouped_embedding_configs_per_rank",
        [],
    )
    return [group for groups in groups_of_ranks for group in groups]


class CollectionSeams(ShardedEmbeddingModule):  # type: ignore[misc]
    """Public names for private hooks and attributes of TorchRec's sharded collections.

    It is a mixin.
    """

    _optim: CombinedOptimizer
    # The unsharded module's method, and with an underscore before it the sharded one's
    # list, of table configs.
    _configs_name: ClassVar[str]

    @property
    def ranks_env(self) -> ShardingEnv:
        """The environment that the collection is sharded in."""
        return sharding_env(self)

    @property
    def stock_device(self) -> torch.device:
        """The device of TorchRec's own kernels."""
        return self._device  # type: ignore[no-any-return]

    @property
    def sharding_kernels(self) -> list[Any]:
        """The compute kernels of each sharding, in the order of the shardings.

        TorchRec calls the module with the kernels of a sharding a lookup.
        """
        return self._lookups  # type: ignore[no-any-return]

    @property
    def names_of_tables(self) -> list[str]:
        """The names of the tables, in the order of the configs."""
        return self._table_names  # type: ignore[no-any-return]

    @property
    def table_configs(self) -> list[BaseEmbeddingConfig]:
        """The configs of the tables."""
        return getattr(self, f"_{self._configs_name}")  # type: ignore[no-any-return]

    @property
    def shardings_in_order(self) -> list[Sharding]:
        """The shardings, in the order of their types."""
        shardings = getattr(self, "_embedding_shardings", None)
        if shardings is None:
            shardings = self._sharding_type_to_sharding.values()
        return list(shardings)

    @property
    def features_in_order(self) -> list[str]:
        """The features of the shardings, in the order of their types."""
        names: list[str] = []
        for sharding in self.shardings_in_order:
            names += sharding.feature_names()
        return names

    def shardings_by_type(self) -> Iterator[tuple[str, Sharding]]:
        """Yields the type of each sharding, and the sharding."""
        return zip(self._sharding_types, self.shardings_in_order, strict=True)

    @property
    def awaits_first_batch(self) -> bool:
        """Whether the input distribution has not been made yet."""
        return bool(self._has_uninitialized_input_dist)

    @contextmanager
    def hidden_configs(self, tables: Sequence[str]) -> Iterator[None]:
        """Hides the configs of some tables from TorchRec's methods.

        These methods have no argument for it.
        """
        attribute = f"_{self._configs_name}"
        configs = self.table_configs
        hidden = set(tables)
        shown = [config for config in configs if config.name not in hidden]
        setattr(self, attribute, shown)
        try:
            yield
        finally:
            setattr(self, attribute, configs)

    def become(self, other: CollectionSeams) -> None:
        """Takes over all of another sharded collection, but stays the same object.

        Both have the same tables.
        """
        # The hooks of the user and TorchRec's refer to this object, and stay. So does
        # the fused optimizer.
        optimizer = self._optim
        optimizer.optimizers[:] = other._optim.optimizers
        attributes = dict(other.__dict__)
        for name, value in self.__dict__.items():
            if name.endswith("_hooks"):
                attributes[name] = value
        attributes["_optim"] = optimizer

        is_training = self.training
        self.__dict__.clear()
        self.__dict__.update(attributes)
        self.train(is_training)

    def make_sharding_kernels(self) -> None:
        """Appends the kernels of each sharding to :attr:`sharding_kernels`."""
        raise NotImplementedError

    def make_state(self, fused_optimizer: CombinedOptimizer) -> CombinedOptimizer:
        """Returns the collection's fused optimizer.

        It is called once the stock tables are registered.
        """
        raise NotImplementedError

    def register_tables(self) -> None:
        """Is called whenever the parameters of the stock tables have been registered."""
        raise NotImplementedError

    def load_rows(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Takes the rows of the collection's tables out of a state to load."""
        raise NotImplementedError

    def _create_lookups(self) -> None:  # the only place between shardings and kernels
        self.make_sharding_kernels()

    def _initialize_torch_state(self, skip_registering: bool = False) -> None:
        super()._initialize_torch_state(skip_registering)
        self.register_tables()
        if not skip_registering:
            self._optim = self.make_state(self._optim)

    @staticmethod
    def _pre_load_state_dict_hook(
        self: Any,
        state_dict: dict[str, Any],
        prefix: str,
        *args: Any,
    ) -> None:
        # Both stock collections register the hook under this name.
        self.load_rows(state_dict, prefix)
        super()._pre_load_state_dict_hook(self, state_dict, prefix, *args)


class BagCollectionSeams(CollectionSeams):
    """A mixin for ``ShardedEmbeddingBagCollection``."""

    def divide_afterwards(self, names: set[str]) -> None:
        """Sets the outputs that kernels sum and that are divided afterwards.

        TorchRec chooses by sharding type only.
        """
        self._divided = names
        self._has_mean_pooling_callback = bool(names)

    def _init_mean_pooling_callback(self, *args: Any) -> None:
        super()._init_mean_pooling_callback(*args)
        # TorchRec finds the outputs to divide by name, and divides wrong ones for a
        # feature of several tables. Every output is identified by its position instead.
        # Column-wise and grid shardings keep one name for each shard;
        # uncombined_embedding_names of a grid sharding has the combined names.
        outputs: list[str] = []
        for sharding in self.shardings_in_order:
            stock_names = sharding.embedding_names()
            outputs += getattr(sharding, "_embedding_names", stock_names)

        places: dict[str, int] = {}
        undivided: list[str] = []
        for place, name in enumerate(outputs):
            places[str(place)] = place
            if name not in self._divided:
                undivided.append(str(place))
        self._kjt_key_indices = places
        self._pooling_type_to_rs_features = {PoolingType.SUM.value: undivided}

        ordering = [outputs.index(name) for name in self._embedding_names]
        self._kt_key_ordering = torch.tensor(ordering, device=self._device)


class SequenceCollectionSeams(CollectionSeams):
    """A mixin for ``ShardedEmbeddingCollection``."""

    def _create_lookups(self) -> None:
        super()._create_lookups()
        # TorchRec's method, which is not called, also makes the updates.
        if self.enable_embedding_update:
            for sharding, kernels in zip(
                self.shardings_in_order,
                self.sharding_kernels,
                strict=True,
            ):
                if sharding.enable_embedding_update:
                    self._updates.append(sharding.create_update(kernels))


def is_in_pipeline(module: nn.Module) -> bool:
    """Returns whether a train pipeline has replaced the ``forward`` of a module."""
    # Detaching a pipeline leaves the original method in the attribute of the object
    # (torchrec 1.8.0).
    return getattr(module.forward, "__func__", None) is not type(module).forward


def on_meta_device(module: nn.Module) -> nn.Module:
    """Returns a shallow copy of an unsharded collection, on the meta device.

    Sharding the copy loads no weights.
    """
    shallow = copy.copy(module)
    shallow._device = torch.device("meta")  # type: ignore[assignment]
    return shallow


def set_device(collection: nn.Module, device: torch.device) -> None:
    """Sets the ``device`` attribute of an unsharded collection.

    Its tables have been replaced.
    """
    collection._device = device  # type: ignore[assignment]


def configs_of(collection: nn.Module) -> list[BaseEmbeddingConfig]:
    """Returns the table configs of a collection, sharded or not.

    Other modules have none.
    """
    for name in ("embedding_bag_configs", "embedding_configs"):
        # A sharded collection has no public name of its configs.
        if hasattr(collection, f"_{name}"):
            return list(getattr(collection, f"_{name}"))
        if hasattr(collection, name):
            return list(getattr(collection, name)())
    return []


def is_weighted(collection: nn.Module) -> bool:
    """Returns whether a sharded bag collection uses the weights of its features.

    ``torch.compile`` traces it.
    """
    return bool(collection._is_weighted)


# Whether the output of a sharded sequence collection has the ids, and whether a
# PositionWeightedModule finds the positions in the weights.
need_indices: Callable[[nn.Module], bool] = attrgetter("_need_indices")
weights_are_positions: Callable[[nn.Module], bool] = attrgetter("_pre_processed")
# The processors of a feature-processed collection, and the bag collection inside it.
feature_processors: Callable[[nn.Module], nn.Module] = attrgetter("_feature_processors")
collection_inside: Callable[[nn.Module], nn.Module] = attrgetter(
    "_embedding_bag_collection"
)


def kernels_of(owner: nn.Module) -> list[Any]:
    """Returns the kernels of one sharding, or of a quantized collection."""
    return list(owner._emb_modules)  # type: ignore[arg-type]


# The arguments sharded_module_order_overwrite of a bag sharder, and use_index_dedup of
# a sequence sharder.
module_order: Callable[[Any], Any] = attrgetter("_sharded_module_order_overwrite")
uses_index_dedup: Callable[[Any], bool] = attrgetter("_use_index_dedup")


def set_plan(model: DistributedModelParallel, plan: ShardingPlan) -> None:
    """Sets the plan that ``model.plan`` returns.

    There is no public way, and the present plan belongs to the user.
    """
    model._plan = plan


def follow_collection_inside(collection: nn.Module) -> None:
    """Tells a feature-processed collection of the plan of the collection inside.

    Its constructor has read the plan.
    """
    inside: Any = collection_inside(collection)
    collection._lookups = inside._lookups
    rows_split = {"row_wise", "table_row_wise", "grid_shard"}
    shardings = inside.module_sharding_plan.values()
    types = {sharding.sharding_type for sharding in shardings}
    collection._row_wise_sharded = bool(types & rows_split)  # type: ignore[assignment]


class FeatureProcessedSharderSeams:
    """A mixin for ``FeatureProcessedEmbeddingBagCollectionSharder``."""

    _ebc_sharder: Any

    @property
    def inner_sharder(self) -> Any:
        """The sharder of the collection inside."""
        return self._ebc_sharder

    @inner_sharder.setter
    def inner_sharder(self, sharder: Any) -> None:
        self._ebc_sharder = sharder


class ShardingKernelsSeams(BaseEmbeddingLookup):  # type: ignore[misc]
    """A mixin that makes other kernels than TorchRec for some groups of tables.

    It is for the modules that TorchRec calls lookups, which have the kernels of one
    sharding.
    """

    _dummy_embs_tensor: Tensor

    def set_dtype_without_tables(self, dtype: torch.dtype) -> None:
        """Sets the data type of the empty output of a rank without tables.

        TorchRec's is float32 (torchrec 1.8.0).
        """
        device = self._dummy_embs_tensor.device
        self._dummy_embs_tensor = torch.empty(
            0,
            dtype=dtype,
            device=device,
            requires_grad=True,
        )

    def make_kernel(self, config: GroupedEmbeddingConfig) -> BaseEmbedding | None:
        """Returns the kernel of a group, or None if TorchRec makes the kernel."""
        raise NotImplementedError

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        *args: Any,
        **kwargs: Any,
    ) -> BaseEmbedding:
        # The only place where kernels are made; TorchRec's method refuses
        # CUSTOMIZED_KERNEL.
        kernel = self.make_kernel(config)
        if kernel is None:
            return super()._create_embedding_kernel(config, *args, **kwargs)
        return kernel

    def features_by_kernel(
        self, features: KeyedJaggedTensor
    ) -> Iterator[tuple[Any, KeyedJaggedTensor]]:
        """Each kernel and its features."""
        return zip(kernels_of(self), features.split(self._feature_splits), strict=True)


class PooledShardingKernelsSeams(ShardingKernelsSeams):
    """A mixin for ``GroupedPooledEmbeddingsLookup``."""

    def _forward_with_vbe_merging(
        self,
        features_by_group: list[KeyedJaggedTensor],
        device: torch.device,
    ) -> Tensor:
        # The stock method gives its kernels a preallocated output, which neither
        # RecStore's nor FBGEMM's on a CPU take.
        groups = zip(
            self._forward(features_by_group),
            self._vbe_splits(features_by_group),
            self._feature_splits,
            strict=True,
        )
        rows_by_group = []
        # sizes are those of the features from the first rank, then from the second one.
        for pooled, sizes, features in groups:
            sizes_of_ranks = []
            for begin in range(0, len(sizes), features):
                end = begin + features
                sizes_of_ranks.append(sum(sizes[begin:end]))
            rows_by_group.append(pooled.split(sizes_of_ranks))

        rank_major: list[Tensor] = []
        for rows_of_rank in zip(*rows_by_group, strict=True):
            rank_major += rows_of_rank
        return torch.cat(rank_major)


def optimizer_states(kernel: nn.Module) -> Any:
    """Returns the optimizer states of a kernel of TorchRec's, by table."""
    return kernel._emb_module.split_optimizer_states()  # type: ignore[union-attr, operator]


tracking_mode: Callable[[ModelDeltaTrackerTrec], TrackingMode] = attrgetter("_mode")


def marked_optimizer(
    parameter: Tensor | None,
) -> tuple[type[torch.optim.Optimizer] | None, dict[str, Any]]:
    """Returns the optimizer class and arguments of ``apply_optimizer_in_backward``.

    Returns (None, {}) if there are none.
    """
    (optimizer_class,) = getattr(parameter, "_optimizer_classes", [None])
    first_arguments, *_ = getattr(parameter, "_optimizer_kwargs", [{}])
    return optimizer_class, dict(first_arguments)


def mark_as_optimized(parameter: Tensor, optimizer: object) -> None:
    """Marks a parameter as updated in backward.

    ``in_backward_optimizer_filter`` reads the mark.
    """
    parameter._in_backward_optimizers = [optimizer]  # type: ignore[attr-defined]
