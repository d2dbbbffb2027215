"""TorchRec's compute kernels over RecStore tables."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_sharding import EmbeddingSharding
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig, ShardedEmbeddingTable
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import EmbeddingTableConfig, PoolingMode, pooling_type_to_pooling_mode
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizer, FusedOptimizerModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_recstore.kernels import BlockRouting, PooledKernel, SequenceKernel
from torchrec_recstore.optim import Optimizer
from torchrec_recstore.options import TableOptions, shard_options
from torchrec_recstore.sharders.fused_params import (
    accumulation_steps,
    carried_row_name,
    optimizer_from_fused_params,
    output_dtype,
    stochastic_rounding,
    table_options,
)
from torchrec_recstore.store import Table
from torchrec_recstore.table_configs import ROW_DTYPES, check_config, initializer_of
from torchrec_recstore.table_parameter import TableParameter
from torchrec_recstore.torchrec_seams import mark_as_optimized, process_group, split_in_node

ROW_SPLIT = frozenset({ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value})
"""The sharding types that split rows."""

IN_NODE = frozenset({ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value})
"""Those of them that split rows over the ranks of one node."""

MOST_ROWS_IN_NODE = 2**31 - 1
"""``TwRwSparseFeaturesDist`` keeps block sizes in int32 (torchrec 1.8.0). A RecStore table's ``num_embeddings`` is
but a hint and moves only the border between blocks, so that a larger one is lowered to this."""


def row_split(sharding: EmbeddingSharding[Any, Any, Any, Any], sharding_type: str) -> tuple[int, int] | None:
    """(ranks, this rank) among which the sharding splits each table's rows; None where it does not."""
    if sharding_type == ShardingType.ROW_WISE.value:
        return dist.get_world_size(process_group(sharding)), dist.get_rank(process_group(sharding))
    if sharding_type in IN_NODE:
        return split_in_node(sharding)
    return None


