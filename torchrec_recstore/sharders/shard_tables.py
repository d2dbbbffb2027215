"""From TorchRec's description of a shard to the :class:`Table` that holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torchrec.distributed.embedding_types import ShardedEmbeddingTable
from torchrec.modules.embedding_configs import DataType, EmbeddingTableConfig

from torchrec_recstore.kernels import BlockRouting
from torchrec_recstore.optim import Optimizer
from torchrec_recstore.options import Initializer, TableOptions, UniformInit, default_initializer, shard_options
from torchrec_recstore.sharders.fused_params import (
    optimizer_from_fused_params,
    output_dtype,
    stochastic_rounding,
    table_options,
)
from torchrec_recstore.store import Table

_ROW_DTYPES = {
    DataType.FP32: torch.float32,
    DataType.FP16: torch.float16,
    DataType.BF16: torch.bfloat16,
}


def check_table(config: EmbeddingTableConfig, fused_params: Mapping[str, Any] | None) -> None:
    """Refuses what RecStore does not support, on ranks without a shard of the table as well.

    Every rank calls it for every table, so that none is left waiting for another that has failed.

    Raises:
        ValueError: data type, optimizer, initial range or virtual table; the message names the table.
    """
    if config.data_type not in _ROW_DTYPES:
        raise ValueError(
            f"RecStore table {config.name!r}: data_type {config.data_type} is not supported, "
            f"only {', '.join(kind.name for kind in _ROW_DTYPES)} are"
        )
    if config.use_virtual_table:
        raise ValueError(f"RecStore table {config.name!r}: use_virtual_table asks for another kernel of TorchRec's")
    optimizer_from_fused_params(fused_params, [config.name])
    stochastic_rounding(fused_params, [config.name])
    output_dtype(fused_params, [config.name])
    try:
        _initializer(config, table_options(fused_params))
    except ValueError as error:
        raise ValueError(f"RecStore table {config.name!r}: weight_init_min, weight_init_max: {error}") from error


def whole_options(config: EmbeddingTableConfig, fused_params: Mapping[str, Any] | None) -> TableOptions:
    """A table's options over all its shards, with the initializer that its config stands for."""
    options = table_options(fused_params)
    return replace(options, initializer=_initializer(config, options))


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
        dtype=_ROW_DTYPES[config.data_type],
        optimizer=optimizer,
        options=shard_options(whole_options(config, config.fused_params), split, config.name),
        name=config.name,
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


def _initializer(config: EmbeddingTableConfig, options: TableOptions) -> Initializer:
    default = default_initializer(options, config.num_embeddings)
    low, high = config.weight_init_min, config.weight_init_max
    if options.initializer is not None or (low is None and high is None):
        return default
    if not isinstance(default, UniformInit):
        raise AssertionError("the default initializer is uniform")
    return UniformInit(default.low if low is None else low, default.high if high is None else high)
