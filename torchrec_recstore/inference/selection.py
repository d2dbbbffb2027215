"""The rows of a table that are exported, and the row that missing ids read."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.distributed.types import ShardingEnv

from torchrec_recstore.inference.row_formats import packed
from torchrec_recstore.options import LFU, ConstantInit, Initializer, TableOptions, UniformInit
from torchrec_recstore.sharders.gather import all_gathered, refused_together
from torchrec_recstore.store import Table


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


def check_counted(name: str, rows: int, steps: int, min_frequency: int, top_rows: int | None) -> None:
    """Refuses a choice by frequency among rows that no training step has counted.

    Args:
        name: of the table.
        rows: of it.
        steps: training lookups that it has seen.
        min_frequency: as asked for.
        top_rows: likewise.

    Raises:
        ValueError: they were only loaded, inserted, or updated by id.
    """
    if rows and not steps and (min_frequency or top_rows is not None):
        raise ValueError(
            f"table {name!r} has rows and no training step has looked any up, so that their frequencies are not known: "
            "leave out min_frequency and top_rows"
        )


def selected(frequency: Tensor, min_frequency: int, top_rows: int | None) -> Tensor:
    """Which rows are exported.

    Args:
        frequency: (R,) int64, by ascending id.
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
    value = _only_value(initializer)
    if value is None:
        return torch.zeros(dim), False
    return torch.full((dim,), value).to(dtype).float(), True


def _only_value(initializer: Initializer) -> float | None:
    if isinstance(initializer, ConstantInit):
        return initializer.value
    if isinstance(initializer, UniformInit):
        return initializer.low if initializer.low == initializer.high else None
    return initializer.mean if initializer.std == 0 else None


_PIECE_ROWS = 1 << 16


@dataclass(frozen=True)
class GatheredRows:
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
) -> GatheredRows:
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
    return GatheredRows(ids, rows, frequency, steps)


def _part(shard: Table, missing: Tensor, row_format: str) -> GatheredRows:
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
        return GatheredRows(ids, rows, frequency, snapshot.steps)
