"""The compute kernels and the fused optimizers that TorchRec sees for RecStore tables.

Tests: tests/sharders/test_embeddingbag.py, tests/sharders/test_optimizers.py.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_types import (
    GroupedEmbeddingConfig,
    ShardedEmbeddingTable,
)
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import (
    EmbeddingTableConfig,
    PoolingMode,
    pooling_type_to_pooling_mode,
)
from torchrec.optim.fused import (
    EmptyFusedOptimizer,
    FusedOptimizer,
    FusedOptimizerModule,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_recstore.kernels import (
    BlockRouting,
    PooledGroup,
    RemoteTable,
    SequenceGroup,
)
from torchrec_recstore.kernels.device_copies import (
    CopyTarget,
    to_device,
    to_host,
    weights_to_host,
)
from torchrec_recstore.kernels.device_placement import put_asked_rows_on_device
from torchrec_recstore.optim import Optimizer
from torchrec_recstore.options import TableOptions, shard_options
from torchrec_recstore.plugins import plugin
from torchrec_recstore.sharders.fused_params import (
    accumulation_steps,
    carried_options,
    optimizer_from_fused_params,
    output_dtype,
    state_dtype,
    stochastic_rounding,
    table_options,
)
from torchrec_recstore.sharders.layout import LocalShard
from torchrec_recstore.store import Table
from torchrec_recstore.table_configs import ROW_DTYPES, check_config, initializer_of
from torchrec_recstore.table_parameter import TableParameter
from torchrec_recstore.torchrec_seams.models import (
    Sharding,
    mark_as_optimized,
    process_group,
    split_in_node,
)
from torchrec_recstore.utils import ceil_div

# The number of batches that are kept, as many as the groups keep of prefetched
# batches.
_AHEAD = 4

# The sharding types that split rows over the ranks of one node, and all that split
# rows.
IN_NODE = frozenset({ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value})
ROW_SPLIT = IN_NODE | {ShardingType.ROW_WISE.value}

# The largest num_embeddings with a sharding of IN_NODE, whose block sizes are int32
# (torchrec 1.8.0). It does not limit the ids of a RecStore table, but only determines
# the borders between blocks of ids.
_MOST_ROWS_IN_NODE = 2**31 - 1


def row_split(sharding: Sharding, sharding_type: str) -> tuple[int, int] | None:
    """Returns (number of ranks, this rank) of the ranks that share each table's rows.

    Returns None if rows are not split.
    """
    if sharding_type == ShardingType.ROW_WISE.value:
        group = process_group(sharding)
        return dist.get_world_size(group), dist.get_rank(group)
    if sharding_type in IN_NODE:
        return split_in_node(sharding)
    return None


def _routing_of(
    table: ShardedEmbeddingTable,
    split: tuple[int, int] | None,
) -> BlockRouting | None:
    """Returns the mapping by which the input distribution changed the shard's ids.

    Returns None if the ids are unchanged.
    """
    if split is None:
        return None
    ranks, rank = split
    # The block of RwSparseFeaturesDist and TwRwSparseFeaturesDist, torchrec 1.8.0.
    # math.ceil would round large numbers to float64.
    ceil_of_quotient = ceil_div(table.num_embeddings, ranks)
    is_hashed = table_options(table.fused_params).routing == "hash"
    return BlockRouting(ceil_of_quotient, ranks, rank, mixed=is_hashed)


def prepare_table(
    config: EmbeddingTableConfig,
    fused_params: Mapping[str, Any] | None,
    sharding_type: str,
) -> None:
    """Lowers ``num_embeddings`` to what TorchRec supports.

    Raises ValueError if RecStore does not support the table.
    """
    check_config(config)
    optimizer_from_fused_params(fused_params, [config.name])
    stochastic_rounding(
        fused_params,
        [config.name],
        ROW_DTYPES[config.data_type],
    )
    state_dtype(fused_params, [config.name])
    output_dtype(fused_params, [config.name])
    if table_options(fused_params).servers is not None:
        _check_remote(config, fused_params)
    initializer_of(config, table_options(fused_params))
    if sharding_type in IN_NODE:
        config.num_embeddings = min(config.num_embeddings, _MOST_ROWS_IN_NODE)


def _check_remote(
    config: EmbeddingTableConfig,
    fused_params: Mapping[str, Any] | None,
) -> None:
    refusal = f"RecStore table {config.name!r} is on servers, which do not support"
    dtype = ROW_DTYPES[config.data_type]
    if state_dtype(fused_params, [config.name]) is not torch.float32:
        raise ValueError(
            f"{refusal} optimizer state in float16: leave it out of fused_params"
        )
    rounds = stochastic_rounding(fused_params, [config.name], dtype)
    if rounds and dtype is not torch.int8:
        raise ValueError(
            f"{refusal} stochastic_rounding of {dtype} rows: leave it out of"
            " fused_params"
        )
    steps = accumulation_steps(fused_params)
    if steps > 1:
        raise ValueError(f"{refusal} accumulation_steps={steps}: leave it out")


def options_of_whole_table(
    config: EmbeddingTableConfig,
    fused_params: Mapping[str, Any] | None,
) -> TableOptions:
    """Returns the options of the whole table.

    If they have no initializer, it is that of the table's config.
    """
    options = table_options(fused_params)
    return replace(options, initializer=initializer_of(config, options))


def _remote_table(config: ShardedEmbeddingTable, optimizer: Optimizer) -> RemoteTable:
    """Returns a table on servers, and creates it if it does not exist.

    Raises the errors of the client.
    """
    options = options_of_whole_table(config, config.fused_params)
    servers = options.servers
    assert servers is not None
    client = plugin("client")(servers)
    # Other models may train the table that this one only reads.
    server_options = replace(
        options,
        servers=None,
        frozen=False,
        device_rows=None,
    )
    table: RemoteTable = client.table(
        carried_options(config.fused_params).row_name or config.name,
        (config.num_embeddings, config.embedding_dim),
        ROW_DTYPES[config.data_type],
        optimizer,
        server_options,
        servers.staleness,
    )
    return table


def _make_shard(
    config: ShardedEmbeddingTable,
    optimizer: Optimizer,
    split: tuple[int, int] | None,
    rank: int,
) -> LocalShard:
    params = config.fused_params
    dtype = ROW_DTYPES[config.data_type]
    routing = _routing_of(config, split)
    whole_table = options_of_whole_table(config, params)
    table = Table(
        config.embedding_dim,
        dtype=dtype,
        optimizer=optimizer,
        options=shard_options(whole_table, split, config.name),
        name=carried_options(params).row_name or config.name,
        columns=_columns(config),
        shard=rank,
        owned=None if routing is None else routing.owned,
        stochastic_rounding=stochastic_rounding(params, [config.name], dtype),
        state_dtype=state_dtype(params, [config.name]),
    )
    return LocalShard(table, routing)


def _columns(config: ShardedEmbeddingTable) -> range | None:
    if config.local_cols == config.embedding_dim:
        return None
    if config.local_metadata is None:
        raise ValueError(
            f"RecStore table {config.name!r}: the plan has no sharding_spec for its"
            " column shard"
        )
    first = config.local_metadata.shard_offsets[1]
    return range(first, first + config.local_cols)


def _padded_offsets(offsets: Tensor, bags: Sequence[int]) -> Tensor:
    """Returns offsets in which all features have the same number of bags.

    They are (features * max(bags) + 1,), and the bags that are added are empty.
    """
    counts = torch.tensor(bags)
    first_bags = counts.cumsum(0) - counts
    # A bag after a feature's last one begins where that one ends, so that it is empty.
    numbers = torch.arange(max(bags))
    bags_in_feature = torch.minimum(numbers[None], counts[:, None])
    positions = first_bags[:, None] + bags_in_feature
    end = counts.sum()[None]
    all_positions = torch.cat([positions.view(-1), end])
    return offsets[all_positions]


def _rank_major(
    pooled: Tensor,
    bags: Sequence[Sequence[int]],
    columns: Sequence[int],
) -> Tensor:
    """Returns pooled rows in the order that variable batch sizes need.

    It is the one of TorchRec's output distribution (torchrec 1.8.0).

    ``bags`` are those of each feature from each rank; ``columns`` are those of each
    feature.
    """
    blocks = torch.split(pooled, list(columns), dim=1)
    parts_by_feature = []
    for block, from_ranks in zip(blocks, bags, strict=True):
        rows = block[: sum(from_ranks)]
        parts_by_feature.append(torch.split(rows, list(from_ranks)))
    rank_major = []
    for parts_of_rank in zip(*parts_by_feature, strict=True):
        rank_major += [part.reshape(-1) for part in parts_of_rank]
    return torch.cat(rank_major)


class _ShardedParameter(TableParameter):
    """A parameter whose ``requires_grad`` cannot change.

    A change would have no effect on the rows, because the plan freezes them.

    ``frozen`` is that of the table's options.
    """

    frozen = False

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        if requires_grad is self.frozen:
            actual = "frozen" if self.frozen else "trained"
            requested = "trained" if self.frozen else "frozen"
            raise RuntimeError(
                f"RecStore table {self.table!r} is {actual}, and a sharded table cannot"
                f" become {requested}: set TableOptions(frozen={not self.frozen}) in its"
                f" constraint, or requires_grad_({requires_grad}) of its weight before"
                " it is sharded, and load a checkpoint into the new model"
            )
        return self

    requires_grad = property(lambda self: not self.frozen, requires_grad_)  # type: ignore[arg-type]


def placeholder_parameter(
    name: str,
    dim: int,
    *,
    frozen: bool = False,
) -> nn.Parameter:
    """Returns the empty parameter, (0, dim), of a table for TorchRec."""
    parameter = _ShardedParameter(torch.empty(0, dim), table=name)
    parameter.frozen = frozen
    # Dense optimizers that are built with in_backward_optimizer_filter then leave it
    # out (torchrec 1.8.0).
    mark_as_optimized(parameter, EmptyFusedOptimizer())
    return parameter


class BackwardOptimizer(FusedOptimizer):  # type: ignore[misc]
    """A fused optimizer whose calls do nothing, because backward has updated the rows.

    A kernel has one, whose parameter group has the learning rate of its next backward
    pass. A module has one with the states of its RecStore tables, and with one
    parameter group for each optimizer, which the kernels share.
    """

    def learning_rate(self) -> float:
        """Returns the current learning rate of a kernel.

        Schedulers and warm-up may have changed it.
        """
        return float(self.param_groups[0]["lr"])

    def step(self, closure: Any = None) -> None:
        """Does nothing."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Does nothing."""

    def set_optimizer_step(self, step: int) -> None:
        """Sets the number of updates of the module's tables.

        Adam and LAMB count the updates, as FBGEMM's kernels do.
        """
        for state in self.state.values():
            for shard in state["rows"].shards:
                shard.table.set_optimizer_steps(step)


