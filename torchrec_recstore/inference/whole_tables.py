"""Whole tables out of their shards."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.distributed.types import ShardingEnv

from torchrec_recstore.inference.row_formats import packed
from torchrec_recstore.inference.selection import aged
from torchrec_recstore.sharders.gather import all_gathered, refused_together
from torchrec_recstore.store import Table

_PIECE_ROWS = 1 << 16


@dataclass(frozen=True)
class WholeTable:
    """The rows of all shards.

    Args:
        ids: (R,) int64, ascending.
        rows: (R + 1, ...) in the row format asked for, the first one for ids that have none.
        frequency: (R,) int64: training steps that have looked the row up, halved as the table's eviction has it.
        steps: training steps of the table.
    """

    ids: Tensor
    rows: Tensor
    frequency: Tensor
    steps: int


def whole_table(
    name: str, shards: Iterable[Table], missing: Tensor, env: ShardingEnv | None, row_format: str = "float32"
) -> WholeTable:
    """Reads a table, rows in its cold store too, and changes nothing. Collective where it is sharded.

    Rows are packed while they are read, so that a table of one shard takes the memory of the result alone.

    Args:
        name: of the table.
        shards: this rank's.
        missing: (dim,) float32: the row for ids that have none, of the whole table.
        env: of the ranks that have the others; None where this process has all of it.
        row_format: of :data:`torchrec_recstore.inference.row_formats.FORMATS`; float32 where columns are split.
    """
    with nullcontext() if env is None else refused_together(env):
        mine = [((shard.columns.start, shard.columns.stop), _part(shard, missing, row_format)) for shard in shards]
    parts = [part for of_rank in ([mine] if env is None else all_gathered(mine, env)) for part in of_rank]
    del mine
    if len(parts) == 1:
        return parts[0][1]
    ids = torch.cat([part.ids for _, part in parts]).unique()  # type: ignore[no-untyped-call]
    steps = max(part.steps for _, part in parts)
    first = packed(name, missing[None], row_format)
    rows = first.new_empty(len(ids) + 1, first.shape[1])
    rows[:1] = first
    frequency = torch.zeros(len(ids), dtype=torch.int64)
    while parts:  # each goes when it has been copied
        (start, stop), part = parts.pop()
        places = torch.searchsorted(ids, part.ids)
        columns = slice(start, stop) if row_format == "float32" else slice(None)
        rows[1:][places, columns] = part.rows[1:]
        frequency[places] = part.frequency  # of each column shard the same
        del part
    return WholeTable(ids, rows, frequency, steps)


def _part(shard: Table, missing: Tensor, row_format: str) -> WholeTable:
    """The columns and rows of a shard."""
    first = packed(shard.name, missing[None, shard.columns.start : shard.columns.stop], row_format)
    with shard.snapshot() as snapshot:
        count = len(snapshot)
        ids, frequency = torch.empty(count, dtype=torch.int64), torch.empty(count, dtype=torch.int64)
        rows = first.new_empty(count + 1, first.shape[1])
        rows[:1] = first
        for begin in range(0, count, _PIECE_ROWS):
            some, read = snapshot.read(min(_PIECE_ROWS, count - begin))
            part = slice(begin, begin + len(some))
            ids[part], rows[1:][part] = some, packed(shard.name, read["weight"].float(), row_format)
            frequency[part] = aged(read["frequency"], read["last_step"], snapshot.steps, shard.options)
        return WholeTable(ids, rows, frequency, snapshot.steps)
