"""Whole tables out of their shards."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.distributed.types import ShardingEnv

from torchrec_recstore.inference.selection import aged
from torchrec_recstore.sharders.gather import all_gathered, refused_together
from torchrec_recstore.store import Table

_PIECE_ROWS = 1 << 16


@dataclass(frozen=True)
class WholeTable:
    """The rows of all shards.

    Args:
        ids: (R,) int64, ascending.
        weight: (R, dim) float32.
        frequency: (R,) int64: training steps that have looked the row up, halved as the table's eviction has it.
        steps: training steps of the table.
    """

    ids: Tensor
    weight: Tensor
    frequency: Tensor
    steps: int


def whole_table(shards: Iterable[Table], dim: int, env: ShardingEnv | None) -> WholeTable:
    """Reads a table, rows in its cold store too, and changes nothing. Collective where it is sharded.

    Args:
        shards: this rank's.
        dim: columns of the whole table.
        env: of the ranks that have the others; None where this process has all of it.
    """
    with nullcontext() if env is None else refused_together(env):
        mine = [((shard.columns.start, shard.columns.stop), shard.steps, *_rows_of(shard)) for shard in shards]
    gathered = [mine] if env is None else all_gathered(mine, env)
    parts = [part for of_rank in gathered for part in of_rank]
    ids = torch.cat([torch.empty(0, dtype=torch.int64), *(ids for _, _, ids, _, _ in parts)]).unique()  # type: ignore[no-untyped-call]
    weight = torch.zeros(len(ids), dim)
    frequency = torch.zeros(len(ids), dtype=torch.int64)
    for (start, stop), _, some, rows, counts in parts:
        places = torch.searchsorted(ids, some)
        weight[places, start:stop] = rows
        frequency[places] = counts  # of each column shard the same
    return WholeTable(ids, weight, frequency, max((steps for _, steps, *_ in parts), default=0))


def _rows_of(shard: Table) -> tuple[Tensor, Tensor, Tensor]:
    with shard.snapshot() as snapshot:
        rows = len(snapshot)
        ids, frequency = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.int64)
        weight = torch.empty(rows, len(shard.columns))
        for begin in range(0, rows, _PIECE_ROWS):
            some, read = snapshot.read(min(_PIECE_ROWS, rows - begin))
            part = slice(begin, begin + len(some))
            ids[part], weight[part] = some, read["weight"].float()
            frequency[part] = aged(read["frequency"], read["last_step"], snapshot.steps, shard.options)
    return ids, weight, frequency
