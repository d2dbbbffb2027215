"""The base classes of sharded collections with RecStore tables, and of their sharders.

Tests: tests/distributed/test_sharded_equals_unsharded.py, tests/sharders/test_hash_routing.py.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Sequence, Set
from typing import Any, ClassVar, TypeAlias, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.embedding_types import (
    BaseEmbeddingSharder,
    EmbeddingComputeKernel,
    ShardedEmbeddingTable,
)
from torchrec.distributed.types import Awaitable, ParameterSharding, ShardingEnv
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_recstore import ops
from torchrec_recstore.kernels.routing import mixed_ids
from torchrec_recstore.optim import Optimizer
from torchrec_recstore.options import shard_options
from torchrec_recstore.quantization import RefusesQuantization
from torchrec_recstore.sharders.agreed_clock import AgreedClock
from torchrec_recstore.sharders.delta_tracker import Record
from torchrec_recstore.sharders.fused_params import (
    ACCUMULATION_KEY,
    OPTIMIZER_KEY,
    optimizer_from_fused_params,
)
from torchrec_recstore.sharders.gather import refused_together
from torchrec_recstore.sharders.kernel import (
    RecStoreKernel,
    options_of_whole_table,
    placeholder_parameter,
    prepare_table,
    row_split,
)
from torchrec_recstore.sharders.layout import LocalShard
from torchrec_recstore.sharders.plan_change import ReshardableCollection
from torchrec_recstore.sharders.plan_entries import (
    RECSTORE_KERNEL,
    RecStoreParameterSharding,
    ResidentParameter,
    check_plan,
    deal_out,
    entries_are_read_by_recstore,
    hashed_features,
    remote_options,
    warn_of_stock_enumerator,
    with_own_arguments,
)
from torchrec_recstore.sharders.row_state import ModuleState, RowState
from torchrec_recstore.sharders.sharding_kernels import RecStoreShardingKernels
from torchrec_recstore.store import Table
from torchrec_recstore.table_configs import check_dim, missing_features
from torchrec_recstore.table_parameter import GivenCopies
from torchrec_recstore.torchrec_seams.models import (
    Sharding,
    configs_of,
    grouped_configs_of_all_ranks,
)
from torchrec_recstore.utils import warn_user

InverseIndices: TypeAlias = tuple[list[str], torch.Tensor]
"""The names of features, and for each of them the number of the bag of each example,
(features, examples) int64.
"""

# The number of batches in flight from which on those that a pipeline has dropped are
# looked for.
_BEGUN_BATCHES = 16


def _needed_parts(features: Any, uses_weights: bool) -> KeyedJaggedTensor:
    """Returns ``features`` with int64 ids, and only with weights that are used.

    Args:
        features: A ``KeyedJaggedTensor`` or ``TensorDict`` with ids of any integer
            dtype.
        uses_weights: Whether the collection uses per-sample weights.
    """
    if not isinstance(features, KeyedJaggedTensor):
        features = maybe_td_to_kjt(features)
    # TorchRec sends weights that no kernel reads to other ranks, divides the means of
    # rows that are split over ranks by their sum, and its fused kernels multiply the
    # rows of unweighted collections by them (torchrec 1.8.0).
    drops_weights = not uses_weights and features.weights_or_none() is not None
    ids = features.values()
    if ids.dtype is torch.int64 and not drops_weights:
        return features
    # block_bucketize_sparse_features (fbgemm-gpu 1.8.0) is wrong for int32 ids that are
    # not less than num_embeddings.
    ops.check_integers(ids.dtype, features.keys())
    weights = None if drops_weights else features.weights_or_none()
    return _rebuilt(
        features,
        ids.to(torch.int64),
        weights,
        features.inverse_indices_or_none(),
    )


def _mixed_ids(features: KeyedJaggedTensor, names: Set[str]) -> KeyedJaggedTensor:
    """Returns ``features`` with the ids of some features mixed, for hash routing.

    The features are ``names``.
    """
    if not names:
        return features
    keys: list[str] = features.keys()
    mixes = [key in names for key in keys]
    if not any(mixes):
        return features
    if all(mixes):
        return _with_ids(features, mixed_ids(features.values()))
    ids_by_feature = features.values().split(features.length_per_key())
    ids_to_send = []
    for ids, mix in zip(ids_by_feature, mixes, strict=True):
        ids_to_send.append(mixed_ids(ids) if mix else ids)
    return _with_ids(features, torch.cat(ids_to_send))


def _with_ids(features: KeyedJaggedTensor, ids: torch.Tensor) -> KeyedJaggedTensor:
    weights = features.weights_or_none()
    return _rebuilt(
        features,
        ids,
        weights,
        features.inverse_indices_or_none(),
    )


def _rebuilt(
    features: KeyedJaggedTensor,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    inverse: InverseIndices | None,
) -> KeyedJaggedTensor:
    """Returns a batch of the same bags with other ids, weights and inverse indices."""
    varies = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=ids,
        weights=weights,
        lengths=features.lengths_or_none(),
        offsets=features.offsets_or_none(),
        stride=None if varies else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if varies else None,
        inverse_indices=inverse,
    )


def _in_order(features: KeyedJaggedTensor, names: Sequence[str]) -> KeyedJaggedTensor:
    """Returns the features ``names`` of a batch, in this order.

    Features that the batch does not have are empty.
    """
    by_name = features.to_dict()
    varies = features.variable_stride_per_key()
    stride: int | None = None if varies else features.stride()
    strides: list[list[int]] | None = None
    if varies:
        strides = _strides_in_order(features, names)
    empty_bags = features.lengths().new_zeros(stride or 0)
    ids = []
    lengths = []
    weights = []
    for name in names:
        feature = by_name.get(name)
        if feature is None:
            lengths.append(empty_bags)
            continue
        ids.append(feature.values())
        lengths.append(feature.lengths())
        if features.weights_or_none() is not None:
            weights.append(feature.weights())
    return KeyedJaggedTensor(
        keys=list(names),
        values=torch.cat(ids),
        weights=torch.cat(weights) if weights else None,
        lengths=torch.cat(lengths),
        stride=stride,
        stride_per_key_per_rank=strides,
        inverse_indices=features.inverse_indices_or_none(),
    )


def _strides_in_order(
    features: KeyedJaggedTensor,
    names: Sequence[str],
) -> list[list[int]]:
    """Returns the number of bags of each of the features ``names`` from each rank.

    It is 0 for features that the batch does not have.
    """
    in_batch = features.stride_per_key_per_rank()
    by_name = dict(zip(features.keys(), in_batch, strict=True))
    ranks = len(in_batch[0]) if in_batch else 0
    no_bags = [0] * ranks
    return [by_name.get(name, no_bags) for name in names]


class RecStoreCollection(RefusesQuantization, ReshardableCollection):
    """A mixin for TorchRec's sharded collections that supports tables in RecStore."""

    # The sharding types that are supported for RecStore tables.
    _supported: ClassVar[tuple[str, ...]]
    # The name of the attribute that holds one module for each table.
    _tables_name: ClassVar[str]
    _sharding_kernels_type: ClassVar[type[RecStoreShardingKernels]]
    # Whether the unsharded collection applies the inverse indices of a batch.
    _uses_inverse_indices: ClassVar[bool]
    _copies: GivenCopies
    _begun: dict[int, weakref.ref[Any]]
    _wall_clock: AgreedClock | None = None
    # The features of the first batch, for which TorchRec has made the input
    # distribution.
    _first_keys: Sequence[str] = ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        if names := self.recstore_table_names():
            raise TypeError(
                f"RecStore table {names[0]!r}: a sharded model cannot be copied or"
                " pickled: save it with save_checkpoint, and load it with"
                " load_checkpoint into a model that is sharded anew"
            )
        return super().__reduce_ex__(protocol)

    def remote_table_names(self) -> list[str]:
        """Returns the names of the RecStore tables whose rows are on servers.

        They are the same on every rank.
        """
        plan = self.module_sharding_plan
        return [
            name
            for name in self.recstore_table_names()
            if remote_options(plan[name]) is not None
        ]

    def is_frozen(self, name: str) -> bool:
        """Returns whether the rows of a RecStore table are only read."""
        sharding = self.module_sharding_plan[name]
        return (
            isinstance(sharding, RecStoreParameterSharding) and sharding.options.frozen
        )

    def wait_for_updates(self) -> None:
        """Waits until the servers have this rank's updates of their tables.

        Raises the error of an update that has failed.
        """
        for kernel in self.recstore_kernels():
            kernel.wait_for_updates()

    def recstore_tables(self) -> Iterator[Table]:
        """Yields the shards of the RecStore tables on this rank."""
        for kernel in self.recstore_kernels():
            yield from kernel.tables

    def recstore_dims(self) -> dict[str, int]:
        """Returns the number of columns of each whole RecStore table, by name."""
        names = set(self.recstore_table_names())
        return {
            config.name: config.embedding_dim
            for config in self.table_configs
            if config.name in names
        }

    def recstore_kernels(self) -> Iterator[RecStoreKernel]:
        """Yields RecStore's kernels on this rank."""
        for kernels in self.sharding_kernels:
            if isinstance(kernels, RecStoreShardingKernels):
                yield from kernels.kernels()

    @classmethod
    def create_grouped_sharding_infos(
        cls,
        module: nn.Module,
        plan: dict[str, ParameterSharding],
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, list[EmbeddingShardingInfo]]:
        """Checks all tables, and returns TorchRec's sharding infos by type."""
        # TorchRec's constructors call this method first (torchrec 1.8.0), on every
        # rank, also without a shard.
        configs: list[BaseEmbeddingConfig] = getattr(module, cls._configs_name)()
        for config in configs:
            check_plan(
                config,
                plan[config.name],
                cls._supported,
                type(module).__name__,
            )
        hashed_features(configs, plan)
        by_type: dict[str, list[EmbeddingShardingInfo]]
        with entries_are_read_by_recstore():
            by_type = super().create_grouped_sharding_infos(
                module,
                plan,
                *args,
                **kwargs,
            )
        for sharding_type, infos in by_type.items():
            for info in infos:
                if info.param_sharding.compute_kernel == RECSTORE_KERNEL:
                    prepare_table(
                        info.embedding_config,
                        info.fused_params,
                        sharding_type,
                    )
        return by_type

    def input_dist(self, ctx: Any, features: Any) -> Awaitable[Any]:
        """Converts the ids of a batch to int64, and distributes the batch to the ranks.

        Per-sample weights that the collection does not use are left out. The features
        may come in any order, and with further features.

        Raises TypeError if the ids are not integers, RuntimeError if a tensor from
        ``state_dict`` was written to, and ValueError if the batch lacks a feature, or
        its inverse indices do.
        """
        self._copies.check()
        features = _needed_parts(features, self._uses_weights())
        is_first_batch = self.awaits_first_batch
        has_new_features = is_first_batch or features.keys() != self._first_keys
        if has_new_features:
            # TorchRec's own error names no table, and leaves a half-made distribution
            # behind (torchrec 1.8.0).
            missing = missing_features(features.keys(), self.table_configs)
            if missing:
                raise ValueError(missing)
        if is_first_batch:
            self._first_keys = list(features.keys())
        elif has_new_features:
            # TorchRec finds the features of all batches at the places that they have in
            # the first (torchrec 1.8.0).
            features = _in_order(features, self._first_keys)
        features = self._with_inverse_in_order(features)
        features = _mixed_ids(features, self._hashed_features())
        if not is_first_batch:
            return self._begin_batch(ctx, super().input_dist(ctx, features))
        # TorchRec checks the ids of the first batch against num_embeddings (torchrec
        # 1.8.0), which limits no ids here.
        with self.hidden_configs(self.recstore_table_names()):
            return self._begin_batch(ctx, super().input_dist(ctx, features))

    def _begin_batch(self, ctx: Any, distributed: Awaitable[Any]) -> Awaitable[Any]:
        """Records that a batch has been distributed with the present plan.

        ``ctx`` is the context of the batch.
        """
        if torch.compiler.is_compiling():
            return distributed
        if len(self._begun) >= _BEGUN_BATCHES:
            for key, context in list(self._begun.items()):
                if context() is None:
                    self._begun.pop(key, None)
        self._begun[id(ctx)] = weakref.ref(ctx)
        return distributed

    def _end_batch(self, ctx: Any) -> None:
        if not torch.compiler.is_compiling():
            self._begun.pop(id(ctx), None)

    def forget_begun_batches(self) -> None:
        """Forgets the batches that have been distributed and not been looked up.

        The caller distributes them again.
        """
        self._begun.clear()

    def has_begun_batches(self) -> bool:
        """Returns whether a batch has been distributed and not been looked up.

        A train pipeline has distributed it with the present plan.
        """
        return any(context() is not None for context in self._begun.values())

    def _with_inverse_in_order(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Returns a batch with inverse indices in the order of the shardings' features.

        Only batches whose sizes vary by feature change.

        TorchRec takes the order from the first batch for all batches, and the divisors
        of means for a batch that has as many features as the shardings in the order of
        the batch, whatever the order of the shardings (torchrec 1.8.0).
        """
        inverse = self._inverse_indices(features)
        if inverse is None or not features.variable_stride_per_key():
            return features
        names = self.features_in_order
        if inverse[0] != names:
            places = {name: place for place, name in enumerate(inverse[0])}
            order = [places[name] for name in names]
            order_tensor = torch.tensor(order, device=inverse[1].device)
            inverse = (names, inverse[1].index_select(0, order_tensor))
        ids = features.values()
        return _rebuilt(
            features,
            ids,
            features.weights_or_none(),
            inverse,
        )

    def _inverse_indices(self, features: KeyedJaggedTensor) -> InverseIndices | None:
        """Returns the inverse indices of a batch, or None if they are not used.

        If the batch has a stride for each feature, those of the tables' features are
        equal, and there are no inverse indices, those that change nothing are returned,
        as in the unsharded collection.

        Raises ValueError if a feature of a table is missing in them.
        """
        varies = features.variable_stride_per_key()
        if not varies and not self._uses_inverse_indices:
            return None
        inverse: InverseIndices | None = features.inverse_indices_or_none()
        if inverse is None and varies:
            names = self._names_of_features()
            strides = dict(zip(features.keys(), features.stride_per_key(), strict=True))
            needed_strides = {strides[name] for name in names}
            if len(needed_strides) == 1:
                examples = torch.arange(needed_strides.pop(), device=features.device())
                inverse = names, examples.repeat(len(names), 1)
        if inverse is None:
            return None
        missing = missing_features(inverse[0], self.table_configs)
        if missing:
            raise ValueError(f"the inverse indices: {missing}")
        return inverse

    def _names_of_features(self) -> list[str]:
        """Returns the features of the tables, each once, in the order of the configs."""
        names: dict[str, None] = {}
        for config in self.table_configs:
            names.update(dict.fromkeys(config.feature_names))
        return list(names)

    def compute(self, ctx: Any, dist_input: Any) -> Any:
        """Looks up the batch, as TorchRec's method does, in a step of all ranks."""
        self._end_batch(ctx)
        self._begin_step()
        return super().compute(ctx, dist_input)

    def compute_and_output_dist(self, ctx: Any, input: Any) -> Any:
        """Looks up the batch in a step of all ranks, and distributes the results."""
        self._end_batch(ctx)
        self._begin_step()
        return super().compute_and_output_dist(ctx, input)

    def _begin_step(self) -> None:
        if self._wall_clock is not None and self.training and torch.is_grad_enabled():
            self._wall_clock.begin_step()

    def register_post_lookup_tracker_fn(self, record_fn: Record) -> None:
        """Registers a function that is called after each lookup.

        TorchRec's trackers call this method.
        """
        self.records = (*self.records, record_fn)
        # TorchRec's method would call it with the ids of the whole module, which cannot
        # be assigned to kernels.
        for kernels in self.sharding_kernels:
            if isinstance(kernels, DistributedDataParallel):
                kernels = kernels.module
            kernels.register_optim_state_tracker_fn(record_fn)

    def reset_parameters(self) -> None:
        """Initializes the weights of the tables on TorchRec's kernels.

        RecStore tables do not change.
        """
        # TorchRec's method reads the weights of every table in the configs (torchrec
        # 1.8.0).
        with self.hidden_configs(self.recstore_table_names()):
            super().reset_parameters()

    def _uses_weights(self) -> bool:
        """Returns whether the collection uses the per-sample weights of its batches."""
        raise NotImplementedError

    def _hashed_features(self) -> frozenset[str]:
        if not hasattr(self, "_hashed"):
            self._hashed = hashed_features(
                self.table_configs,
                self.module_sharding_plan,
            )
        return self._hashed

    def make_sharding_kernels(self) -> None:
        """Makes the kernels of each sharding: RecStore's or TorchRec's."""
        self._copies = GivenCopies()
        self._begun = {}
        # Every rank checks the options, also without a shard. The number of shards is
        # known only here.
        opens_stores = False
        for sharding_type, sharding in self.shardings_by_type():
            for table in _recstore_configs(sharding):
                options = options_of_whole_table(table, table.fused_params)
                shard_options(
                    options,
                    row_split(sharding, sharding_type),
                    table.name,
                )
                if options.cold_store is not None or options.servers is not None:
                    opens_stores = True
        if not opens_stores:
            self._append_sharding_kernels()
            return
        # One rank may fail to open a cold store, or to reach a server, that other ranks
        # can open or reach.
        with refused_together(self.ranks_env):
            self._append_sharding_kernels()

    def _append_sharding_kernels(self) -> None:
        for sharding_type, sharding in self.shardings_by_type():
            # Ranks without a table of the sharding have the same module, whose empty
            # result has the right type.
            groups = grouped_configs_of_all_ranks(sharding)
            kernel_names = {group.compute_kernel for group in groups}
            if EmbeddingComputeKernel.CUSTOMIZED_KERNEL in kernel_names:
                kernels = self._sharding_kernels_type(
                    sharding,
                    sharding_type,
                    self.stock_device,
                )
            else:
                kernels = sharding.create_lookup()
            self.sharding_kernels.append(kernels)

    def register_tables(self) -> None:
        """Registers a parameter for each RecStore table, on all ranks."""
        # All ranks must have the same names, but TorchRec registers no parameter on
        # ranks without a shard.
        for name, dim in self.recstore_dims().items():
            table = getattr(self, self._tables_name)[name]
            if not hasattr(table, "weight"):
                table.register_parameter(
                    "weight",
                    placeholder_parameter(name, dim, frozen=self.is_frozen(name)),
                )
            # torch.distributed.checkpoint.state_dict looks for each key of state_dict
            # in the module (torch 2.13).
            table.weight_id = table.weight_rows = None

    def make_state(self, fused_optimizer: CombinedOptimizer) -> CombinedOptimizer:
        """Makes ``recstore_state`` and returns the fused optimizer with its states."""
        states = self._table_states()
        expiry_seconds = []
        for state in states.values():
            expiry = state.options.expiry
            if expiry is not None and expiry.seconds is not None:
                expiry_seconds.append(expiry.seconds)
        if expiry_seconds and self.ranks_env.world_size > 1:
            self._wall_clock = AgreedClock(
                self.ranks_env,
                min(expiry_seconds),
                self.recstore_tables(),
            )
        remote_dims = self.recstore_dims()
        for name in states:
            del remote_dims[name]
        self.recstore_state = ModuleState(
            container=self._tables_name,
            tables=states,
            env=self.ranks_env,
            copies=self._copies,
            remote=remote_dims,
        )
        self._register_state_dict_hook(self.recstore_state.add_rows)
        return self.recstore_state.optimizer_with_states(fused_optimizer)

    def _table_states(self) -> dict[str, RowState]:
        remote = self.remote_table_names()
        shards_by_table: dict[str, list[LocalShard]] = {}
        for name in self.recstore_table_names():
            if name not in remote:
                shards_by_table[name] = []
        for kernel in self.recstore_kernels():
            if kernel.remote_tables:
                continue
            names = kernel.config.table_names()
            for name, shard in zip(names, kernel.shards, strict=True):
                shards_by_table[name].append(shard)
        # These are the configs of all tables, also of tables without a shard on this
        # rank.
        configs: dict[str, ShardedEmbeddingTable] = {}
        for sharding in self.shardings_in_order:
            for config in _recstore_configs(sharding):
                configs[config.name] = config
        states = {}
        dims = self.recstore_dims()
        for name, shards in shards_by_table.items():
            params = configs[name].fused_params
            states[name] = RowState(
                name=name,
                dim=dims[name],
                shards=shards,
                env=self.ranks_env,
                optimizer=optimizer_from_fused_params(params, [name]),
                options=options_of_whole_table(configs[name], params),
                copies=self._copies,
            )
        return states

    def load_rows(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Loads the rows of the RecStore tables, and removes them from ``state_dict``."""
        self.recstore_state.load(state_dict, prefix)


def _recstore_configs(sharding: Sharding) -> Iterator[ShardedEmbeddingTable]:
    """Yields TorchRec's configs of the sharding's RecStore shards on all ranks."""
    for group in grouped_configs_of_all_ranks(sharding):
        for table in group.embedding_tables:
            if table.compute_kernel == EmbeddingComputeKernel.CUSTOMIZED_KERNEL:
                yield table


_Self = TypeVar("_Self", bound="RecStoreCollectionSharder")


class ModuleTypeOfSharder:
    """The property ``module_type`` of a sharder, which its class does not have.

    It is the first attribute that ``DistributedModelParallel`` and the planners read of
    a sharder. For a class in the place of a sharder, they would fail later, with an
    error that names neither.

    Args:
        module_type: The class of the modules that the sharder shards.
    """

    def __init__(self, module_type: type[nn.Module]) -> None:
        self._module_type = module_type
        self.__doc__ = (
            f"The class of the modules that are sharded: {module_type.__name__}."
        )

    def __get__(self, sharder: object, owner: type) -> type[nn.Module]:
        """Returns the class of the modules.

        Raises:
            AttributeError: ``sharder`` is None, so that a class is in the place of a
                sharder. It is this error that ``hasattr`` and ``abc`` expect.
        """
        if sharder is None:
            raise AttributeError(
                f"{owner.__name__} is a class, and sharders must be objects: pass"
                f" sharders=[{owner.__name__}(...)], or"
                " sharders=get_recstore_sharders(...)"
            )
        return self._module_type


class RecStoreCollectionSharder(BaseEmbeddingSharder):  # type: ignore[misc]
    """A mixin for TorchRec's sharders that offers RecStore's kernel."""

    _sharded: ClassVar[type[RecStoreCollection]]
    offers_stock = False
    """Whether the sharder is a copy from :meth:`with_stock_kernels`."""

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        *args: Any,
        optimizer: Optimizer | None = None,
        accumulation_steps: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            with_own_arguments(fused_params, optimizer, accumulation_steps),
            *args,
            **kwargs,
        )

    def __repr__(self) -> str:
        """Returns the arguments that select how the tables are trained."""
        params = dict(self.fused_params or {})
        optimizer = params.pop(OPTIMIZER_KEY, None)
        accumulation_steps = params.pop(ACCUMULATION_KEY, None)
        arguments = []
        if params:
            arguments.append(f"fused_params={params!r}")
        if optimizer is not None:
            arguments.append(f"optimizer={optimizer!r}")
        if accumulation_steps is not None:
            arguments.append(f"accumulation_steps={accumulation_steps!r}")
        return f"{type(self).__name__}({', '.join(arguments)})"

    def with_stock_kernels(self: _Self) -> _Self:
        """Returns a copy that also offers TorchRec's kernels.

        It is for planners that choose the kernel by constraint.
        """
        offering = copy.copy(self)
        offering.offers_stock = True
        return offering

    def shard(
        self,
        module: nn.Module,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """Returns the sharded module. The arguments are those of TorchRec's sharders.

        Raises:
            ValueError: The plan or ``fused_params`` have a setting that RecStore does
                not support for a RecStore table, or they select different optimizers
                for it.
            NotImplementedError: The plan has RecStore tables, and the model is wrapped
                in ``DMPCollection``.
        """
        kernels = {sharding.compute_kernel for sharding in params.values()}
        stock_params, plan = deal_out(
            self,
            params,
            env,
            super().shardable_parameters(module),
        )
        if RECSTORE_KERNEL in kernels and module.device != torch.device("meta"):
            warn_user(
                "RecStore tables do not take the weights of the module that is sharded,"
                " which is not on the meta device: make it with device='meta'. Use"
                " TableOptions(initializer=...) for random initial rows, or"
                " load_dense_weights for given rows"
            )
        sharded: Any = self._sharded(
            module,
            plan,
            env,
            fused_params=stock_params,
            device=device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
            **self.own_arguments(),
        )
        sharded.source = (module, self)
        return sharded

    def own_arguments(self) -> dict[str, Any]:
        """Returns the arguments that only the sharded module of this sharder has."""
        raise NotImplementedError

    def shardable_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Returns the parameters of the tables, by name.

        Their ``numel`` counts the resident rows, for the planner.

        Raises:
            ValueError: The rows of a table have no columns.
        """
        for config in configs_of(module):
            check_dim(config)
        parameters: dict[str, nn.Parameter] = super().shardable_parameters(module)
        if self.offers_stock:
            # The size depends on the kernel, and the planner's own estimator computes
            # it.
            return parameters
        return {
            name: ResidentParameter.of(parameter, name=name)
            for name, parameter in parameters.items()
        }

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Returns the sharding types that RecStore supports.

        If TorchRec's kernels are offered, those of TorchRec's sharder follow.
        """
        supported = list(self._sharded._supported)
        if not self.offers_stock:
            # RecStore's enumerator asks a copy that offers TorchRec's kernels, too.
            warn_of_stock_enumerator(compute_device_type)
            return supported
        stock = super().sharding_types(compute_device_type)
        return list(dict.fromkeys([*supported, *stock]))

    def compute_kernels(
        self,
        sharding_type: str,
        compute_device_type: str,
    ) -> list[str]:
        """Returns the kernels that are offered for a sharding type.

        RecStore's kernel comes first, if it supports the type.
        """
        kernels = []
        if sharding_type in self._sharded._supported:
            kernels.append(RECSTORE_KERNEL)
        if self.offers_stock:
            stock_types = super().sharding_types(compute_device_type)
            if sharding_type in stock_types:
                kernels += super().compute_kernels(sharding_type, compute_device_type)
        return kernels

    @property
    def sharded_module_type(self) -> type[RecStoreCollection]:
        """The class of the sharded module."""
        return self._sharded
