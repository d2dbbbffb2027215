"""Loading a checkpoint: its rows are streamed into new tables, which take the model's place when all is well."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from torchrec_recstore.checkpoint.files import CheckpointError, check_file, read_ids, read_tensors
from torchrec_recstore.checkpoint.info import DENSE, CheckpointInfo, PartInfo, TableInfo, read_chain
from torchrec_recstore.checkpoint.model_tensors import check_dense, dense_tensors, load_dense
from torchrec_recstore.checkpoint.new_rows import check_replaceable, exchange_all
from torchrec_recstore.checkpoint.parts import joined_rows
from torchrec_recstore.checkpoint.sightings import load_sightings
from torchrec_recstore.checkpoint.tables import ModelTable, distinct_tables
from torchrec_recstore.ids import among
from torchrec_recstore.optim import state_names
from torchrec_recstore.sharders.gather import refused_together, whole_environment
from torchrec_recstore.sharders.local_shard import LocalShard
from torchrec_recstore.store import Table, write_all

_T = TypeVar("_T")

Owned = Callable[[Tensor], Tensor]
"""(N,) int64 ids -> (N,) bool: which of them belong to a shard."""


def load_checkpoint(model: nn.Module, path: str | Path, *, strict: bool = True) -> CheckpointInfo:
    """Loads what ``save_checkpoint`` wrote, at any world size and with any plan. Collective.

    The model then holds the checkpoint's rows and no others. Those that a table with ``max_rows`` has no room for go to
    its cold store, whichever that is, and without one it keeps those that its eviction would keep. All of it is read
    and checked before anything changes: while it is read, the model's old rows are still there, beside the new ones.

    Args:
        model: ``DistributedModelParallel``, or anything that contains sharded modules.
        path: the checkpoint's directory. Those that it is a delta of must be where they were, relative to it.
        strict: whether the checkpoint and the model must have the same RecStore tables and other tensors. Otherwise
            what only one of them has is left alone.

    Returns:
        What was loaded, ``training_state`` included.

    Raises:
        FileNotFoundError: there is no checkpoint, or one is missing that it is a delta of.
        CheckpointError: a file is missing or damaged, or the format is another version's.
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
        tables = distinct_tables(model)
        for each in chain:
            _check_tables(each, tables, strict=strict and each is info)
        own = dense_tensors(model, tables)
        dense = read_tensors(info.path / DENSE, info.files[DENSE]) if DENSE in info.files else {}
        check_dense(dense, own, strict=strict)
        for base in chain[:-1]:  # whose dense tensors are not used, but all of a chain is checked
            if env.rank == 0 and DENSE in base.files:
                check_file(base.path / DENSE, base.files[DENSE])
        present = [table for table in tables if table.name in info.tables]
        for table in present:
            for shard in table.module.recstore_state.shards[table.name]:
                loaded.append((shard.table, _loaded_shard(chain, shard)))
        check_replaceable(old for old, _ in loaded)
    exchange_all(loaded)
    load_dense(dense, own)
    for table in present:
        state = table.module.recstore_state
        state.marks.setdefault(info.checksum, {})[table.name] = [s.table.mark() for s in state.shards[table.name]]
    return info


def load_rows(table: Table, name: str, chain: Sequence[CheckpointInfo], owned: Owned | None = None) -> None:
    """Streams a table's rows into an empty shard, from a full checkpoint and the deltas on top of it.

    Rows of another data type are converted: exactly to float32, else rounded to nearest.

    Args:
        table: the shard, whose columns are taken.
        name: of the table in the checkpoints.
        chain: as :func:`torchrec_recstore.checkpoint.info.read_chain` gives it.
        owned: which ids belong to the shard; None for all.

    Raises:
        CheckpointError: a file is missing or damaged.
        MemoryError: no room.
    """
    last = chain[-1].tables[name]
    table.steps = last.steps  # first: by it eviction tells how old rows are
    for info in chain:
        if name not in info.tables:
            continue  # the table is newer than that checkpoint
        contents = info.tables[name]
        _remove_rows(table, contents, info)
        for ids, rows in _one_ahead(_rows_of(contents, info, table.columns, owned)):
            if rows["weight"].dtype is not table.dtype:
                rows["weight"] = rows["weight"].float()  # which any table takes, and rounds to its own type
            write_all(table, ids, rows)
    table.optimizer_steps = last.optimizer_steps
    load_sightings(table, chain, name)


