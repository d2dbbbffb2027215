"""Moves the rows of a table from the shards of one plan to the shards of another plan, part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.types import ShardingEnv

from torchrec_recstore.kernels import BlockRouting
from torchrec_recstore.optim import Optimizer, state_names
from torchrec_recstore.sharders.gather import all_gathered, all_made, refused_together
from torchrec_recstore.sharders.layout import LocalShard
from torchrec_recstore.store import Table
from torchrec_recstore.store.exchange import exchange_all
from torchrec_recstore.store.parts import (
    PART_BYTES,
    common_columns,
    joined_rows,
    merged_counters,
    rows_in,
    write_joined,
)

_MESSAGE_BYTES = 1 << 22  # The rows of a shard that are read, sent and written at a time.
_SHRINKS = 16  # The memory of a shard is given back after each of this many parts of its rows has left.
_ALIGNMENT = 8

_Named = dict[str, Tensor]
_Sent = list[list[tuple["_Message", _Named]]]  # by the rank that gets the rows


@dataclass(frozen=True)
class _Place:
    """A shard of the whole table.

    Args:
        rank: The rank of the shard.
        number: The number of the shard among the table's shards on that rank.
        columns: The columns of the shard.
        routing: The routing that determines which ids belong to the shard. None: all ids do.
    """

    rank: int
    number: int
    columns: range
    routing: BlockRouting | None


@dataclass(frozen=True)
class _Held:
    """What a shard knows of the whole table: see the properties and methods of :class:`Table`."""

    dim: int
    dtype: torch.dtype
    optimizer: Optimizer
    rows: int
    steps: int
    optimizer_steps: int
    times: list[int]
    sightings: tuple[Tensor, int] | None


@dataclass(frozen=True)
class _Message:
    """The description of the rows that one shard sends to another in one round.

    Args:
        number: The number of the shard that receives the rows, on its rank.
        group: The number of the sender's group; see :func:`move_rows`.
        columns: The columns of the rows.
        tensors: The name, data type and shape of each tensor, in the order of their bytes.
    """

    number: int
    group: int
    columns: range
    tensors: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]

    def sizes(self) -> Iterator[int]:
        """Yields the number of bytes of each tensor, without the padding after the tensor."""
        for _, dtype, shape in self.tensors:
            yield prod(shape) * dtype.itemsize


def move_rows(name: str, old: Sequence[LocalShard], new: Sequence[LocalShard], env: ShardingEnv) -> None:
    """Moves all rows of a table, with their states and the table's clocks and counts, to empty shards. Collective.

    The new shards then hold what they would hold if the old shards had been saved and the checkpoint had been loaded
    into the new ones. Rows leave the old shards while they arrive in the new ones, so that a row is in memory once,
    apart from the rows of one round. Each rank sends one part of each of its shards in a round. If ``max_rows`` bounds
    the table, only one group of shards with the same ids sends parts, of the size of a checkpoint's, so that the new
    shards get the rows in the order of a load: their evictions depend on it. If the layout does not change, the shards
    exchange their rows without copying them.

    Args:
        name: The name of the table, for errors.
        old: The shards of this rank that hold the rows.
        new: The shards of this rank that receive the rows.
        env: The environment of the sharded module.

    Raises:
        RuntimeError: A rank has died, or the column shards hold different rows.
        Exception: The error of a rank. All of these errors are raised on every rank. The rows are then in neither of
            the layouts.
    """
    sources, places = _places(old, env), _places(new, env)
    held = [each for of_rank in all_gathered([_held(shard.table) for shard in old], env) for each in of_rank]
    if all(all_gathered(_same_layout(old, new), env)):
        with refused_together(env):
            for before, after in zip(old, new, strict=True):
                after.table.exchange_rows(before.table)
                _set_clocks(after.table, held)
    else:
        _stream(name, old, new, sources, places, held, env)
    with refused_together(env):
        for shard in new:
            shard.table.optimizer_steps = max(each.optimizer_steps for each in held)
            if _counts(shard.table):
                counters = [each.sightings for each in held if each.sightings is not None]
                shard.table.set_sightings(*merged_counters(counters, shard.table.sightings()[0].shape[2]))


def _stream(
    name: str,
    old: Sequence[LocalShard],
    new: Sequence[LocalShard],
    sources: Sequence[_Place],
    places: Sequence[_Place],
    held: Sequence[_Held],
    env: ShardingEnv,
) -> None:
    """Moves the rows in rounds. ``held`` is of the shards ``sources``, which ``old`` has on this rank."""
    rows = {place.routing: each.rows for place, each in zip(sources, held, strict=True) if place.columns.start == 0}
    groups = list(rows)
    bounded = any(all_gathered(any(shard.table.options.max_rows is not None for shard in new), env))
    with refused_together(env):
        if any(each.rows != rows.get(place.routing) for place, each in zip(sources, held, strict=True)):
            raise RuntimeError(f"RecStore table {name!r}: its column shards hold different numbers of rows")
        # The statistics of the tables themselves do not count the moved rows as new ones, as after a load.
        arriving = [shard.table.empty_copy() for shard in new]
        for each in arriving:
            _set_clocks(each, held)
        senders = [_Sender(shard, groups.index(shard.routing)) for shard in old]
    whole = held[0]
    size = rows_in(PART_BYTES if bounded else _MESSAGE_BYTES, whole.dim, whole.dtype, whole.optimizer)
    parts = [-(-rows[routing] // size) for routing in groups]
    rounds = [({g}, i) for g, count in enumerate(parts) for i in range(count)]
    if not bounded:
        rounds = [({g for g, count in enumerate(parts) if i < count}, i) for i in range(max(parts, default=0))]
    states = state_names(whole.optimizer)
    received: list[tuple[_Message, _Named]] = []

    def write_and_take(active: set[int], part: range) -> _Sent:
        # Ranks wait for each other once for both: the rows of the last round are written, and those of the next leave.
        nonlocal received
        _write(name, arriving, received, states)
        received = []
        return _by_rank(senders, active, part, places, states, env)

    for active, number in rounds:
        part = range(number * size, (number + 1) * size)
        received = _exchanged(partial(write_and_take, active, part), env)
    with refused_together(env):
        _write(name, arriving, received, states)
        exchange_all(zip([shard.table for shard in new], arriving, strict=True))


def _set_clocks(table: Table, held: Sequence[_Held]) -> None:
    """Sets the number of steps and their times to those of the whole table. Eviction computes ages of rows from it."""
    table.steps = max(each.steps for each in held)
    table.set_times(max((each.times for each in held), key=lambda times: times[1:2]))


def _same_layout(old: Sequence[LocalShard], new: Sequence[LocalShard]) -> bool:
    """Returns whether the shards can exchange their rows. Counts of admission have to be merged instead."""
    return len(old) == len(new) and all(
        (before.table.columns, before.table.options, before.routing)
        == (after.table.columns, after.table.options, after.routing)
        and not _counts(after.table)
        for before, after in zip(old, new, strict=True)
    )


def _counts(table: Table) -> bool:
    """Returns whether the table's admission counts how often it has seen ids."""
    return table.options.admission is not None and table.options.admission.count > 1


