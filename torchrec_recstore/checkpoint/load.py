"""Loading a checkpoint: its rows are streamed into new tables, which take the model's place when all is well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn
from torchrec.distributed.types import ShardingEnv

from torchrec_recstore.checkpoint.files import check_file, read_tensors
from torchrec_recstore.checkpoint.info import DENSE, CheckpointInfo, read_chain
from torchrec_recstore.checkpoint.reader import (
    check_fits,
    check_replaceable,
    check_rows,
    exchange_all,
    held_rows,
    load_rows,
    rows_to_read,
)
from torchrec_recstore.checkpoint.writer import Progress, RowCount
from torchrec_recstore.options import is_shared
from torchrec_recstore.sharders.gather import all_gathered, refused_together, whole_environment
from torchrec_recstore.sharders.layout import LocalShard
from torchrec_recstore.sharders.model_tables import ModelTable, check_dense, dense_tensors, load_dense, recstore_tables
from torchrec_recstore.store import Table


def load_checkpoint(
    model: nn.Module, path: str | Path, *, strict: bool = True, progress: Progress | None = None
) -> CheckpointInfo:
    """Loads what ``save_checkpoint`` wrote, at any world size and with any plan. Collective.

    The model then holds the checkpoint's rows and no others. Those that a table with ``max_rows`` has no room for go to
    its cold store, whichever that is, and without one it keeps those that its eviction would keep. All of it is read
    and checked before anything changes: while it is read, the model's old rows are still there, beside the new ones.

    Args:
        model: ``DistributedModelParallel``, or anything that contains sharded modules.
        path: the checkpoint's directory. Those that it is a delta of must be where they were, relative to it.
        strict: whether the checkpoint and the model must have the same RecStore tables and other tensors. Otherwise
            what only one of them has is left alone, and so are the rows of a table with a shared cold store: it takes
            the checkpoint's clocks.
        progress: called after every part of 32 MB with the rows read and the rows of all, for this rank's shards;
            those of a part that other ranks' shards own count too.

    Returns:
        What was loaded, ``training_state`` included.

    Raises:
        FileNotFoundError: there is no checkpoint, or one is missing that it is a delta of.
        CheckpointError: a file is missing or damaged, files do not hold what metadata says of them, or the format is
            another version's.
        ValueError: the model does not fit: a missing or unknown table, another dim, another optimizer's state, another
            shape of a dense tensor; a save of the model is still being written.
        MemoryError: there is no room for the rows.
        ColdStoreError: a cold store fails. All of these on every rank, with nothing changed.
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
        for base in chain[:-1]:  # whose dense tensors are not used, but all of a chain is checked
            if env.rank == 0 and DENSE in base.files:
                check_file(base.path / DENSE, base.files[DENSE])
        present, left_alone = _present(tables, info, strict=strict)
        shards = [(table.name, shard) for table in present for shard in table.shards]
        count = RowCount(progress, sum(rows_to_read(chain, name, shard.table.columns) for name, shard in shards))
        for name, shard in shards:
            loaded.append((shard.table, _loaded_shard(chain, name, shard, count)))
        check_replaceable(old for old, _ in loaded)
    _check_rows(chain, shards, [fresh for _, fresh in loaded], env)
    exchange_all(loaded)
    load_dense(dense, own)
    for table in left_alone:
        for shard in table.shards:
            shard.table.steps = info.tables[table.name].steps
            shard.table.optimizer_steps = info.tables[table.name].optimizer_steps
    for table in present:
        table.state.forget_copies()
        marks = table.module.recstore_state.marks.setdefault(info.checksum, {})
        marks[table.config_name] = [shard.table.mark() for shard in table.shards]
    return info


def _as_saved(tables: Sequence[ModelTable], info: CheckpointInfo) -> list[ModelTable]:
    """The tables under the names that the checkpoint has for them.

    A model with more or fewer tables of a name may have saved it: such a table is known by its full name.
    """
    return [
        replace(table, name=table.full_name)
        if table.name not in info.tables and table.full_name in info.tables
        else table
        for table in tables
    ]


def _present(
    tables: Sequence[ModelTable], info: CheckpointInfo, *, strict: bool
) -> tuple[list[ModelTable], list[ModelTable]]:
    """The tables whose rows are loaded, and those whose rows are in the checkpoint and stay as they are."""
    present = [table for table in tables if table.name in info.tables]
    shared = [table for table in present if is_shared(table.state.options.cold_store)]
    if shared and strict:
        raise ValueError(
            f"table {shared[0].name!r}: its rows lie in {shared[0].state.options.cold_store!r}, which is shared, and "
            "cannot be replaced at once: strict=False leaves them as they are"
        )
    return [table for table in present if table not in shared], shared


def _loaded_shard(chain: Sequence[CheckpointInfo], name: str, shard: LocalShard, count: RowCount) -> Table:
    fresh = shard.table.empty_copy()
    load_rows(fresh, name, chain, None if shard.routing is None else shard.owned, count.add)
    return fresh


def _check_rows(
    chain: Sequence[CheckpointInfo],
    shards: Sequence[tuple[str, LocalShard]],
    loaded: Sequence[Table],
    env: ShardingEnv,
) -> None:
    """Refuses rows that are not those that the checkpoint says, all ranks' together. Collective."""
    held: list[tuple[str, int | None]] = [
        (name, held_rows(fresh))
        for (name, _), fresh in zip(shards, loaded, strict=True)
        if fresh.columns.start == 0  # the other column shards hold the same ids
    ]
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
            f"the model has no RecStore table {unknown!r}, the checkpoint {info.path} has it: strict=False passes it "
            "over"
        )
    for table in tables:
        saved = info.tables.get(table.name)
        if saved is None:
            continue
        check_fits(table.name, saved, info.path, table.dim, table.state.optimizer, "the model")
