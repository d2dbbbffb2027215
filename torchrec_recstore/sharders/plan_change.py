"""The change of a sharded collection's plan in place, part by part.

Tests: tests/distributed/test_reshard.py, tests/distributed/test_reshard_one_rank.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import ModuleSharder, ParameterSharding, ShardingEnv

from torchrec_recstore.kernels import BlockRouting
from torchrec_recstore.options import TableOptions, is_shared
from torchrec_recstore.sharders.delta_tracker import Record
from torchrec_recstore.sharders.gather import all_gathered, refused_together
from torchrec_recstore.sharders.layout import LocalShard
from torchrec_recstore.sharders.plan_entries import (
    RECSTORE_KERNEL,
    RecStoreParameterSharding,
    with_options,
)
from torchrec_recstore.sharders.row_state import ModuleState, RowState
from torchrec_recstore.store import LeftIds, Part, Table, TableState
from torchrec_recstore.store.parts import PART_BYTES, rows_in
from torchrec_recstore.store.table import check_applied, check_replaceable, exchange_all
from torchrec_recstore.torchrec_seams.models import (
    CollectionSeams,
    is_in_pipeline,
    on_meta_device,
)
from torchrec_recstore.utils import ceil_div

# The rows of a shard that are read, sent and written at a time.
_MESSAGE_BYTES = 1 << 22
# The memory of a shard is given back after each of this many parts of its rows has
# left.
_SHRINKS = 16

# The number of the shard that receives rows, on its rank; the number of the sender's
# group; and the rows.
_Message = tuple[int, int, Part]


class ReshardableCollection(CollectionSeams):
    """A mixin for TorchRec's sharded collections, whose plan it can change.

    All tables of the collection must be in RecStore.
    """

    recstore_state: ModuleState
    """The rows of this module's RecStore tables, for ``state_dict`` and checkpoints."""
    source: tuple[nn.Module, ModuleSharder[nn.Module]] | None = None
    """The unsharded collection and the sharder that has sharded it."""
    records: tuple[Record, ...] = ()
    """The functions that :meth:`register_post_lookup_tracker_fn` has registered."""

    def recstore_table_names(self) -> list[str]:
        """Returns the names of the RecStore tables of the plan.

        They have the order of the configs, the same on every rank.
        """
        plan = self.module_sharding_plan
        return [
            name
            for name in self.names_of_tables
            if plan[name].compute_kernel == RECSTORE_KERNEL
        ]

    def recstore_tables(self) -> Iterator[Table]:
        """Yields the shards of the RecStore tables on this rank."""
        raise NotImplementedError

    def has_begun_batches(self) -> bool:
        """Returns whether a batch has been distributed and not been looked up.

        A train pipeline has distributed it with the present plan.
        """
        raise NotImplementedError

    def refuse_begun(self) -> None:
        """Raises ``ValueError`` if a train pipeline holds batches of the present plan.

        It would look them up with the new one.
        """
        # TorchRec's pipelines look up what they have distributed before detach(), with
        # whatever plan the collection has then (torchrec 1.7.0 to 1.9.2).
        if self.has_begun_batches():
            raise ValueError(
                "reshard: a train pipeline of TorchRec has distributed batches for the"
                f" tables {sorted(self.names_of_tables)} with the old plan, and keeps"
                " them when it is detached: train these batches first, by"
                " pipeline.progress(iter(())) until it raises StopIteration, and"
                " detach it again; or use RecStorePrefetchPipeline, which distributes"
                " them again"
            )

    def change(
        self,
        plan: Mapping[str, ParameterSharding],
        path: str | None = None,
    ) -> Change | None:
        """Returns the change to another plan, or None for the present one.

        Raises ValueError if it cannot be made.
        """
        self.recstore_state.copies.check_usable()
        if self.source is not None:
            module, sharder = self.source
            plan = with_options(plan, sharder.shardable_parameters(module))
        old_plan = self.module_sharding_plan
        table_names = set(self.names_of_tables)
        if plan.keys() != table_names:
            missing = sorted(table_names - plan.keys())
            unknown = sorted(plan.keys() - table_names)
            raise ValueError(
                f"reshard: the plan of {sorted(table_names)} has no table(s) {missing},"
                f" and unknown {unknown}"
            )
        if all(_same(old_plan[name], plan[name]) for name in table_names):
            return None
        for name in self.names_of_tables:
            _check_kernel(name, "is", old_plan[name])
            _check_kernel(name, "would be", plan[name])
        for name in self.names_of_tables:
            _check_frozen(name, old_plan[name], plan[name])
        if self.source is None:
            raise ValueError(
                f"reshard: the collection of {sorted(table_names)} was not sharded by a"
                " RecStore sharder"
            )
        refuse_pipelined(self, table_names)
        for name, state in self.recstore_state.tables.items():
            cold_store = state.options.cold_store
            if is_shared(cold_store):
                raise ValueError(
                    f"reshard: the rows of table {name!r} are in {cold_store!r}, which"
                    " is shared: call flush_tables, and start the model anew with the"
                    " new plan"
                )
        self.recstore_state.copies.check()
        check_replaceable(self.recstore_tables())
        check_applied(self.recstore_tables())
        return Change(self, dict(plan), path)

    def update_shards(
        self,
        changed_sharding_params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None,
    ) -> None:
        """Changes the entries of some tables in place.

        Collective. ``DistributedModelParallel.reshard`` calls it.

        See :func:`torchrec_recstore.reshard` for the errors. ``env`` and ``device``
        cannot change.
        """
        if self.recstore_table_names():
            with refused_together(self.ranks_env):
                change = self.change(
                    {**self.module_sharding_plan, **changed_sharding_params}
                )
                if change is not None:
                    self.refuse_begun()
            reshard_collections([] if change is None else [change])
        elif hasattr(super(), "update_shards"):
            super().update_shards(changed_sharding_params, env, device)
        else:
            raise NotImplementedError(
                f"the tables {self.names_of_tables} are on TorchRec's own kernels, and"
                " TorchRec cannot reshard an EmbeddingCollection in place: load a"
                " checkpoint into a model with the new plan"
            )

    def rebuilt(self, change: Change) -> ReshardableCollection:
        """Returns a new sharded module with another plan, without rows.

        Collective.
        """
        assert self.source is not None
        module, sharder = self.source
        plan: Any = change.plan
        new_collection: Any = sharder.shard(
            on_meta_device(module),
            plan,
            self.ranks_env,
            self.stock_device,
            change.path,
        )
        new_collection.source = self.source
        return new_collection  # type: ignore[no-any-return]

    def become_resharded(self, fresh: ReshardableCollection) -> None:
        """Becomes the module ``fresh``, but stays the same object.

        The rows have moved to ``fresh``.
        """
        records = self.records
        state = self.recstore_state
        self.close_tables()
        state.take_over(fresh.recstore_state)
        self.become(fresh)
        self.recstore_state = state
        for record in records:
            self.register_post_lookup_tracker_fn(record)

    def close_tables(self) -> None:
        """Closes the tables of this rank."""
        for table in self.recstore_tables():
            table.close(flush=False)


