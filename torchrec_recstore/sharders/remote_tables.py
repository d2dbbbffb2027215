"""The tables of sharded models whose rows are on servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torchrec.distributed.embedding_types import ShardedEmbeddingTable

from torchrec_recstore.kernels import RemoteTable
from torchrec_recstore.optim import Optimizer
from torchrec_recstore.options import TableOptions
from torchrec_recstore.plugins import plugin
from torchrec_recstore.sharders.fused_params import (
    accumulation_steps,
    carried_row_name,
    state_dtype,
    stochastic_rounding,
)
from torchrec_recstore.table_configs import ROW_DTYPES


def check_remote(config: ShardedEmbeddingTable, fused_params: Mapping[str, Any] | None) -> None:
    """Checks that servers support a table.

    Raises:
        ValueError: They do not support optimizer state in float16, stochastic rounding of 16-bit rows, or updates of
            several backward passes; the message names the table.
    """
    where = f"RecStore table {config.name!r} is on servers, which do not support"
    dtype = ROW_DTYPES[config.data_type]
    if state_dtype(fused_params, [config.name]) is not torch.float32:
        raise ValueError(f"{where} optimizer state in float16: leave it out of fused_params")
    if stochastic_rounding(fused_params, [config.name], dtype) and dtype is not torch.int8:
        raise ValueError(f"{where} stochastic_rounding of {dtype} rows: leave it out of fused_params")
    if accumulation_steps(fused_params) > 1:
        raise ValueError(f"{where} accumulation_steps={accumulation_steps(fused_params)}: leave it out")


def remote_table(config: ShardedEmbeddingTable, optimizer: Optimizer, options: TableOptions) -> RemoteTable:
    """Returns the table of the servers in ``options``, and creates it if it does not exist.

    Args:
        config: TorchRec's config of the table, which :func:`check_remote` has checked.
        optimizer: The optimizer of the table's group.
        options: The options of the table, with its initializer.

    Raises:
        ImportError: ``torchrec-recstore-service`` is not installed.
        ServiceError: A server cannot be reached, or refuses the table.
        ValueError: The servers have the table with another specification.
    """
    servers = options.servers
    assert servers is not None
    values = {name: getattr(options, name) for name in TableOptions.__dataclass_fields__ if name != "servers"}
    table: RemoteTable = plugin("client")(servers).table(
        carried_row_name(config.fused_params) or config.name,
        (config.num_embeddings, config.embedding_dim),
        ROW_DTYPES[config.data_type],
        optimizer,
        TableOptions(**values),
        servers.staleness,
    )
    return table
