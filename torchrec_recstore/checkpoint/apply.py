"""Applies a delta of another trainer to a model that trains, in place.

Tests: tests/checkpoint/test_apply_delta.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torchrec.distributed.types import ShardingEnv

from torchrec_recstore.checkpoint.files import CheckpointError
from torchrec_recstore.checkpoint.info import CheckpointInfo, read_chain, read_info
from torchrec_recstore.checkpoint.reader import blocks_by_rank, listed_ids, saved_state
from torchrec_recstore.checkpoint.sources import Source, check_sources, find_sources
from torchrec_recstore.checkpoint.warm_start import WarmStart
from torchrec_recstore.options import is_shared
from torchrec_recstore.sharders.gather import (
    all_gathered,
    refused_together,
    whole_environment,
)
from torchrec_recstore.sharders.layout import LocalShard
from torchrec_recstore.sharders.model_tables import (
    EagerModelTable,
    ModelTable,
    recstore_tables,
)
from torchrec_recstore.store import Part, TableState
from torchrec_recstore.store.arguments import among

# The numbers in TableState.times before the ticks. See csrc/bounds/wall_clock.h.
_TIMES_HEADER = 7


def apply_delta(
    model: nn.Module,
    path: str | Path,
    *,
    strict: bool = True,
) -> CheckpointInfo:
    """Writes the rows of another trainer's delta into a model, which goes on training.

    Collective.

    The delta is a checkpoint of ``save_checkpoint(..., delta_of=base)``, of any world
    size and plan. Each row of it is written with its weights and optimizer states,
    whether this model has the row or not: the delta's row replaces the changes that
    this model has made to it. The ids that had left the other trainer's table since the
    base, for any reason, are removed. All other rows stay, also those that this model
    has made or changed itself. Call it between steps, on every rank. See
    docs/checkpoint.md.

    A row keeps its age in steps, but is never older than this table's own number of
    steps: ``last_step`` is moved by the difference of the two clocks. ``frequency`` is
    written as it is. The table's own clock, its number of updates, what its admission
    has counted, and the tensors of the model outside of RecStore tables stay as they
    are. The rows need no admission. A table with ``max_rows`` evicts rows as it does
    when it trains. A delta that is saved later contains the rows.

    Args:
        model: ``DistributedModelParallel``, or any module that contains sharded
            modules.
        path: The directory of the delta. If it lists the ids that stay in place of
            those that left (``removal`` of the table is ``"stay"``), its bases must be
            at their paths, too.
        strict: Whether each table of the model must have had the rows of the base: it
            has saved or loaded the base, or loaded or applied a delta whose chain
            contains the base, and its rows were not replaced since. Rows that were
            changed or removed one by one, as ``load_dense_weights`` does, are not
            noticed. No table may have saved, loaded or applied a delta of the delta,
            because its rows would go back; the newest delta can be applied again. The
            delta must then have the same tables as the model, too. If False, none of
            this is checked, so that ids that left in a delta that was not applied
            remain, and tables that only one of them has are ignored. Default: True.

    Returns:
        The metadata of the delta, with ``training_state``.

    Raises:
        FileNotFoundError: There is no checkpoint at ``path``, or a base that is needed
            is missing.
        CheckpointError: A file is missing or damaged, or does not agree with the
            metadata.
        ValueError: The checkpoint is not a delta; its base is unknown; it is older than
            one that the model has; a table is missing or unknown, has another dim or
            another optimizer state, has a shared cold store, or cannot hold the rows.
        MemoryError: There is no memory for the rows.
        ColdStoreError: A cold store fails. After any of these errors, which are raised
            on every rank, the rows are as they were, except those that a bounded table
            has evicted meanwhile.
        RuntimeError: The rows could not be restored after such an error. The message
            names the table. The call can be repeated.
    """
    env = whole_environment()
    changes: list[_Change] = []
    with refused_together(env):
        info = read_info(path)
        if info.delta_of is None:
            raise ValueError(
                f"apply_delta: {info.path} is a whole checkpoint: load it with"
                " load_checkpoint"
            )

        warm = WarmStart()
        tables = recstore_tables(model)
        sources = find_sources(tables, warm, info, strict=strict)
        check_sources([info], sources, warm, hints=False)
        for source in sources:
            _check_table(source, info, strict=strict)

        bases: Sequence[CheckpointInfo] = []
        removals = {info.tables[source.name].removal for source in sources}
        if "stay" in removals:
            bases = read_chain(path)[:-1]
        for source in sources:
            for shard in source.table.shards:
                changes.append(_change(source, shard, info, bases))

    _check_rows(info, changes, env)
    with refused_together(env):
        for change in changes:
            change.check_room()
    try:
        with refused_together(env):
            for change in changes:
                change.make()
    except Exception as error:
        with refused_together(env):
            for change in changes:
                change.undo(error)
        raise
    for source in sources:
        _note(source.table, info)
    return info


def _note(table: ModelTable | EagerModelTable, info: CheckpointInfo) -> None:
    """Notes that a table has the rows of a delta.

    It lacks some of them if it has not had those of the base.
    """
    assert isinstance(table, ModelTable)
    assert info.delta_of is not None
    state = table.module.recstore_state
    base = info.delta_of.checksum
    is_complete = state.has_had_rows_of(table.config_name, base)
    state.note_rows_of(
        table.config_name,
        info.checksum,
        base,
        is_complete=is_complete,
    )


@dataclass
class _Change:
    """What a delta changes in a shard."""

    name: str  # of the table in the delta
    shard: LocalShard
    removed: Tensor  # (N,) int64, distinct
    parts: list[Part]  # of the shard's columns, with ids that belong to the shard
    replaced: Part | None = None  # the rows that are replaced or removed
    added: Tensor | None = None  # (N,) int64: the ids that had no row

    @property
    def ids(self) -> Tensor:
        """The ids of the rows that are written: (N,) int64."""
        no_ids = torch.empty(0, dtype=torch.int64)
        return torch.cat([no_ids, *(part.ids for part in self.parts)])

    def check_room(self) -> None:
        """Refuses new rows if the table has no room for them, and cannot make room.

        A table with eviction or a cold store makes room.
        """
        table = self.shard.table
        options = table.options
        makes_room = options.eviction is not None or options.cold_store is not None
        if options.max_rows is None or makes_room:
            return
        ids = self.ids
        leaving_ids = self._leaving(ids)
        is_removed = table.contains(leaving_ids)
        has_row = table.contains(ids)
        n_removed = int(is_removed.sum())
        n_added = int((~has_row).sum())
        rows = len(table) - n_removed + n_added
        if rows > options.max_rows:
            raise ValueError(
                f"table {table.name!r} would have {rows} rows in this shard with the"
                f" delta, and max_rows is {options.max_rows} here: set eviction or a"
                " cold_store, or a larger max_rows"
            )

    def make(self) -> None:
        """Removes and writes rows, and remembers the rows as they were."""
        table = self.shard.table
        ids = self.ids
        changed = torch.cat([ids, self._leaving(ids)])
        has_row = table.contains(changed)
        self.replaced = table.part(changed[has_row])
        self.added = changed[~has_row]

        table.remove(self.removed)
        for part in self.parts:
            table.write(part)

    def _leaving(self, written: Tensor) -> Tensor:
        """Returns the removed ids that are not written again.

        An id can have left and come back.
        """
        is_written = among(self.removed, written.sort().values)
        return self.removed[~is_written]

    def undo(self, error: Exception) -> None:
        """Restores the rows after an error. Raises RuntimeError if that fails."""
        if self.replaced is None or self.added is None:
            return
        table = self.shard.table
        try:
            table.remove(self.added)
            table.write(self.replaced)
        except Exception as failure:
            raise RuntimeError(
                f"table {table.name!r} has only some of the rows of the delta: apply it"
                " again, or load a checkpoint. The delta could not be applied"
                f" ({error}), nor taken back ({failure})"
            ) from error


def _check_table(
    source: Source,
    info: CheckpointInfo,
    *,
    strict: bool,
) -> None:
    table = source.table
    assert isinstance(table, ModelTable)
    store = table.options.cold_store
    if is_shared(store):
        raise ValueError(
            f"apply_delta: the rows of table {table.name!r} lie in {store!r}, which is"
            " shared: apply the delta to a table with rows of its own"
        )
    assert info.delta_of is not None
    if not strict:
        return
    state = table.module.recstore_state
    if not state.has_had_rows_of(table.config_name, info.delta_of.checksum):
        raise ValueError(
            f"apply_delta: {info.path} is a delta of {info.base}, which table"
            f" {table.name!r} of this model has neither saved nor loaded, nor applied"
            " (or its rows were replaced since): load or apply that one first;"
            " strict=False writes the rows of the delta all the same"
        )
    if state.has_had_delta_of(table.config_name, info.checksum):
        raise ValueError(
            f"apply_delta: {info.path} is older than the rows of table {table.name!r}"
            " of this model, which has saved, loaded or applied a delta of it:"
            " load_checkpoint goes back to it; strict=False writes the rows of the"
            " older delta all the same"
        )


def _change(
    source: Source,
    shard: LocalShard,
    info: CheckpointInfo,
    bases: Sequence[CheckpointInfo],
) -> _Change:
    """Reads and checks the files of a shard."""
    table = shard.table
    saved = saved_state(info, source.name)
    saved_options = info.tables[source.name].options
    state = table.state()
    parts = []
    without_state = source.without_state(info, WarmStart())
    for part in _parts(source.name, shard, info, states=without_state is None):
        if without_state is not None:
            part = without_state.part(part, table.columns)
        part = part.with_frequencies_of(saved_options, table.options)
        last_steps = moved_last_steps(part.rows["last_step"], saved, state)
        rows = {**part.rows, "last_step": last_steps}
        parts.append(replace(part, rows=rows))

    removed = _removed_ids(source.name, shard, info, bases)
    change = _Change(source.name, shard, removed, parts)
    steps_between_ids = change.ids.sort().values.diff()
    if bool((steps_between_ids == 0).any()):
        raise CheckpointError(
            f"{info.path}: table {source.name!r} has an id in several parts"
        )
    return change


def _parts(
    name: str,
    shard: LocalShard,
    info: CheckpointInfo,
    *,
    states: bool,
) -> Iterator[Part]:
    columns = shard.table.columns
    owned = None if shard.routing is None else shard.owned
    for of_rank in blocks_by_rank(info, name):
        for block in of_rank:
            if owned is None or owned(block.ids(columns)).any():
                block.open(columns, verify=True)
                part = block.part(columns, states=states)
                yield part.owned(owned)


def _removed_ids(
    name: str,
    shard: LocalShard,
    info: CheckpointInfo,
    bases: Sequence[CheckpointInfo],
) -> Tensor:
    """Returns the ids of a shard that left between the base and the delta: (N,) int64."""
    saved = info.tables[name]
    listed = [torch.empty(0, dtype=torch.int64)]
    for part in saved.removed:
        ids = listed_ids(info, part, verify=True)
        listed.append(ids[shard.owned(ids)])
    if saved.removal == "left":
        return torch.cat(listed)
    base_ids = _ids_of(name, shard, bases)
    return base_ids[~among(base_ids, torch.cat(listed).sort().values)]


def _ids_of(
    name: str,
    shard: LocalShard,
    chain: Sequence[CheckpointInfo],
) -> Tensor:
    """Returns the ids of a shard in a chain of checkpoints: (N,) int64, ascending."""
    ids = torch.empty(0, dtype=torch.int64)
    columns = range(1)  # All columns have the same ids.
    for info in chain:
        if name not in info.tables:
            continue
        saved = info.tables[name]
        if info.delta_of is not None:
            listed = [torch.empty(0, dtype=torch.int64)]
            for part in saved.removed:
                listed.append(listed_ids(info, part, verify=True))
            is_listed = among(ids, torch.cat(listed).sort().values)
            ids = ids[is_listed if saved.removal == "stay" else ~is_listed]
        for rank_blocks in blocks_by_rank(info, name):
            for block in rank_blocks:
                block_ids = block.open(columns, verify=True)
                block_ids = block_ids[shard.owned(block_ids)]
                old_ids = ids[~among(ids, block_ids)]
                ids = torch.cat([old_ids, block_ids]).sort().values
    return ids


def _check_rows(
    info: CheckpointInfo,
    changes: Sequence[_Change],
    env: ShardingEnv,
) -> None:
    """Refuses the delta if the shards do not get as many rows as the metadata says.

    Collective.
    """
    local_rows: Counter[str] = Counter()  # by the name of the table in the delta
    for change in changes:
        if change.shard.table.columns.start == 0:
            local_rows[change.name] += len(change.ids)
    rows: Counter[str] = Counter()
    for rank_rows in all_gathered(local_rows, env):
        rows.update(rank_rows)
    with refused_together(env):
        for name, n_rows in rows.items():
            saved = info.tables[name]
            expected = 0
            for part in saved.parts:
                if part.columns == saved.columns[0]:
                    expected += part.rows
            if n_rows != expected:
                raise CheckpointError(
                    f"{info.path}: table {name!r} has {n_rows} rows, and should have"
                    f" {expected}"
                )


def moved_last_steps(
    last_step: Tensor,
    saved: TableState,
    current: TableState,
) -> Tensor:
    """Returns the last steps of rows, moved from another table's clock to this one's.

    A row keeps its age in steps, but is never older than ``current.steps``. If rows of
    both tables expire after a time, the row is younger where it would otherwise expire
    earlier than there.

    Args:
        last_step: (N,) int64. The last steps by the clock of ``saved``.
        saved: The state of the table that the rows come from.
        current: The state of the table that the rows are written to.
    """
    age = saved.steps - last_step
    moved = (current.steps - age).clamp(0, current.steps)
    if saved.times is None or current.times is None:
        return moved
    steps, times = _ticks(saved.times)
    # All steps before a tick's step were made before its time, and all steps before the
    # save.
    save_time = torch.tensor([saved.times[1]])
    ends = torch.cat([times, save_time])
    next_ticks = torch.searchsorted(steps, last_step, right=True)
    made_before = ends[next_ticks]

    # The steps from a tick's step on were made at its time or later.
    current_steps, current_times = _ticks(current.times)
    first_step = torch.zeros(1, dtype=torch.int64)
    starts = torch.cat([first_step, current_steps])
    earlier_ticks = torch.searchsorted(
        current_times,
        made_before,
        right=True,
    )
    return moved.maximum(starts[earlier_ticks]).clamp(0, current.steps)


def _ticks(times: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Returns the steps and the times of a state's ticks, both (T,) int64.

    They are in ascending order.
    """
    pairs = torch.tensor(times[_TIMES_HEADER:], dtype=torch.int64)
    steps, tick_times = pairs.view(-1, 2).unbind(dim=1)
    return steps.contiguous(), tick_times.contiguous()
