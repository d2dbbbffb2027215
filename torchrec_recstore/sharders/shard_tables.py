"""From TorchRec's description of a shard to the :class:`Table` that holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torchrec.distributed.embedding_types import ShardedEmbeddingTable
from torchrec.modules.embedding_configs import EmbeddingTableConfig

from torchrec_recstore.kernels import BlockRouting
from torchrec_recstore.optim import Optimizer
from torchrec_recstore.options import TableOptions, shard_options
from torchrec_recstore.sharders.fused_params import (
    carried_row_name,
    optimizer_from_fused_params,
    output_dtype,
    stochastic_rounding,
    table_options,
)
from torchrec_recstore.store import Table
from torchrec_recstore.table_configs import ROW_DTYPES, check_config, initializer_of


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