@dataclass(frozen=True)
class Change:
    """A change of a collection's plan, which has been checked.

    ``path`` is that of the collection in the model.
    """

    collection: ReshardableCollection
    plan: dict[str, ParameterSharding]
    path: str | None


def refuse_pipelined(module: nn.Module, tables: Iterable[str]) -> None:
    """Raises ``ValueError`` if a train pipeline has begun batches for a sharded module.

    ``tables`` are the module's tables.
    """
    if is_in_pipeline(module):
        raise ValueError(
            "reshard: a train pipeline has begun batches for the tables"
            f" {sorted(tables)} with the old plan: call pipeline.detach() first; its"
            " next progress() takes these batches up again"
        )


def reshard_collections(changes: Sequence[Change]) -> None:
    """Changes the plans of collections in place: of all of them, or of none.

    Collective.
    """
    rebuilt: list[tuple[ReshardableCollection, ReshardableCollection]] = []
    try:
        for change in changes:
            rebuilt.append((change.collection, change.collection.rebuilt(change)))
    except BaseException:
        for _, fresh in rebuilt:
            fresh.close_tables()
        raise
    try:
        for collection, fresh in rebuilt:
            for name, table in collection.recstore_state.tables.items():
                move_rows(table, fresh.recstore_state.tables[name])
    except BaseException as error:
        for collection, fresh in rebuilt:
            collection.recstore_state.copies.refuse_all(
                f"RecStore tables {collection.recstore_table_names()} have lost rows,"
                f" because a reshard failed with {type(error).__name__}: {error}: start"
                " the job again from its last checkpoint"
            )
            fresh.close_tables()
        raise
    for collection, fresh in rebuilt:
        collection.become_resharded(fresh)