def routing(table: ShardedEmbeddingTable, split: tuple[int, int] | None) -> BlockRouting | None:
    """What the shard has to undo on the ids that it is given; None where they are raw.

    Args:
        table: TorchRec's description of the shard.
        split: of :func:`row_split`.
    """
    if split is None:
        return None
    ranks, rank = split
    # The block of RwSparseFeaturesDist and TwRwSparseFeaturesDist, torchrec 1.8.0: ceil(num_embeddings / ranks).
    return BlockRouting(
        block_rows=-(-table.num_embeddings // ranks),
        world_size=ranks,
        rank=rank,
        mixed=table_options(table.fused_params).routing == "hash",
    )


def check_table(config: EmbeddingTableConfig, fused_params: Mapping[str, Any] | None) -> None:
    """Refuses what RecStore does not support, on ranks without a shard of the table as well.

    Every rank calls it for every table, so that none is left waiting for another that has failed.

    Raises:
        ValueError: data type, optimizer, initial range or virtual table; the message names the table.
    """
    check_config(config)
    optimizer_from_fused_params(fused_params, [config.name])
    stochastic_rounding(fused_params, [config.name])
    output_dtype(fused_params, [config.name])
    initializer_of(config, table_options(fused_params))


def whole_options(config: EmbeddingTableConfig, fused_params: Mapping[str, Any] | None) -> TableOptions:
    """A table's options over all its shards, with the initializer that its config stands for."""
    options = table_options(fused_params)
    return replace(options, initializer=initializer_of(config, options))


def make_table(
    config: ShardedEmbeddingTable,
    optimizer: Optimizer,
    split: tuple[int, int] | None,
    shard: int,
    routing: BlockRouting | None,
) -> Table:
    """The store of one shard: all columns of the table, or those of a column-wise shard.

    Args:
        config: of a table that :func:`check_table` has passed.
        optimizer: of its group.
        split: as for :func:`torchrec_recstore.options.shard_options`.
        shard: the rank, by which shards of one cold store are kept apart.
        routing: which ids are the shard's; None for all.
    """
    return Table(
        config.embedding_dim,
        dtype=ROW_DTYPES[config.data_type],
        optimizer=optimizer,
        options=shard_options(whole_options(config, config.fused_params), split, config.name),
        name=carried_row_name(config.fused_params) or config.name,
        columns=_columns(config),
        shard=shard,
        owned=None if routing is None else routing.owned,
        stochastic_rounding=stochastic_rounding(config.fused_params, [config.name]),
    )


def _columns(config: ShardedEmbeddingTable) -> range | None:
    if config.local_cols == config.embedding_dim:
        return None
    if config.local_metadata is None:
        raise ValueError(f"RecStore table {config.name!r}: the plan has no sharding_spec for its column shard")
    first = config.local_metadata.shard_offsets[1]
    return range(first, first + config.local_cols)


def padded_offsets(offsets: Tensor, bags: Sequence[int]) -> Tensor:
    """Offsets in which every feature has as many bags as the one with the most: empty ones at its end.

    Args:
        offsets: (sum of bags + 1,) of all features' bags, feature by feature.
        bags: of each feature.

    Returns:
        (features * max(bags) + 1,), of the dtype of ``offsets``.
    """
    counts = torch.tensor(bags)
    first = counts.cumsum(0) - counts
    within = torch.minimum(torch.arange(max(bags))[None], counts[:, None])
    taken = (first[:, None] + within).view(-1)
    return offsets[torch.cat([taken, counts.sum()[None]])]


def rank_major(pooled: Tensor, bags: Sequence[Sequence[int]], columns: Sequence[int]) -> Tensor:
    """The order in which TorchRec's output distribution expects bags of varying batches (torchrec 1.8.0).

    Args:
        pooled: (at least the most bags of a feature, sum of columns).
        bags: of each feature from each rank.
        columns: of each feature.

    Returns:
        One dimension: rank by rank, feature by feature, its bags.
    """
    by_feature = [
        torch.split(block[: sum(from_ranks)], list(from_ranks))
        for block, from_ranks in zip(torch.split(pooled, list(columns), dim=1), bags, strict=True)
    ]
    return torch.cat([part.reshape(-1) for rank in zip(*by_feature, strict=True) for part in rank])


def placeholder_parameter(name: str, dim: int) -> nn.Parameter:
    """The empty parameter, (0, dim), that stands for a table in TorchRec's bookkeeping.

    Its mark keeps it out of dense optimizers built over ``in_backward_optimizer_filter`` (torchrec 1.8.0).
    """
    parameter = TableParameter(torch.empty(0, dim), table=name)
    mark_as_optimized(parameter, EmptyFusedOptimizer())
    return parameter


class RecStoreFusedOptimizer(FusedOptimizer):  # type: ignore[misc]
    """The handle on a kernel's optimizer: rows are updated in backward, with the learning rate that stands here then.

    Args:
        params: parameters by ``<table>.weight``.
        optimizer: what backward applies.
    """

    def __init__(self, params: dict[str, nn.Parameter], optimizer: Optimizer) -> None:
        super().__init__(params, {}, [{"params": list(params.values()), "lr": optimizer.lr}])

    def learning_rate(self) -> float:
        """The current learning rate, as schedulers and warm-up leave it."""
        return float(self.param_groups[0]["lr"])

    def step(self, closure: Any = None) -> None:
        """Nothing: backward has updated the rows."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Nothing: there are no gradient tensors."""


class ParameterOptimizer(FusedOptimizer):  # type: ignore[misc]
    """The optimizer that a table's parameter names; as TorchRec's, it sets the learning rate of the table's group.

    Args:
        name: the table's.
        parameter: the table's.
        group: the handle on the optimizer of the table's kernel.
    """

    def __init__(self, name: str, parameter: nn.Parameter, group: RecStoreFusedOptimizer) -> None:
        super().__init__({f"{name}.weight": parameter}, {}, [{"params": [parameter], "lr": group.learning_rate()}])
        self._group = group

    def step(self, closure: Any = None) -> None:
        """Sets the learning rate of the next backward; this one's has updated the rows."""
        self._group.param_groups[0]["lr"] = self.param_groups[0]["lr"]

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Sets the learning rate of the next backward; there are no gradient tensors."""
        self.step()


class RecStoreKernel(BaseEmbedding, FusedOptimizerModule):  # type: ignore[misc]
    """What pooled and sequence kernels have in common: a :class:`Table` a shard, one fused optimizer, placeholders.

    Args:
        config: TorchRec's group: tables that share pooling and optimizer. Options may differ from table to table.
        split: (ranks, this rank) among which TorchRec splits each table's rows; None where it does not.
        shard: this rank, by which the shards of a table are kept apart in a cold store.

    Raises:
        ValueError: an optimizer that RecStore does not support; the message names the tables.
    """

    def __init__(self, config: GroupedEmbeddingConfig, split: tuple[int, int] | None, shard: int) -> None:
        super().__init__()
        self._config = config
        optimizer = optimizer_from_fused_params(config.fused_params, config.table_names())
        self._output_dtype = output_dtype(config.fused_params, config.table_names())
        self._routings = [routing(table, split) for table in config.embedding_tables]
        self._tables = [
            make_table(table, optimizer, split, shard, routing)
            for table, routing in zip(config.embedding_tables, self._routings, strict=True)
        ]
        self._placeholders = {
            table.name: placeholder_parameter(table.name, table.embedding_dim) for table in config.embedding_tables
        }
        self._optim = RecStoreFusedOptimizer(
            {f"{name}.weight": parameter for name, parameter in self._placeholders.items()}, optimizer
        )
        for name, parameter in self._placeholders.items():
            mark_as_optimized(parameter, ParameterOptimizer(name, parameter, self._optim))

    @property
    def config(self) -> GroupedEmbeddingConfig:
        """TorchRec's description of the group."""
        return self._config

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        """The handle on the group's optimizer."""
        return self._optim

    @property
    def tables(self) -> list[Table]:
        """The group's shards on this rank; a table split by columns may appear several times."""
        return self._tables

    @property
    def routings(self) -> list[BlockRouting | None]:
        """How the ids of each of ``tables`` were split over ranks."""
        return self._routings

    def prefetch(self, features: KeyedJaggedTensor) -> None:
        """Prepares a batch's rows ahead of its training forward, in whatever thread calls.

        Missing ones are made, save those of tables with ``max_rows`` or ``admission``, and cold ones are read.

        Args:
            features: int64 ids of ``config.feature_names()``, in that order.
        """
        raise NotImplementedError

    def named_parameters_by_table(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each table's name and its empty parameter, once."""
        yield from self._placeholders.items()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """``<table>.weight`` and the empty parameter that stands for the table."""
        for name, parameter in self._placeholders.items():
            yield f"{prefix}.{name}.weight" if prefix else f"{name}.weight", parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """None."""
        yield from ()

    def state_dict(
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Nothing: rows are saved by checkpoints, not by ``state_dict`` of the kernel."""
        return OrderedDict() if destination is None else destination

    def flush(self) -> None:
        """Nothing: rows are always up to date."""

    def purge(self) -> None:
        """Nothing: there is no cache."""


class RecStorePooledKernel(RecStoreKernel):
    """Pooled lookups of a group of tables; backward updates the tables in place.

    Args:
        config: TorchRec's group.
        sharding_type: row-wise types pool the mean as a sum, which the collection divides later.
        split, shard: as for :class:`RecStoreKernel`.

    Raises:
        ValueError: an optimizer that RecStore does not support; the message names the tables.
    """

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        sharding_type: ShardingType | None = None,
        split: tuple[int, int] | None = None,
        shard: int = 0,
    ) -> None:
        super().__init__(config, split, shard)
        feature_tables = [i for i, table in enumerate(config.embedding_tables) for _ in range(table.num_features())]
        mean = pooling_type_to_pooling_mode(config.pooling, sharding_type) == PoolingMode.MEAN
        self._kernel = PooledKernel(
            self._tables,
            feature_tables,
            "mean" if mean else "sum",
            routings=self._routings,
            accumulation_steps=accumulation_steps(config.fused_params),
        )
        self._kernel.learning_rate = self._optim.learning_rate

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Pooled rows of the features of this group.

        Args:
            features: int64 ids of ``config.feature_names()``, in that order.

        Returns:
            (B, sum of columns over features), of ``output_dtype`` in the fused_params; for a batch whose size varies by
            feature one dimension: rank by rank, feature by feature.
        """
        weights = features.weights_or_none() if self._config.is_weighted else None
        weights = weights if weights is None else weights.float()
        if not features.variable_stride_per_key():
            return self._pooled(features.values(), features.offsets(), weights)
        bags = features.stride_per_key_per_rank()
        offsets = padded_offsets(features.offsets(), [sum(from_ranks) for from_ranks in bags])
        return rank_major(self._pooled(features.values(), offsets, weights), bags, self._config.embedding_dims())

    def prefetch(self, features: KeyedJaggedTensor) -> None:
        """As :meth:`RecStoreKernel.prefetch`."""
        self._kernel.prefetch(features.values(), features.length_per_key())

    def _pooled(self, ids: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        pooled: torch.Tensor = self._kernel(ids, offsets, weights, train=self.training)
        return pooled.to(self._output_dtype)


class RecStoreSequenceKernel(RecStoreKernel):
    """Rows of a group of tables in the order of the batch; backward updates the tables in place.

    Args:
        config: TorchRec's group.
        split, shard: as for :class:`RecStoreKernel`.

    Raises:
        ValueError: an optimizer that RecStore does not support; the message names the tables.
    """

    def __init__(self, config: GroupedEmbeddingConfig, split: tuple[int, int] | None = None, shard: int = 0) -> None:
        super().__init__(config, split, shard)
        self._kernel = SequenceKernel(
            self._tables, routings=self._routings, accumulation_steps=accumulation_steps(config.fused_params)
        )
        self._kernel.learning_rate = self._optim.learning_rate

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """The rows of each id.

        Args:
            features: int64 ids of ``config.feature_names()``, in that order.

        Returns:
            One dimension: feature by feature, each id's columns, of ``output_dtype`` in the fused_params.
        """
        rows: torch.Tensor = self._kernel(features.values(), self._counts(features), train=self.training)
        return rows.to(self._output_dtype)

    def prefetch(self, features: KeyedJaggedTensor) -> None:
        """As :meth:`RecStoreKernel.prefetch`."""
        self._kernel.prefetch(features.values(), self._counts(features))

    def _counts(self, features: KeyedJaggedTensor) -> list[int]:
        lengths = iter(features.length_per_key())
        return [sum(next(lengths) for _ in range(table.num_features())) for table in self._config.embedding_tables]
