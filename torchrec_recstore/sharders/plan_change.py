"""The change of a sharded collection's plan in place: its rows move between shards,
part by part.

Tests: tests/distributed/test_reshard.py, tests/distributed/test_reshard_one_rank.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

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

# The rows of a shard that are read, sent and written at a time.
_MESSAGE_BYTES = 1 << 22
# The memory of a shard is given back after each of this many parts of its rows has
# left.
_SHRINKS = 16

# The number of the shard that receives rows, on its rank; the number of the sender's
# group; and the rows.
_Message = tuple[int, int, Part]


class ReshardableCollection(CollectionSeams):
    """A mixin for TorchRec's sharded collections, whose plan it can change if all of
    their tables are in RecStore.
    """

    recstore_state: ModuleState
    """The rows of this module's RecStore tables, for ``state_dict`` and checkpoints."""
    source: tuple[nn.Module, ModuleSharder[nn.Module]] | None = None
    """The unsharded collection and the sharder that has sharded it."""
    records: tuple[Record, ...] = ()
    """The functions that :meth:`register_post_lookup_tracker_fn` has registered."""

    def recstore_table_names(self) -> list[str]:
        """Returns the names of the RecStore tables of the plan, in the order of the
        configs, the same on every rank.
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
        """Returns whether a train pipeline has distributed batches with the present
        plan, and not looked them up.
        """
        raise NotImplementedError

    def refuse_begun(self) -> None:
        """Raises ``ValueError`` if a train pipeline would look up batches that it
        distributed with the present plan.
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
        self, plan: Mapping[str, ParameterSharding], path: str | None = None
    ) -> Change | None:
        """Returns the change to another plan, or None for the present one.

        Raises ValueError if it cannot be made.
        """
        self.recstore_state.copies.check_usable()
        if self.source is not None:
            module, sharder = self.source
            plan = with_options(plan, sharder.shardable_parameters(module))
        old = self.module_sharding_plan
        known = set(self.names_of_tables)
        if plan.keys() != known:
            missing, unknown = sorted(known - plan.keys()), sorted(plan.keys() - known)
            raise ValueError(
                f"reshard: the plan of {sorted(known)} has no table(s) {missing}, and"
                f" unknown {unknown}"
            )
        if all(_same(old[name], plan[name]) for name in known):
            return None
        for name in self.names_of_tables:
            for what, entry in (("is", old[name]), ("would be", plan[name])):
                if entry.compute_kernel != RECSTORE_KERNEL:
                    raise ValueError(
                        f"reshard: table {name!r} {what} on TorchRec's kernel"
                        f" {entry.compute_kernel!r}, whose rows cannot move in place:"
                        " place it in a collection of its own, whose plan does not"
                        " change, or load a checkpoint into a model with the new plan"
                    )
        for name in self.names_of_tables:
            was, becomes = (_is_frozen(entry) for entry in (old[name], plan[name]))
            if was is not becomes:
                now, then = ("frozen", "trained") if was else ("trained", "frozen")
                raise ValueError(
                    f"reshard: table {name!r} is {now}, and would be {then}, with other"
                    " optimizer states: save a checkpoint, and load it into a model"
                    " with the new plan"
                )
        if self.source is None:
            raise ValueError(
                f"reshard: the collection of {sorted(known)} was not sharded by a"
                " RecStore sharder"
            )
        refuse_pipelined(self, known)
        for name, table in self.recstore_state.tables.items():
            if is_shared(table.options.cold_store):
                raise ValueError(
                    f"reshard: the rows of table {name!r} are in"
                    f" {table.options.cold_store!r}, which is shared: call"
                    " flush_tables, and start the model anew with the new plan"
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
        """Returns a new sharded module of the same tables with another plan, without
        rows.

        Collective.
        """
        assert self.source is not None
        module, sharder = self.source
        plan: Any = change.plan
        fresh: Any = sharder.shard(
            on_meta_device(module), plan, self.ranks_env, self.stock_device, change.path
        )
        fresh.source = self.source
        return fresh  # type: ignore[no-any-return]

    def become_resharded(self, fresh: ReshardableCollection) -> None:
        """Becomes the module ``fresh``, to which the rows have moved, but stays the
        same object.
        """
        records, state = self.records, self.recstore_state
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
    """Raises ``ValueError`` if a train pipeline has begun batches for the ``tables`` of
    a sharded module.
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
    names = [*(each.name for each in fields(ParameterSharding)), "options"]
    return all(getattr(old, name, None) == getattr(new, name, None) for name in names)


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
        described = [
            (s.table.columns, s.routing, s.table.dtype, len(s.table)) for s in shards
        ]
        gathered = enumerate(all_gathered(described, env))
        return [
            _Place(rank, number, *each)
            for rank, of_rank in gathered
            for number, each in enumerate(of_rank)
        ]


def move_rows(old: RowState, new: RowState) -> None:
    """Moves all rows of a table, with its clocks and counts, to empty shards, as a load
    would.

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
    before, after = (
        [(s.table.columns, s.table.options, s.routing) for s in each.shards]
        for each in (old, new)
    )
    states = all_gathered(
        ([shard.state() for shard in old.shards], before == after), env
    )
    state = TableState.merged(each for of_rank, _ in states for each in of_rank)
    left = _left_ids(old, new)
    if all(same for _, same in states):
        with refused_together(env):
            for source, target in zip(old.shards, new.shards, strict=True):
                target.table.exchange_rows(source.table, record_other=False)
                target.table.set_state(state.owned(target.owned))
    else:
        _stream(old, new, state)
    if left is not None:
        for shard in new.shards:
            shard.table.add_left_ids(left.owned(shard.owned))


def _left_ids(old: RowState, new: RowState) -> LeftIds | None:
    """Returns the ids that have left the old shards, or None if one of the layouts does
    not record them.

    Collective.
    """
    if old.options.left_ids is None or new.options.left_ids is None:
        return None
    with refused_together(old.env):
        records = [shard.table.left_ids() for shard in old.shards]
    return LeftIds.merged(
        record for of_rank in all_gathered(records, old.env) for record in of_rank
    )


def _stream(old: RowState, new: RowState, state: TableState) -> None:
    env = old.env
    sources, places = (
        _Place.of_all_ranks(old.shards, env),
        _Place.of_all_ranks(new.shards, env),
    )
    rows = {place.routing: place.rows for place in sources if place.columns.start == 0}
    groups = list(rows)
    with refused_together(env):
        if any(place.rows != rows.get(place.routing) for place in sources):
            raise RuntimeError(
                f"RecStore table {old.name!r}: its column shards hold different numbers"
                " of rows"
            )
        # The statistics of the tables themselves do not count the moved rows as new
        # ones, as after a load.
        arriving = [shard.table.empty_copy() for shard in new.shards]
        for shard, table in zip(new.shards, arriving, strict=True):
            table.set_state(state.owned(shard.owned))
        senders = [
            _Sender(shard, groups.index(shard.routing), new.options)
            for shard in old.shards
        ]
    bounded = new.options.max_rows is not None
    size = rows_in(
        PART_BYTES if bounded else _MESSAGE_BYTES,
        old.dim,
        sources[0].dtype,
        old.optimizer,
    )
    parts = [-(-rows[routing] // size) for routing in groups]
    rounds = [({g}, i) for g, count in enumerate(parts) for i in range(count)]
    if not bounded:
        rounds = [
            ({g for g, count in enumerate(parts) if i < count}, i)
            for i in range(max(parts, default=0))
        ]
    received: list[_Message] = []

    def write_and_take(active: set[int], part: range) -> list[list[_Message]]:
        # Ranks wait for each other once for both: the rows of the last round are
        # written, and those of the next leave.
        nonlocal received
        _write(old.name, arriving, received)
        received = []
        return _by_rank(senders, active, part, places, env)

    for active, number in rounds:
        part = range(number * size, (number + 1) * size)
        received = _exchanged(partial(write_and_take, active, part), env)
    with refused_together(env):
        _write(old.name, arriving, received)
        # Rows that had no room in the new shards have left the table.
        evicted = [
            table.left_ids() for table in arriving if new.options.left_ids is not None
        ]
        exchange_all(zip([shard.table for shard in new.shards], arriving, strict=True))
        for shard, left in zip(new.shards, evicted, strict=False):
            shard.table.add_left_ids(left)


class _Sender:
    """A shard whose rows leave it in ascending order of their ids.

    ``group`` is the number of the shard's group, and ``options`` are those of the new
    shards.
    """

    def __init__(self, shard: LocalShard, group: int, options: TableOptions) -> None:
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
    """Takes the rows of a round from this rank's shards, and returns them by the rank
    of the shard that gets them.
    """
    sent: list[list[_Message]] = [[] for _ in range(env.world_size)]
    for sender in senders:
        if sender.group not in active:
            continue
        taken = sender.take(part)
        owned: dict[BlockRouting | None, Part] = {None: taken}
        for place in places:
            if (
                place.columns.start >= taken.columns.stop
                or taken.columns.start >= place.columns.stop
            ):
                continue
            if place.routing is not None and place.routing not in owned:
                owned[place.routing] = taken.owned(place.routing.owned)
            if len(owned[place.routing]):
                sent[place.rank].append(
                    (
                        place.number,
                        sender.group,
                        owned[place.routing].cut(place.columns),
                    )
                )
    return sent


def _write(name: str, tables: Sequence[Table], received: Sequence[_Message]) -> None:
    parts: dict[tuple[int, int], list[Part]] = {}
    for number, group, part in received:
        parts.setdefault((group, number), []).append(part)
    for group, number in sorted(parts):
        try:
            part = Part.joined(parts[group, number], tables[number].columns)
        except ValueError as error:
            raise RuntimeError(f"RecStore table {name!r}: its {error}") from error
        tables[number].write(part)


def _exchanged(
    take: Callable[[], list[list[_Message]]], env: ShardingEnv
) -> list[_Message]:
    """Sends the result of ``take``, rows by receiving rank, and returns the rows for
    this rank.

    Collective.
    """
    group = env.process_group
    if group is None or env.world_size == 1:
        return take()[0]
    device = (
        torch.device("cpu")
        if torch.device("cpu") in group._device_types
        else torch.device("cuda")
    )
    with refused_together(env):
        sent = take()
        packed, of_parts = Part.packed(
            [part for to_rank in sent for _, _, part in to_rank]
        )
        packed, left = packed.to(device), iter(of_parts)
    described = [
        [(number, of_group, next(left)) for number, of_group, _ in to_rank]
        for to_rank in sent
    ]
    sizes = [sum(size for _, _, size in to_rank) for to_rank in described]
    arriving = [of_rank[env.rank] for of_rank in all_gathered(described, env)]
    expected = [sum(size for _, _, size in messages) for messages in arriving]
    with refused_together(env):  # A rank without memory would keep the others waiting.
        buffer = torch.empty(sum(expected), dtype=torch.uint8, device=device)
    try:
        dist.all_to_all_single(buffer, packed, expected, sizes, group=group)
    except RuntimeError as error:
        raise RuntimeError(
            f"a rank of the job has died: {str(error).strip()}"
        ) from error
    received, begin = [], 0
    buffer = buffer.cpu()
    for number, of_group, size in (
        message for messages in arriving for message in messages
    ):
        received.append(
            (number, of_group, Part.from_bytes(buffer[begin : begin + size]))
        )
        begin += size
    return received