def _is_frozen(sharding: ParameterSharding) -> bool:
    return isinstance(sharding, RecStoreParameterSharding) and sharding.options.frozen


def _same(old: ParameterSharding, new: ParameterSharding) -> bool:
    # The sharder adds its own arguments to the entries, so the other fields of
    # RecStore's entries are not compared.
    names = [field.name for field in fields(ParameterSharding)]
    names.append("options")
    old_values = [getattr(old, name, None) for name in names]
    new_values = [getattr(new, name, None) for name in names]
    return old_values == new_values


def _check_kernel(
    table: str,
    verb: str,
    sharding: ParameterSharding,
) -> None:
    if sharding.compute_kernel != RECSTORE_KERNEL:
        raise ValueError(
            f"reshard: table {table!r} {verb} on TorchRec's kernel"
            f" {sharding.compute_kernel!r}, whose rows cannot move in place:"
            " place it in a collection of its own, whose plan does not"
            " change, or load a checkpoint into a model with the new plan"
        )


def _check_frozen(
    table: str,
    old: ParameterSharding,
    new: ParameterSharding,
) -> None:
    was_frozen = _is_frozen(old)
    if was_frozen is not _is_frozen(new):
        old_mode = "frozen" if was_frozen else "trained"
        new_mode = "trained" if was_frozen else "frozen"
        raise ValueError(
            f"reshard: table {table!r} is {old_mode}, and would be {new_mode}, with other"
            " optimizer states: save a checkpoint, and load it into a model"
            " with the new plan"
        )


@dataclass(frozen=True)
class _Place:
    """A shard of the whole table, as the other ranks know it."""

    rank: int
    number: int  # The number of the shard among the table's shards on its rank.
    columns: range
    routing: BlockRouting | None  # None: all ids belong to the shard.
    dtype: torch.dtype
    rows: int

    @staticmethod
    def of_all_ranks(shards: Sequence[LocalShard], env: ShardingEnv) -> list[_Place]:
        """Returns the places of a table's shards, in the order of the ranks.

        Collective.
        """
        local_places = []
        for number, shard in enumerate(shards):
            table = shard.table
            local_places.append(
                _Place(
                    rank=env.rank,
                    number=number,
                    columns=table.columns,
                    routing=shard.routing,
                    dtype=table.dtype,
                    rows=len(table),
                )
            )
        places: list[_Place] = []
        for places_of_rank in all_gathered(local_places, env):
            places += places_of_rank
        return places


def move_rows(old: RowState, new: RowState) -> None:
    """Moves all rows of a table to empty shards, as a load would.

    The table's clocks and counts move, too.

    Collective.

    Raises the error of any rank on every rank; the rows are then in neither of the
    layouts.
    """
    # Rows leave the old shards while they arrive in the new ones, so that only the rows
    # of one round are in memory twice. Each rank sends one part of each of its shards
    # in a round. If max_rows bounds the table, only one group of shards with the same
    # ids sends parts, of the size of a checkpoint's, so that the new shards get the
    # rows in the order of a load: their evictions depend on it. If the layout does not
    # change, rows are exchanged without copies.
    env = old.env
    local_states = [shard.state() for shard in old.shards]
    is_same_layout = _layout(old) == _layout(new)
    gathered = all_gathered((local_states, is_same_layout), env)
    states: list[TableState] = []
    for states_of_rank, _ in gathered:
        states += states_of_rank
    state = TableState.merged(states)
    left_ids = _left_ids(old, new)

    if all(is_same for _, is_same in gathered):
        with refused_together(env):
            for source, target in zip(old.shards, new.shards, strict=True):
                target.table.exchange_rows(source.table, record_other=False)
                target.table.set_state(state.owned(target.owned))
    else:
        _stream(old, new, state)

    if left_ids is not None:
        for shard in new.shards:
            ids_of_shard = left_ids.owned(shard.owned)
            shard.table.add_left_ids(ids_of_shard)


def _layout(
    state: RowState,
) -> list[tuple[range, TableOptions, BlockRouting | None]]:
    """Returns what determines the rows of each of this rank's shards."""
    return [
        (
            shard.table.columns,
            # The host has all rows of any number on a device.
            replace(shard.table.options, device_rows=None),
            shard.routing,
        )
        for shard in state.shards
    ]