class ParameterOptimizer(FusedOptimizer):  # type: ignore[misc]
    """The optimizer of one table's parameter.

    Its ``step`` sets the learning rate of the table's kernel.
    """

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        kernel: BackwardOptimizer,
    ) -> None:
        group = {"params": [parameter], "lr": kernel.learning_rate()}
        super().__init__({f"{name}.weight": parameter}, {}, [group])
        self._kernel_optimizer = kernel

    def step(self, closure: Any = None) -> None:
        """Sets the learning rate of the next backward pass.

        The last backward pass has updated the rows already.
        """
        self._kernel_optimizer.param_groups[0]["lr"] = self.param_groups[0]["lr"]

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Sets the learning rate of the next backward pass.

        There are no gradient tensors.
        """
        self.step()


class HostBatch(NamedTuple):
    """A batch on the host."""

    ids: Tensor  # (N,) int64
    # (F * B + 1,) int64: the position of the first id of each bag, and N. Empty without
    # pooling.
    offsets: Tensor
    weights: Tensor | None  # (N,) float32


class HostIds:
    """Copies each batch to the host once, also if the batch was prefetched before.

    The weights of a prefetched batch, and weights that require a gradient, are copied
    in the forward, because the layers that make or change them run there. Sequences
    need neither offsets nor weights.
    """

    def __init__(self, with_offsets: bool, with_weights: bool) -> None:
        self._with_offsets = with_offsets
        self._with_weights = with_weights
        self._ahead: deque[tuple[weakref.ref[Tensor], HostBatch]] = deque(maxlen=_AHEAD)

    def prefetch(
        self,
        features: KeyedJaggedTensor,
        batch: Tensor | None = None,
    ) -> Tensor:
        """Returns the ids of a group's features, (N,) int64, and keeps the copy.

        :meth:`take` returns the copy.
        """
        # The ids of the whole batch identify the copy, because TorchRec splits the
        # features anew in each forward.
        values: Tensor = features.values()
        if values.is_cpu:
            return values
        host_batch = self._copied(features, None)
        whole_batch = values if batch is None else batch
        self._ahead.append((weakref.ref(whole_batch), host_batch))
        return host_batch.ids

    def take(
        self,
        features: KeyedJaggedTensor,
        batch: Tensor | None = None,
    ) -> HostBatch:
        """Returns the features of a group of tables on the host.

        See :meth:`prefetch` for ``batch``.
        """
        values: Tensor = features.values()
        weights = features.weights_or_none() if self._with_weights else None
        if values.is_cpu:
            offsets = features.offsets() if self._with_offsets else values[:0]
            float_weights = None if weights is None else weights.float()
            return HostBatch(values, offsets, float_weights)
        host_batch = self._prefetched(values if batch is None else batch)
        if host_batch is None:
            trains_weights = (
                weights is not None
                and weights.requires_grad
                and torch.is_grad_enabled()
            )
            if not trains_weights:
                return self._copied(features, weights)
            host_batch = self._copied(features, None)
        if weights is None:
            return host_batch
        host_weights = weights_to_host(weights.float())
        return HostBatch(host_batch.ids, host_batch.offsets, host_weights)

    def _prefetched(self, whole_batch: Tensor) -> HostBatch | None:
        """Removes the copy of a prefetched batch and returns it, if there is one."""
        for place, (reference, host_batch) in enumerate(self._ahead):
            if reference() is whole_batch:
                del self._ahead[place]
                return host_batch
        return None

    def _copied(self, features: KeyedJaggedTensor, weights: Tensor | None) -> HostBatch:
        tensors = [features.values()]
        if self._with_offsets:
            tensors.append(features.offsets())
        if weights is not None:
            tensors.append(weights.float())
        copies = to_host(tensors)
        ids = copies[0]
        offsets = copies[1] if self._with_offsets else ids[:0]
        return HostBatch(ids, offsets, None if weights is None else copies[-1])


class RecStoreKernel(BaseEmbedding, FusedOptimizerModule):  # type: ignore[misc]
    """The common base class of pooled and sequence kernels for a group of tables.

    ``split`` is the result of :func:`row_split`. ``shard`` is this rank; it keeps the
    shards apart in a cold store.
    """

    _group: PooledGroup | SequenceGroup
    _host_ids: HostIds

    batch: Tensor | None = None
    """The ids of the whole batch that the features of the next forward are a part of,
    on an accelerator.
    """

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        split: tuple[int, int] | None,
        shard: int,
    ) -> None:
        super().__init__()
        self._config = config
        params = config.fused_params
        optimizer = optimizer_from_fused_params(params, config.table_names())
        self._optimizer = optimizer
        self._output_dtype = output_dtype(params, config.table_names())
        self.frozen = table_options(params).frozen
        """Whether the tables of the group, which have this option in common, are only
        read.
        """
        self.shards: list[LocalShard] = []
        """The group's shards on this rank, several of a table that is split by columns.

        Empty for remote tables.
        """
        self.remote_tables: list[RemoteTable] = []
        """The group's tables if their rows are on servers."""
        # All tables of the group have the same servers.
        for table in config.embedding_tables:
            if table_options(table.fused_params).servers is not None:
                self.remote_tables.append(_remote_table(table, optimizer))
            else:
                self.shards.append(_make_shard(table, optimizer, split, shard))
        self._placeholders: dict[str, nn.Parameter] = {}
        for table in config.embedding_tables:
            if table.name not in self._placeholders:
                self._placeholders[table.name] = placeholder_parameter(
                    table.name,
                    table.embedding_dim,
                    frozen=self.frozen,
                )
        group = {"params": list(self._placeholders.values()), "lr": optimizer.lr}
        self._optim = BackwardOptimizer(dict(self.named_parameters()), {}, [group])
        for name, parameter in self._placeholders.items():
            of_parameter = ParameterOptimizer(name, parameter, self._optim)
            mark_as_optimized(parameter, of_parameter)

    def extra_repr(self) -> str:
        """Returns the tables of the group, their dims, and their optimizer."""
        tables = ", ".join(
            f"{table.name}: {table.embedding_dim}"
            for table in self._config.embedding_tables
        )
        return f"tables={{{tables}}}, optimizer={self._optimizer!r}"

    @property
    def config(self) -> GroupedEmbeddingConfig:
        """TorchRec's config of the group."""
        return self._config

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        """The fused optimizer of the group."""
        return self._optim

    @property
    def tables(self) -> list[Table]:
        """The tables of :attr:`shards`."""
        return [shard.table for shard in self.shards]

    def wait_for_updates(self) -> None:
        """Waits for the updates that were sent to servers, or raises the error of one."""
        self._group.wait_for_updates()

    def prefetch(
        self,
        features: KeyedJaggedTensor,
        batch: Tensor | None = None,
    ) -> None:
        """Prepares the rows of a batch before its training forward.

        Any thread may call this method.
        """
        ids = self._host_ids.prefetch(features, batch)
        # The rows of frozen tables in this process are read as they are. Rows on
        # servers are requested ahead.
        if self.remote_tables or not self.frozen:
            self._group.prefetch(ids, self._counts(features))

    def _group_arguments(self) -> dict[str, Any]:
        steps = accumulation_steps(self._config.fused_params)
        return {
            "routings": [shard.routing for shard in self.shards],
            "accumulation_steps": steps,
        }

    def _counts(self, features: KeyedJaggedTensor) -> list[int]:
        """Returns the numbers of ids that the group's ``prefetch`` takes."""
        return features.length_per_key()  # type: ignore[no-any-return]

    def _target(self, features: KeyedJaggedTensor) -> CopyTarget | None:
        """Returns where the rows of a batch go, and None if they stay on the host."""
        values: Tensor = features.values()
        return None if values.is_cpu else CopyTarget(values.device, self._output_dtype)

    def _as_output(self, rows: Tensor, target: CopyTarget | None) -> Tensor:
        """Returns rows in the dtype of outputs.

        They have it already unless ``target`` is None.
        """
        if target is not None or self._output_dtype is torch.float32:
            return rows
        return rows.to(self._output_dtype)

    def named_parameters_by_table(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the name and the empty parameter of each table, once."""
        yield from self._placeholders.items()

    def named_parameters(
        self,
        prefix: str = "",
        recurse: bool = True,
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields ``<table>.weight`` and the empty parameter of each table."""
        for name, parameter in self._placeholders.items():
            key = f"{prefix}.{name}.weight" if prefix else f"{name}.weight"
            yield key, parameter

    def state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Returns ``destination`` unchanged.

        The sharded module, not the kernel, adds rows to ``state_dict``.
        """
        return OrderedDict() if destination is None else destination

    def flush(self) -> None:
        """Does nothing, because nothing is cached.

        The forward has ended when it returns, and the rows are up to date.
        """

    purge = flush
    # TorchRec looks for the following two methods in each step. To find none takes
    # longer than to call them.
    wait_for_forward = get_rs_awaitable = flush


class RecStorePooledKernel(RecStoreKernel):
    """A kernel for pooled lookups.

    It returns sums for mean pooling if ``sharding_type`` splits rows. ``device`` is
    that of the model; None is the CPU.
    """

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        sharding_type: ShardingType | None = None,
        split: tuple[int, int] | None = None,
        shard: int = 0,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(config, split, shard)
        self._group: PooledGroup
        self._host_ids = HostIds(with_offsets=True, with_weights=config.is_weighted)
        feature_tables: list[int] = []
        for number, table in enumerate(config.embedding_tables):
            feature_tables += [number] * table.num_features()
        mode = pooling_type_to_pooling_mode(config.pooling, sharding_type)
        pooling: Literal["sum", "mean"] = "mean" if mode == PoolingMode.MEAN else "sum"
        if self.remote_tables:
            self._group = self.remote_tables[0].client.pooled_group(
                self.remote_tables,
                feature_tables,
                pooling,
            )
        else:
            self._group = PooledGroup(
                self.tables,
                feature_tables,
                pooling,
                **self._group_arguments(),
            )
            put_asked_rows_on_device(self._group, self.tables, device)
        self._group.learning_rate = self._optim.learning_rate
        self._group.frozen = self.frozen

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Returns the pooled rows of a batch, (B, sum of columns over features).

        The features are ``config.feature_names()``.

        If the batch size varies by feature, the result has one dimension: the bags, by
        rank and then by feature.
        """
        ids, offsets, weights = self._host_ids.take(features, self.batch)
        target = self._target(features)
        if not features.variable_stride_per_key():
            rows = self._group.forward(
                ids,
                offsets,
                weights,
                train=self.training,
                to=target,
            )
            return self._as_output(rows, target)
        bags = features.stride_per_key_per_rank()
        offsets = _padded_offsets(offsets, [sum(from_ranks) for from_ranks in bags])
        # The bags that are added are copied to the device only if the rows are there.
        to = None if self._group.device_rows is None else target
        rows = self._group.forward(
            ids,
            offsets,
            weights,
            train=self.training,
            to=to,
        )
        rows = _rank_major(rows, bags, self._config.embedding_dims())
        if target is not to:
            assert target is not None
            rows = to_device(rows, target)
        return self._as_output(rows, target)


class RecStoreSequenceKernel(RecStoreKernel):
    """A kernel for lookups of the row of each id.

    See :class:`RecStorePooledKernel` for ``device``.
    """

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        split: tuple[int, int] | None = None,
        shard: int = 0,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(config, split, shard)
        self._group: SequenceGroup
        self._host_ids = HostIds(with_offsets=False, with_weights=False)
        if self.remote_tables:
            self._group = self.remote_tables[0].client.sequence_group(
                self.remote_tables
            )
        else:
            self._group = SequenceGroup(self.tables, **self._group_arguments())
            put_asked_rows_on_device(self._group, self.tables, device)
        self._group.learning_rate = self._optim.learning_rate
        self._group.frozen = self.frozen

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Returns the columns of each id of a batch, in one dimension.

        The ids are those of ``config.feature_names()``, in that order.
        """
        ids, _, _ = self._host_ids.take(features, self.batch)
        target = self._target(features)
        rows = self._group.forward(
            ids,
            self._counts(features),
            train=self.training,
            to=target,
        )
        return self._as_output(rows, target)

    def _counts(self, features: KeyedJaggedTensor) -> list[int]:
        lengths = features.length_per_key()
        counts = []
        first = 0
        for table in self._config.embedding_tables:
            end = first + table.num_features()
            counts.append(sum(lengths[first:end]))
            first = end
        return counts
