"""Converts between RecStore tables and dense tensors, in which row i is id i."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchrec_recstore.sharders.gather import refused_together
from torchrec_recstore.sharders.model_tables import table_named, tables_named
from torchrec_recstore.sharders.state import WEIGHTS

_CHUNK = 1 << 20  # rows


def load_dense_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Writes dense weights into RecStore tables: row i becomes id i. Collective.

    Rows of ids that are not in a tensor do not change. New rows start with zero optimizer state, and existing rows keep
    their optimizer state.

    Args:
        model: ``DistributedModelParallel``, a sharded module, or any module that contains them.
        weights: (rows, dim) floating-point tensors by table name, the same on every rank. If several collections have
            a table of the same name, the key is the collection's path in the model, a dot, and the table's name.

    Raises:
        ValueError: A table is unknown, several tables have the name, or a tensor has another shape. The error is raised
            on every rank, and no row has changed.
        TypeError: A value is not a floating-point tensor.
    """
    tables = tables_named(model, weights)
    for name, tensor in weights.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"weights of table {name!r} must be a floating-point tensor, got {kind}")
        if tensor.dim() != 2 or tensor.shape[1] != tables[name].dim:
            raise ValueError(
                f"weights of table {name!r} must have the shape (rows, {tables[name].dim}), got {tuple(tensor.shape)}"
            )
    for name, tensor in weights.items():
        for shard in tables[name].shards:
            columns = shard.table.columns
            for begin in range(0, tensor.shape[0], _CHUNK):
                part = tensor[begin : begin + _CHUNK].detach()
                ids = torch.arange(begin, begin + part.shape[0])
                owned = shard.owned(ids)
                mine = part[owned, columns.start : columns.stop].to("cpu", torch.float32)
                shard.table.insert_all(ids[owned], mine)
        tables[name].state.copies.forget(tables[name].config_name, WEIGHTS)


def export_dense_weights(model: nn.Module, table_name: str, num_rows: int) -> Tensor:
    """Returns the rows of the ids from 0 to ``num_rows`` - 1. Collective; the result is the same on every rank.

    Args:
        model: ``DistributedModelParallel``, a sharded module, or any module that contains them.
        table_name: The name of a RecStore table; see :func:`load_dense_weights`.
        num_rows: The number of rows, at least 0.

    Returns:
        (num_rows, dim) float32. Ids without a row are zeros.

    Raises:
        ValueError: The table is unknown, several tables have the name, or ``num_rows`` is negative. The error is raised
            on every rank.
    """
    table = table_named(model, table_name)
    if num_rows < 0:
        raise ValueError(f"num_rows must not be negative, got {num_rows}")
    with refused_together(table.state.env):
        table.state.copies.check()
    out = torch.zeros(num_rows, table.dim)
    for shard in table.shards:
        columns = shard.table.columns
        for begin in range(0, num_rows, _CHUNK):
            ids = torch.arange(begin, min(begin + _CHUNK, num_rows))
            ids = ids[shard.owned(ids)]  # A shared cold store contains rows of all ranks.
            ids = ids[shard.table.contains(ids)]
            out[ids, columns.start : columns.stop] = shard.table.lookup(ids).float()
    group = table.state.env.process_group
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(out, group=group)  # Every cell belongs to one rank, and is 0 on the others.
    return out