def _loaded_shard(chain: Sequence[CheckpointInfo], shard: LocalShard) -> Table:
    fresh = shard.table.empty_copy()
    load_rows(fresh, fresh.name, chain, None if shard.routing is None else shard.owned)
    return fresh


def _check_tables(info: CheckpointInfo, tables: Sequence[ModelTable], *, strict: bool) -> None:
    names = {table.name for table in tables}
    for missing in sorted(names - info.tables.keys() if strict else ()):
        raise ValueError(f"the checkpoint {info.path} has no table {missing!r}")
    for unknown in sorted(info.tables.keys() - names if strict else ()):
        raise ValueError(f"the model has no RecStore table {unknown!r}, the checkpoint {info.path} has it")
    for table in tables:
        saved = info.tables.get(table.name)
        if saved is None:
            continue
        if saved.dim != table.dim:
            raise ValueError(
                f"table {table.name!r} has dim {saved.dim} in the checkpoint {info.path}, {table.dim} in the model"
            )
        for shard in table.module.recstore_state.shards[table.name]:
            if state_names(saved.optimizer) != state_names(shard.table.optimizer):
                raise ValueError(
                    f"table {table.name!r} was saved with the optimizer {saved.optimizer}, "
                    f"whose state does not fit the model's {shard.table.optimizer}"
                )


def _rows_of(
    contents: TableInfo, info: CheckpointInfo, columns: range, owned: Owned | None
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Ids and rows of a shard, part by part."""
    states = state_names(contents.optimizer)
    names = {"weight", *states, "last_step", "frequency"}
    covering = [c for c in contents.columns if c[0] < columns.stop and c[1] > columns.start]
    for part in contents.parts:
        if part.columns != covering[0]:
            continue
        mine: Tensor | None = None
        if owned is not None:
            # The ids are not checked yet: were one damaged, another shard would own it, and find that.
            mine = owned(read_ids(info.path / part.file))
            if not mine.any():
                continue
        pieces = []
        ids: Tensor | None = None
        for piece in (_same_rows(contents, part, each, info) for each in covering):
            rows = read_tensors(info.path / piece.file, info.files[piece.file])
            its_ids = rows.pop("ids", torch.empty(0))
            if rows.keys() != names or (ids is not None and not torch.equal(ids, its_ids)):
                raise CheckpointError(f"{info.path / piece.file} does not hold the rows that {part.file} has")
            ids = its_ids
            pieces.append((range(*piece.columns), rows))
        assert ids is not None
        if mine is not None and not mine.all():
            keep = mine.nonzero().squeeze(1)
            ids = ids[keep]
            pieces = [(c, {key: value[keep] for key, value in rows.items()}) for c, rows in pieces]
        yield ids, joined_rows(pieces, columns, states)


def _one_ahead(items: Iterator[_T]) -> Iterator[_T]:
    """The items, of which the next is made in another thread while one is used."""
    end = object()
    with ThreadPoolExecutor(1, "checkpoint-files") as thread:
        coming = thread.submit(next, items, end)
        while (item := coming.result()) is not end:
            coming = thread.submit(next, items, end)
            yield cast(_T, item)


def _same_rows(contents: TableInfo, part: PartInfo, columns: tuple[int, int], info: CheckpointInfo) -> PartInfo:
    """The part of another column shard that holds the same ids."""
    wanted = (part.first_id, part.last_id, part.rows)
    for other in contents.parts:
        if other.columns == columns and (other.first_id, other.last_id, other.rows) == wanted:
            return other
    raise CheckpointError(f"{info.path}: there are no columns {columns} of the rows in {part.file}")


def _remove_rows(table: Table, contents: TableInfo, info: CheckpointInfo) -> None:
    """Forgets the ids that left before a delta was saved."""
    if info.delta_of is None:
        return
    if contents.removal == "left":
        for part in contents.removed:
            table.remove(read_tensors(info.path / part.file, info.files[part.file])["ids"])
        return
    ids = table.ids()
    stays = torch.zeros(len(ids), dtype=torch.bool)
    for part in contents.removed:
        staying = read_tensors(info.path / part.file, info.files[part.file])["ids"]
        stays |= among(ids, staying)
    table.remove(ids[~stays])