def _left_ids(old: RowState, new: RowState) -> LeftIds | None:
    """Returns the ids that have left the old shards.

    Returns None if one of the layouts does not record them.

    Collective.
    """
    if old.options.left_ids is None or new.options.left_ids is None:
        return None
    with refused_together(old.env):
        record = LeftIds.merged(shard.table.left_ids() for shard in old.shards)
    return LeftIds.merged(all_gathered(record, old.env))


def _stream(
    old: RowState,
    new: RowState,
    state: TableState,
) -> None:
    """Moves the rows from shard to shard in rounds, each of them in messages."""
    env = old.env
    sources = _Place.of_all_ranks(old.shards, env)
    places = _Place.of_all_ranks(new.shards, env)
    with refused_together(env):
        rows = _rows_of_groups(old.name, sources)
        groups = list(rows)
        # The statistics of the tables themselves do not count the moved rows as new
        # ones, as after a load.
        arriving = [shard.table.empty_copy() for shard in new.shards]
        for shard, table in zip(new.shards, arriving, strict=True):
            table.set_state(state.owned(shard.owned))
        senders = []
        for shard in old.shards:
            group = groups.index(shard.routing)
            senders.append(_Sender(shard, group, new.options))

    is_bounded = new.options.max_rows is not None
    part_bytes = PART_BYTES if is_bounded else _MESSAGE_BYTES
    part_rows = rows_in(
        part_bytes,
        old.dim,
        sources[0].dtype,
        old.optimizer,
    )
    parts = [ceil_div(rows[routing], part_rows) for routing in groups]
    received: list[_Message] = []

    def write_and_take(active: set[int], part: range) -> list[list[_Message]]:
        # Ranks wait for each other once for both: the rows of the last round are
        # written, and those of the next leave.
        nonlocal received
        _write(old.name, arriving, received)
        received = []
        return _by_rank(senders, active, part, places, env)

    for active, number in _rounds(parts, one_group=is_bounded):
        begin = number * part_rows
        part = range(begin, begin + part_rows)
        received = _exchanged(partial(write_and_take, active, part), env)

    with refused_together(env):
        _write(old.name, arriving, received)
        _take_over(new, arriving)


def _rows_of_groups(
    table: str,
    places: Sequence[_Place],
) -> dict[BlockRouting | None, int]:
    """Returns the number of rows of each group of shards of a table.

    The shards of a group have the same ids. That of the first columns counts them.
    """
    rows: dict[BlockRouting | None, int] = {}
    for place in places:
        if place.columns.start == 0:
            rows[place.routing] = place.rows
    for place in places:
        if place.rows != rows.get(place.routing):
            raise RuntimeError(
                f"RecStore table {table!r}: its column shards hold different numbers of"
                " rows"
            )
    return rows


def _take_over(new: RowState, arriving: Sequence[Table]) -> None:
    """Gives the rows that have arrived to the new shards."""
    # Rows that had no room in the new shards have left the table.
    evicted = []
    if new.options.left_ids is not None:
        evicted = [table.left_ids() for table in arriving]
    new_tables = [shard.table for shard in new.shards]
    exchange_all(zip(new_tables, arriving, strict=True))
    for table, left_ids in zip(new_tables, evicted, strict=False):
        table.add_left_ids(left_ids)


def _rounds(parts: Sequence[int], *, one_group: bool) -> Iterator[tuple[set[int], int]]:
    """Yields the groups that send a part in each round, and the number of the part.

    Args:
        parts: The number of parts of each group.
        one_group: Whether the groups send one after the other.
    """
    if one_group:
        for group, count in enumerate(parts):
            for number in range(count):
                yield {group}, number
        return
    for number in range(max(parts, default=0)):
        groups = {group for group, count in enumerate(parts) if number < count}
        yield groups, number


class _Sender:
    """A shard whose rows leave it in ascending order of their ids.

    ``group`` is the number of the shard's group, and ``options`` are those of the new
    shards.
    """

    def __init__(
        self,
        shard: LocalShard,
        group: int,
        options: TableOptions,
    ) -> None:
        self.table = shard.table
        self.group = group
        self._options = options
        self._ids = shard.table.ids()
        self._since_shrink = 0

    def take(self, places: range) -> Part:
        """Removes some rows from the shard, and returns them."""
        part = self.table.part(self._ids[places.start : places.stop])
        self.table.remove(part.ids)
        self._since_shrink += len(part)
        if self._since_shrink * _SHRINKS >= len(self._ids):
            self.table.shrink()
            self._since_shrink = 0
        return part.with_frequencies_of(self.table.options, self._options)


