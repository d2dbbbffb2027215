"""Loads a checkpoint: reads its rows into new tables, which replace the model's when every rank has succeeded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn
from torchrec.distributed.types import ShardingEnv

from torchrec_recstore.checkpoint.files import check_file, read_tensors
from torchrec_recstore.checkpoint.fold import check_rows
from torchrec_recstore.checkpoint.info import DENSE, CheckpointInfo, read_chain
from torchrec_recstore.checkpoint.reader import check_fits, held_rows, load_rows, rows_to_read, saved_state
from torchrec_recstore.checkpoint.writer import Progress, reporting
from torchrec_recstore.options import is_shared
from torchrec_recstore.sharders.gather import all_gathered, refused_together, whole_environment
from torchrec_recstore.sharders.model_tables import ModelTable, check_dense, dense_tensors, load_dense, recstore_tables
from torchrec_recstore.store import Table
from torchrec_recstore.store.table import check_replaceable, exchange_all


def load_checkpoint(
    model: nn.Module, path: str | Path, *, strict: bool = True, progress: Progress | None = None
) -> CheckpointInfo:
    """Loads a checkpoint that ``save_checkpoint`` wrote, at any world size and with any sharding plan. Collective.

    Afterwards the model holds the rows of the checkpoint and no other rows. If the rows of a table exceed its
    ``max_rows``, the excess rows are written to the table's cold store, and a table without a cold store keeps the rows
    that its eviction policy would keep. The whole checkpoint is read and checked before the model changes. Until then
    the old rows and the new rows are both in memory. The result is the metadata, with ``training_state``.

    Args:
        model: ``DistributedModelParallel``, or any module that contains sharded modules.
        path: The checkpoint's directory. The base of a delta must be at the same path relative to the delta as when
            it was saved.
        strict: Whether the checkpoint and the model must have the same RecStore tables and the same other tensors. If
            False, tables and tensors that only one of them has are ignored, and a table with a shared cold store keeps
            its rows and loads only its clocks and the counts of its admission. Default: True.
        progress: A callback that is called after each part of 32 MB with the number of rows that are read and the
            number of all rows in the parts that this rank reads. Both include rows of other ranks' shards.

    Raises:
        FileNotFoundError: There is no checkpoint at ``path``, or the base of a delta is missing.
        CheckpointError: A file is missing or damaged, the files do not agree with the metadata, or the format is that
            of another version.
        ValueError: The model does not fit: a table is missing or unknown, or has another dim or another optimizer
            state; a dense tensor has another shape; or a save of the model is still being written.
        MemoryError: There is no memory for the rows.
        ColdStoreError: A cold store fails. All of these errors are raised on every rank, and the model is unchanged.
    """
    env = whole_environment()
    loaded: list[tuple[Table, Table]] = []
    with refused_together(env):
        chain = read_chain(path)
        info = chain[-1]
        tables = _as_saved(recstore_tables(model), info)
        for each in chain:
            _check_tables(each, tables, strict=strict and each is info)
        own = dense_tensors(model, tables)
        dense = read_tensors(info.path / DENSE, info.files[DENSE]) if DENSE in info.files else {}
        check_dense(dense, own, strict=strict)
        for base in chain[:-1]:  # The dense tensors of a base are not used, but every file of a chain is checked.
            if env.rank == 0 and DENSE in base.files:
                check_file(base.path / DENSE, base.files[DENSE])
        present, left_alone = _present(tables, info, strict=strict)
        shards = [(table.name, shard) for table in present for shard in table.shards]
        on_rows = reporting(progress, sum(rows_to_read(chain, name) for name, _ in shards))
        for name, shard in shards:
            fresh = shard.table.empty_copy()
            load_rows(fresh, name, chain, None if shard.routing is None else shard.owned, on_rows)
            loaded.append((shard.table, fresh))
        check_replaceable(old for old, _ in loaded)
    _check_rows(chain, [(name, fresh) for (name, _), (_, fresh) in zip(shards, loaded, strict=True)], env)
    exchange_all(loaded)
    load_dense(dense, own)
    for table in left_alone:
        for shard in table.shards:
            shard.table.set_state(saved_state(info, table.name).owned(shard.owned))
    for table in present:
        table.state.forget_copies()
        marks = table.module.recstore_state.marks.setdefault(info.checksum, {})
        marks[table.config_name] = [shard.table.mark() for shard in table.shards]
    return info


def _as_saved(tables: Sequence[ModelTable], info: CheckpointInfo) -> list[ModelTable]:
    """Returns the tables with their names in the checkpoint: the full name if the model had several of that name."""
    saved = info.tables
    return [
        replace(table, name=table.full_name) if table.name not in saved and table.full_name in saved else table
        for table in tables
    ]


def _present(
    tables: Sequence[ModelTable], info: CheckpointInfo, *, strict: bool
) -> tuple[list[ModelTable], list[ModelTable]]:
    """Returns the tables whose rows are loaded, and the tables with a shared cold store, which keep their rows."""
    present = [table for table in tables if table.name in info.tables]
    shared = [table for table in present if is_shared(table.state.options.cold_store)]
    if shared and strict:
        raise ValueError(
            f"table {shared[0].name!r}: its rows lie in {shared[0].state.options.cold_store!r}, which is shared, and "
            "cannot be replaced at once: strict=False leaves them as they are"
        )
    return [table for table in present if table not in shared], shared


def _check_rows(chain: Sequence[CheckpointInfo], loaded: Sequence[tuple[str, Table]], env: ShardingEnv) -> None:
    """Refuses the loaded rows if their number on all ranks differs from the metadata. Collective."""
    # All column shards hold the same ids: one of them is counted.
    held = [(name, held_rows(fresh)) for name, fresh in loaded if fresh.columns.start == 0]
    everywhere = [each for of_rank in all_gathered(held, env) for each in of_rank]
    with refused_together(env):
        for name in sorted({name for name, _ in everywhere}) if env.rank == 0 else ():
            counts = [count for other, count in everywhere if other == name]
            check_rows(chain, name, None if None in counts else sum(count or 0 for count in counts))


def _check_tables(info: CheckpointInfo, tables: Sequence[ModelTable], *, strict: bool) -> None:
    names = {table.name for table in tables}
    for missing in sorted(names - info.tables.keys() if strict else ()):
        raise ValueError(
            f"the checkpoint {info.path} has no table {missing!r}: strict=False leaves the model's as it is"
        )
    for unknown in sorted(info.tables.keys() - names if strict else ()):
        raise ValueError(
            f"the model has no RecStore table {unknown!r}, which the checkpoint {info.path} has: strict=False ignores "
            "the checkpoint's table"
        )
    for table in tables:
        if table.name in info.tables:
            saved = info.tables[table.name]
            check_fits(table.name, saved, info.path, table.dim, table.state.optimizer, "the model")