def _places(shards: Sequence[LocalShard], env: ShardingEnv) -> list[_Place]:
    """Returns the table's shards on all ranks, in the order of the ranks. Collective."""
    gathered = all_gathered([(shard.table.columns, shard.routing) for shard in shards], env)
    return [
        _Place(rank, number, columns, routing)
        for rank, of_rank in enumerate(gathered)
        for number, (columns, routing) in enumerate(of_rank)
    ]


def _held(table: Table) -> _Held:
    return _Held(
        dim=table.dim,
        dtype=table.dtype,
        optimizer=table.optimizer,
        rows=len(table),
        steps=table.steps,
        optimizer_steps=table.optimizer_steps,
        times=table.times(),
        sightings=table.sightings() if table.columns.start == 0 and _counts(table) else None,
    )


class _Sender:
    """A shard whose rows leave it in ascending order of their ids.

    Args:
        shard: The shard.
        group: The number of the shard's group.
    """

    def __init__(self, shard: LocalShard, group: int) -> None:
        self.table = shard.table
        self.group = group
        self._ids = shard.table.ids()
        self._since_shrink = 0

    def take(self, part: range) -> tuple[Tensor, _Named]:
        """Removes some rows from the shard, and returns their ids and the rows."""
        ids = self._ids[part.start : part.stop]
        rows = self.table.read_rows(ids)
        self.table.remove(ids)
        self._since_shrink += len(ids)
        if self._since_shrink * _SHRINKS >= len(self._ids):
            self.table.shrink()
            self._since_shrink = 0
        return ids, rows