def _by_rank(
    senders: Sequence[_Sender],
    active: set[int],
    part: range,
    places: Sequence[_Place],
    env: ShardingEnv,
) -> list[list[_Message]]:
    """Takes the rows of a round from this rank's shards.

    Returns them by the rank of the shard that gets them.
    """
    sent: list[list[_Message]] = [[] for _ in range(env.world_size)]
    for sender in senders:
        if sender.group not in active:
            continue
        rows = sender.take(part)
        owned: dict[BlockRouting | None, Part] = {None: rows}
        for place in places:
            begins_after = place.columns.start >= rows.columns.stop
            ends_before = rows.columns.start >= place.columns.stop
            if begins_after or ends_before:
                continue
            routing = place.routing
            if routing is not None and routing not in owned:
                owned[routing] = rows.owned(routing.owned)
            owned_rows = owned[routing]
            if len(owned_rows):
                message = (
                    place.number,
                    sender.group,
                    owned_rows.cut(place.columns),
                )
                sent[place.rank].append(message)
    return sent


def _write(
    name: str,
    tables: Sequence[Table],
    received: Sequence[_Message],
) -> None:
    parts: dict[tuple[int, int], list[Part]] = {}
    for number, group, part in received:
        parts.setdefault((group, number), []).append(part)
    for group, number in sorted(parts):
        table = tables[number]
        try:
            part = Part.joined(parts[group, number], table.columns)
        except ValueError as error:
            raise RuntimeError(f"RecStore table {name!r}: its {error}") from error
        table.write(part)


def _exchanged(
    take: Callable[[], list[list[_Message]]],
    env: ShardingEnv,
) -> list[_Message]:
    """Sends the result of ``take``, and returns the rows for this rank.

    ``take`` returns rows by receiving rank.

    Collective.
    """
    group = env.process_group
    if group is None or env.world_size == 1:
        return take()[0]

    device = torch.device("cpu")
    if device not in group._device_types:
        device = torch.device("cuda")
    with refused_together(env):
        messages_to_ranks = take()
        parts = []
        for messages in messages_to_ranks:
            parts += [part for _, _, part in messages]
        packed, part_sizes = Part.packed(parts)
        packed = packed.to(device)

    sent = _headers(messages_to_ranks, part_sizes)
    arriving = [headers[env.rank] for headers in all_gathered(sent, env)]
    sent_bytes = [_bytes_of(headers) for headers in sent]
    arriving_bytes = [_bytes_of(headers) for headers in arriving]
    with refused_together(env):  # A rank without memory would keep the others waiting.
        buffer = torch.empty(sum(arriving_bytes), dtype=torch.uint8, device=device)
    try:
        dist.all_to_all_single(
            buffer,
            packed,
            arriving_bytes,
            sent_bytes,
            group=group,
        )
    except RuntimeError as error:
        reason = str(error).strip()
        raise RuntimeError(f"a rank of the job has died: {reason}") from error

    received: list[_Message] = []
    begin = 0
    buffer = buffer.cpu()
    for headers in arriving:
        for header in headers:
            end = begin + header.bytes
            part = Part.from_bytes(buffer[begin:end])
            received.append((header.number, header.group, part))
            begin = end
    return received


class _Header(NamedTuple):
    """What a rank tells of a message before it sends the rows."""

    number: int  # The number of the receiving shard on its rank.
    group: int  # The number of the sender's group.
    bytes: int  # The size of the packed rows.


def _bytes_of(headers: Iterable[_Header]) -> int:
    return sum(header.bytes for header in headers)


def _headers(
    messages_to_ranks: Sequence[Sequence[_Message]],
    part_sizes: Iterable[int],
) -> list[list[_Header]]:
    """Returns the headers of the messages to each rank.

    ``part_sizes`` are the sizes of all messages, in the same order.
    """
    sizes = iter(part_sizes)
    headers_to_ranks = []
    for messages in messages_to_ranks:
        headers = []
        for number, group, _ in messages:
            headers.append(_Header(number, group, next(sizes)))
        headers_to_ranks.append(headers)
    return headers_to_ranks
