"""Loads a checkpoint into new tables, which then replace those of the model.

They replace them when every rank has succeeded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor, nn
from torchrec.distributed.types import ShardingEnv

from torchrec_recstore.checkpoint.files import check_file, read_tensors
from torchrec_recstore.checkpoint.fold import check_rows
from torchrec_recstore.checkpoint.info import DENSE, CheckpointInfo, read_chain
from torchrec_recstore.checkpoint.reader import (
    held_rows,
    load_rows,
    rows_to_read,
    saved_state,
)
from torchrec_recstore.checkpoint.sources import Source, check_sources, find_sources
from torchrec_recstore.checkpoint.warm_start import RowFunction, WarmStart
from torchrec_recstore.checkpoint.writer import Progress, reporting
from torchrec_recstore.optim import state_names
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
    check_dense,
    dense_tensors,
    eager_tables,
    load_dense,
    recstore_tables,
)
from torchrec_recstore.store import Table
from torchrec_recstore.store.table import check_replaceable, exchange_all


def load_checkpoint(
    model: nn.Module,
    path: str | Path,
    *,
    strict: bool = True,
    optimizer: bool = True,
    tables: Iterable[str] | None = None,
    rename: Mapping[str, str] | None = None,
    rows: Mapping[str, RowFunction] | None = None,
    progress: Progress | None = None,
) -> CheckpointInfo:
    """Loads a checkpoint of ``save_checkpoint``, at any world size and with any plan.

    Collective.

    Afterwards the model holds the rows of the checkpoint and no other rows. If the rows
    of a table exceed its ``max_rows``, the excess rows are written to the table's cold
    store, and a table without a cold store keeps the rows that its eviction policy
    would keep. The whole checkpoint is read and checked before the model changes. Until
    then the old rows and the new rows are both in memory. The result is the metadata,
    with ``training_state``.

    With ``optimizer``, ``tables``, ``rename`` or ``rows``, the load is a warm start: it
    takes over a part of the checkpoint. See docs/checkpoint.md. A delta of the
    checkpoint can then only be saved if all tables were loaded with their optimizer
    states and under their own names.

    Args:
        model: ``DistributedModelParallel``, or any module that contains sharded modules
            or the modules without sharding of :mod:`torchrec_recstore.modules`. Each
            rank loads all rows of the latter.
        path: The checkpoint's directory. The base of a delta must be at the same path
            relative to the delta as when it was saved.
        strict: Whether the checkpoint and the model must have the same RecStore tables
            and the same other tensors. If False, tables and tensors that only one of
            them has are ignored, and a table with a shared cold store keeps its rows
            and loads only its clocks and the counts of its admission. Default: True.
        optimizer: Whether the optimizer states of the rows and the numbers of updates
            are loaded. If False, the states of all rows and the number of updates start
            at zero, as in a new table, and the optimizer of the checkpoint may be
            another one. Default: True.
        tables: The names of the model's tables that are loaded. All other tables and
            all other tensors of the model stay as they are, and ``strict`` does not
            compare them. Default: None, which means all tables and the other tensors.
        rename: Tables with another name in the checkpoint: ``{"name in the checkpoint":
            "name in the model"}``. A table of the checkpoint that is renamed is not
            loaded under its own name. Default: None.
        rows: Functions that make the rows of a table, which may have another dim in the
            checkpoint, by the name of the table in the model. Each is called with
            weights, (n, dim of the checkpoint) float32, n at most 65,536, and returns
            weights, (n, dim of the model) float32, that are finite. It is called
            without gradients, on every rank with a shard of the table, with the rows of
            this rank; it must return the same row for the same weights. It needs
            ``optimizer=False``. Default: None.
        progress: A callback that is called after each part of 32 MB with the number of
            rows that are read and the number of all rows in the parts that this rank
            reads. Both include rows of other ranks' shards.

    Raises:
        FileNotFoundError: There is no checkpoint at ``path``, or the base of a delta is
            missing.
        CheckpointError: A file is missing or damaged, the files do not agree with the
            metadata, or the format is that of another version.
        TypeError: ``optimizer``, ``tables``, ``rename`` or ``rows`` is of another type,
            or a function returns no tensor.
        ValueError: The model does not fit: a table is missing or unknown, or has
            another dim or another optimizer state; a dense tensor has another shape; or
            a save of the model is still being written. A name in ``tables``, ``rename``
            or ``rows`` is unknown, or two tables would be loaded into one. A function
            returns weights of another shape or dtype, or weights that are not finite.
        MemoryError: There is no memory for the rows.
        ColdStoreError: A cold store fails. All of these errors are raised on every
            rank, and the model is unchanged.
    """
    env = whole_environment()
    loaded: list[_LoadedShard] = []
    with refused_together(env):
        warm = WarmStart.checked(optimizer, tables, rename, rows)
        chain = read_chain(path)
        info = chain[-1]
        sharded = recstore_tables(model)
        eager = eager_tables(model, sharded)
        sources = find_sources([*sharded, *eager], warm, info, strict=strict)
        check_sources(chain, sources, warm)
        dense = {}
        model_dense = {}
        if warm.tables is None:
            model_dense = dense_tensors(model, sharded, eager)
            dense = _saved_dense(chain, check_bases=env.rank == 0)
            check_dense(dense, model_dense, strict=strict)
        left_alone = [
            source for source in sources if is_shared(source.table.options.cold_store)
        ]
        _check_shared(left_alone, strict=strict)
        replaced = [source for source in sources if source not in left_alone]
        total_rows = 0
        for source in replaced:
            n_shards = len(source.table.shards)
            total_rows += n_shards * rows_to_read(chain, source.name)
        on_rows = reporting(progress, total_rows)
        for source in replaced:
            for shard in source.table.shards:
                loaded.append(_read_shard(source, shard, chain, warm, on_rows))
        check_replaceable(loaded_shard.shard.table for loaded_shard in loaded)
    _check_rows(chain, loaded, env)
    exchange_all(
        (loaded_shard.shard.table, loaded_shard.fresh) for loaded_shard in loaded
    )
    load_dense(dense, model_dense)
    for source in left_alone:
        _load_clocks(source, info, warm)
    for source in replaced:
        if isinstance(source.table, EagerModelTable):
            source.table.module.forget_copies()
        else:
            _mark(source.table, source.name, chain, warm)
    return info


@dataclass(frozen=True)
class _LoadedShard:
    """A shard of the model, and a table with the rows that replace its rows."""

    name: str  # of the table in the checkpoint
    shard: LocalShard
    fresh: Table
    is_whole: bool  # Whether each rank has all rows.


def _saved_dense(
    chain: Sequence[CheckpointInfo],
    *,
    check_bases: bool,
) -> dict[str, Tensor]:
    """Reads the dense tensors of the last checkpoint of a chain.

    Those of its bases are not used, but every file of a chain is checked.
    """
    info = chain[-1]
    dense = {}
    if DENSE in info.files:
        dense = read_tensors(info.path / DENSE, info.files[DENSE])
    for base in chain[:-1]:
        if check_bases and DENSE in base.files:
            check_file(base.path / DENSE, base.files[DENSE])
    return dense


def _read_shard(
    source: Source,
    shard: LocalShard,
    chain: Sequence[CheckpointInfo],
    warm: WarmStart,
    on_rows: Callable[[int], object],
) -> _LoadedShard:
    """Reads the rows of a shard into a new table."""
    info = chain[-1]
    fresh = shard.table.empty_copy()
    owned = None
    row_shards = 1
    if shard.routing is not None:
        owned = shard.owned
        row_shards = shard.routing.world_size
    load_rows(
        fresh,
        source.name,
        chain,
        owned,
        on_rows,
        source.without_state(info, warm),
        expected_rows=info.tables[source.name].rows // row_shards,
    )
    return _LoadedShard(
        name=source.name,
        shard=shard,
        fresh=fresh,
        is_whole=isinstance(source.table, EagerModelTable),
    )


def _load_clocks(
    source: Source,
    info: CheckpointInfo,
    warm: WarmStart,
) -> None:
    """Loads the state of a table whose rows, in a shared cold store, stay."""
    for shard in source.table.shards:
        state = saved_state(info, source.name).owned(shard.owned)
        if not warm.optimizer:  # The rows keep their states.
            state = replace(state, optimizer_steps=shard.table.optimizer_steps)
        shard.table.set_state(state)


def _check_shared(shared: Sequence[Source], *, strict: bool) -> None:
    """Refuses to replace rows in a shared cold store, which other jobs use."""
    for source in shared:
        if strict or source.given_name is not None:
            raise ValueError(
                f"table {source.table.name!r}: its rows lie in"
                f" {source.table.options.cold_store!r}, which is shared, and cannot be"
                " replaced at once: strict=False leaves them as they are"
            )


def _check_rows(
    chain: Sequence[CheckpointInfo],
    loaded: Sequence[_LoadedShard],
    env: ShardingEnv,
) -> None:
    """Refuses the loaded rows if their number on all ranks differs from the metadata.

    Collective.
    """
    local_counts: list[tuple[str, int | None]] = []
    for loaded_shard in loaded:
        # All column shards hold the same ids: one of them is counted.
        is_first = loaded_shard.fresh.columns.start == 0
        if is_first and not loaded_shard.is_whole:
            local_counts.append((loaded_shard.name, held_rows(loaded_shard.fresh)))
    # By the name of the table. None: a shard had no room for some of its rows.
    rows: dict[str, int | None] = {}
    for rank_counts in all_gathered(local_counts, env):
        for name, count in rank_counts:
            total = rows.get(name, 0)
            if total is None or count is None:
                rows[name] = None
            else:
                rows[name] = total + count
    with refused_together(env):
        if env.rank == 0:
            for name in sorted(rows):
                check_rows(chain, name, rows[name])
        for loaded_shard in loaded:
            if loaded_shard.is_whole:
                check_rows(chain, loaded_shard.name, held_rows(loaded_shard.fresh))


def _mark(
    table: ModelTable,
    name: str,
    chain: Sequence[CheckpointInfo],
    warm: WarmStart,
) -> None:
    """Marks the moment of the load, so that deltas of the checkpoint can be saved.

    A table is not marked if it does not hold what the checkpoint has.
    """
    info = chain[-1]
    state = table.module.recstore_state
    state.forget_replaced(table.config_name)
    if not warm.optimizer or name not in (table.name, table.full_name):
        return
    for checkpoint in chain:
        base = None if checkpoint.delta_of is None else checkpoint.delta_of.checksum
        state.note_rows_of(table.config_name, checkpoint.checksum, base)
    states = state_names(info.tables[name].optimizer)
    if states != state_names(table.optimizer):  # A frozen table does not load states.
        return
    marks = state.marks.setdefault(info.checksum, {})
    marks[table.config_name] = [shard.table.mark() for shard in table.shards]
