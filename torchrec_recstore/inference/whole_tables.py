"""Whole tables out of their shards, and which of their rows are exported."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.distributed.types import ShardingEnv

from torchrec_recstore.options import LFU, ConstantInit, Initializer, TableOptions
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
    """

    ids: Tensor
    weight: Tensor
    frequency: Tensor


def whole_table(shards: Iterable[Table], dim: int, env: ShardingEnv | None) -> WholeTable:
    """Reads a table, rows in its cold store too, and changes nothing. Collective where it is sharded.

    Args:
        shards: this rank's.
        dim: columns of the whole table.
        env: of the ranks that have the others; None where this process has all of it.
    """
    with nullcontext() if env is None else refused_together(env):
        mine = [((shard.columns.start, shard.columns.stop), *_rows_of(shard)) for shard in shards]
    gathered = [mine] if env is None else all_gathered(mine, env)
    parts = [part for of_rank in gathered for part in of_rank]
    ids = torch.cat([torch.empty(0, dtype=torch.int64), *(ids for _, ids, _, _ in parts)]).unique()
    weight = torch.zeros(len(ids), dim)
    frequency = torch.zeros(len(ids), dtype=torch.int64)
    for (start, stop), some, rows, counts in parts:
        places = torch.searchsorted(ids, some)
        weight[places, start:stop] = rows
        frequency[places] = counts  # of each column shard the same
    return WholeTable(ids, weight, frequency)


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


def aged(frequency: Tensor, last_step: Tensor, steps: int, options: TableOptions) -> Tensor:
    """Frequencies as eviction sees them now: csrc/row_kernels.h, aged_frequency.

    Args:
        frequency: (N,) int64, as they were at the rows' last steps.
        last_step: (N,) int64.
        steps: of the table by now.
        options: of the table.
    """
    half_life = options.eviction.half_life_steps if isinstance(options.eviction, LFU) else None
    if half_life is None:
        return frequency
    halvings = (steps // half_life - last_step // half_life).clamp(0, 63)
    return frequency >> halvings


def check_selection(min_frequency: int, top_rows: int | None) -> None:
    """Refuses a choice of rows that makes no sense.

    Raises:
        TypeError, ValueError: the message names the argument.
    """
    for name, value, least in (("min_frequency", min_frequency, 0), ("top_rows", top_rows, 1)):
        if value is None and name == "top_rows":
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {type(value).__name__}")
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


def selected(ids: Tensor, frequency: Tensor, min_frequency: int, top_rows: int | None) -> Tensor:
    """Which rows are exported.

    Args:
        ids: (R,) int64, ascending.
        frequency: (R,) int64.
        min_frequency: steps that have looked a row up, at least.
        top_rows: how many rows stay of those: the most frequent ones, of equals those of the least ids.

    Returns:
        Places, ascending.
    """
    places = (frequency >= min_frequency).nonzero().squeeze(1)
    if top_rows is None or len(places) <= top_rows:
        return places
    order = frequency[places].argsort(descending=True, stable=True)
    return places[order[:top_rows]].sort().values


def missing_row(initializer: Initializer, options: TableOptions, dim: int, dtype: torch.dtype) -> tuple[Tensor, bool]:
    """What an id without a row reads as.

    Args:
        initializer: of the table.
        options: of the table.
        dim: columns.
        dtype: of the table's rows.

    Returns:
        (dim,) float32, and whether an evaluation reads the same: with ``missing="init"`` only where all initial rows
        are alike.
    """
    if options.missing == "zeros":
        return torch.zeros(dim), True
    if isinstance(initializer, ConstantInit):
        return torch.full((dim,), initializer.value).to(dtype).float(), True
    return torch.zeros(dim), False