def _by_rank(
    senders: Sequence[_Sender],
    active: set[int],
    part: range,
    places: Sequence[_Place],
    states: Mapping[str, str],
    env: ShardingEnv,
) -> _Sent:
    """Takes the rows of a round from this rank's shards, and returns them by the rank of the shard that gets them."""
    sent: _Sent = [[] for _ in range(env.world_size)]
    for sender in senders:
        if sender.group not in active:
            continue
        ids, rows = sender.take(part)
        held = sender.table.columns
        owned: dict[BlockRouting | None, Tensor | None] = {None: None}
        for place in places:
            if place.columns.start >= held.stop or held.start >= place.columns.stop:
                continue
            if place.routing is not None and place.routing not in owned:
                owned[place.routing] = place.routing.owned(ids).nonzero().squeeze(1)
            which = owned[place.routing]
            if len(ids if which is None else which) == 0:
                continue
            named = {"ids": ids, **common_columns(rows, held, place.columns, states)}
            if which is not None:
                named = {key: value[which] for key, value in named.items()}
            described = tuple((key, value.dtype, tuple(value.shape)) for key, value in named.items())
            columns = range(max(held.start, place.columns.start), min(held.stop, place.columns.stop))
            sent[place.rank].append((_Message(place.number, sender.group, columns, described), named))
    return sent


def _write(
    name: str, tables: Sequence[Table], received: Sequence[tuple[_Message, _Named]], states: Mapping[str, str]
) -> None:
    """Writes the rows of a round into this rank's tables."""
    pieces: dict[tuple[int, int], list[tuple[range, _Named]]] = {}
    for message, named in received:
        pieces.setdefault((message.group, message.number), []).append((message.columns, named))
    for (_, number), of_shard in sorted(pieces.items(), key=lambda item: item[0]):
        of_shard.sort(key=lambda piece: piece[0].start)
        table = tables[number]
        ids = [rows.pop("ids") for _, rows in of_shard]
        covered = sum(len(columns) for columns, _ in of_shard)
        if covered != len(table.columns) or any(not torch.equal(each, ids[0]) for each in ids[1:]):
            raise RuntimeError(f"RecStore table {name!r}: its column shards hold different rows")
        write_joined(table, ids[0], joined_rows(of_shard, table.columns, states))


def _exchanged(take: Callable[[], _Sent], env: ShardingEnv) -> list[tuple[_Message, _Named]]:
    """Sends rows to every rank, and returns the rows that every rank has sent to this one. Collective.

    Args:
        take: Returns the rows that this rank sends, by the rank that gets them.
        env: The environment of the sharded module.

    Raises:
        Exception: The error of a rank, or a rank has died.
    """
    group = env.process_group
    if group is None or env.world_size == 1:
        return take()[0]
    device = torch.device("cpu") if torch.device("cpu") in group._device_types else torch.device("cuda")
    packed = torch.empty(0)
    sizes: list[int] = []

    def pack() -> list[list[_Message]]:
        nonlocal packed, sizes
        sent = take()
        packed, sizes = _packed(sent)
        packed = packed.to(device)
        return [[message for message, _ in to_rank] for to_rank in sent]

    arriving = [of_rank[env.rank] for of_rank in all_made(pack, env)]
    expected = [sum(_padded(size) for message in messages for size in message.sizes()) for messages in arriving]
    with refused_together(env):  # A rank without memory would keep the others waiting.
        buffer = torch.empty(sum(expected), dtype=torch.uint8, device=device)
    try:
        dist.all_to_all_single(buffer, packed, expected, sizes, group=group)
    except RuntimeError as error:
        raise RuntimeError(f"a rank of the job has died: {str(error).strip()}") from error
    buffer = buffer.cpu()
    received, begin = [], 0
    for message in (message for messages in arriving for message in messages):
        named = {}
        for (key, dtype, shape), size in zip(message.tensors, message.sizes(), strict=True):
            named[key] = buffer[begin : begin + size].view(dtype).view(shape)
            begin += _padded(size)
        received.append((message, named))
    return received


def _packed(sent: _Sent) -> tuple[Tensor, list[int]]:
    """Returns the bytes of all tensors, (N,) uint8, and the number of bytes for each rank."""
    sizes = [sum(_padded(size) for message, _ in to_rank for size in message.sizes()) for to_rank in sent]
    packed = torch.empty(sum(sizes), dtype=torch.uint8)
    begin = 0
    for message, named in (each for to_rank in sent for each in to_rank):
        for value, size in zip(named.values(), message.sizes(), strict=True):
            packed[begin : begin + size].view(value.dtype).view(value.shape).copy_(value)
            begin += _padded(size)
    return packed, sizes


def _padded(size: int) -> int:
    """Returns the size of a tensor's bytes with the padding that aligns the next tensor."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
