"""TorchRec's compute kernels over RecStore tables."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import PoolingMode, pooling_type_to_pooling_mode
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizer, FusedOptimizerModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_recstore.kernels import BlockRouting, PooledKernel, SequenceKernel
from torchrec_recstore.optim import Optimizer
from torchrec_recstore.sharders.fused_params import accumulation_steps, optimizer_from_fused_params, output_dtype
from torchrec_recstore.sharders.row_split import routing
from torchrec_recstore.sharders.shard_tables import make_table
from torchrec_recstore.sharders.varying_batch import padded_offsets, rank_major
from torchrec_recstore.store import Table
from torchrec_recstore.table_parameter import TableParameter


def placeholder_parameter(name: str, dim: int) -> nn.Parameter:
    """The empty parameter, (0, dim), that stands for a table in TorchRec's bookkeeping.

    Its mark keeps it out of dense optimizers built over ``in_backward_optimizer_filter`` (torchrec 1.8.0).
    """
    parameter = TableParameter(torch.empty(0, dim), table=name)
    parameter._in_backward_optimizers = [EmptyFusedOptimizer()]  # type: ignore[attr-defined]
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


class TableOptimizer(FusedOptimizer):  # type: ignore[misc]
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
            parameter._in_backward_optimizers = [TableOptimizer(name, parameter, self._optim)]  # type: ignore[attr-defined]

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


class RecStoreEmbeddingBag(RecStoreKernel):
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


class RecStoreEmbedding(RecStoreKernel):
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
