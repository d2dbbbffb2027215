"""Reading the rows of a chain of checkpoints into shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import Tensor

from torchrec_recstore.checkpoint.files import CheckpointError, read_ids, read_tensors
from torchrec_recstore.checkpoint.fold import FoldedTable
from torchrec_recstore.checkpoint.info import CheckpointInfo, PartInfo, TableInfo, check_ids, check_shapes
from torchrec_recstore.checkpoint.writer import joined_rows, load_sightings
from torchrec_recstore.optim import Optimizer, state_names
from torchrec_recstore.store import Table, write_all
from torchrec_recstore.store.arguments import among


def check_replaceable(tables: Iterable[Table]) -> None:
    """Refuses tables whose rows are being written to a checkpoint.

    Raises:
        ValueError: there is one.
    """
    for table in tables:
        if table.is_being_saved:
            raise ValueError(f"table '{table.name}': it is being saved already: wait for that first")


def exchange_all(pairs: Iterable[tuple[Table, Table]]) -> None:
    """Gives each first table the rows of the second, which is closed; they have passed :func:`check_replaceable`."""
    for table, fresh in pairs:
        table.exchange_rows(fresh)
        fresh.close()


_T = TypeVar("_T")

Owned = Callable[[Tensor], Tensor]
"""(N,) int64 ids -> (N,) bool: which of them belong to a shard."""


def check_fits(name: str, saved: TableInfo, path: Path, dim: int, optimizer: Optimizer, whose: str) -> None:
    """Refuses a saved table whose rows another one cannot hold.

    Args:
        name: of the table.
        saved: in a checkpoint.
        path: of that.
        dim: of the table that is to get the rows.
        optimizer: likewise.
        whose: that table is, for messages.

    Raises:
        ValueError: another dim, or another optimizer's state.
    """
    if saved.dim != dim:
        raise ValueError(f"table {name!r} has dim {saved.dim} in the checkpoint {path}, {dim} in {whose}")
    if state_names(saved.optimizer) != state_names(optimizer):
        raise ValueError(
            f"table {name!r} was saved with the optimizer {saved.optimizer}, "
            f"whose state does not fit {whose}'s {optimizer}"
        )


def rows_to_read(chain: Sequence[CheckpointInfo], name: str, columns: range) -> int:
    """How many rows :func:`load_rows` tells of in all.

    Args:
        chain: as :func:`torchrec_recstore.checkpoint.info.read_chain` gives it.
        name: of the table.
        columns: of the shard.
    """
    contents = [info.tables[name] for info in chain if name in info.tables]
    return sum(part.rows for each in contents for part in each.parts if part.columns == _covering(each, columns)[0])


def load_rows(
    table: Table,
    name: str,
    chain: Sequence[CheckpointInfo],
    owned: Owned | None = None,
    on_rows: Callable[[int], object] = lambda count: None,
) -> None:
    """Streams a table's rows into an empty shard, from a full checkpoint and the deltas on top of it.

    Rows of another data type are converted: exactly to float32, else rounded to nearest.

    Args:
        table: the shard, whose columns are taken.
        name: of the table in the checkpoints.
        chain: as :func:`torchrec_recstore.checkpoint.info.read_chain` gives it.
        owned: which ids belong to the shard; None for all.
        on_rows: called after every part with its rows, those of other shards too.

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
        for count, (ids, rows) in _one_ahead(_rows_of(contents, info, table.columns, owned)):
            if len(ids):
                if rows["weight"].dtype is not table.dtype:
                    rows["weight"] = rows["weight"].float()  # which any table takes, and rounds to its own type
                write_all(table, ids, rows)
            on_rows(count)
    table.optimizer_steps = last.optimizer_steps
    load_sightings(table, chain, name)


def _rows_of(
    contents: TableInfo, info: CheckpointInfo, columns: range, owned: Owned | None
) -> Iterator[tuple[int, tuple[Tensor, dict[str, Tensor]]]]:
    """Part by part: its rows of all shards, and ids and rows of this one."""
    states = state_names(contents.optimizer)
    covering = _covering(contents, columns)
    for part in contents.parts:
        if part.columns != covering[0]:
            continue
        mine: Tensor | None = None
        if owned is not None:
            # The ids are not checked yet: were one damaged, another shard would own it, and find that.
            mine = owned(read_ids(info.path / part.file))
            if not mine.any():
                yield part.rows, (torch.empty(0, dtype=torch.int64), {})
                continue
        pieces = []
        ids: Tensor | None = None
        for piece in (_same_rows(contents, part, each, info) for each in covering):
            rows = read_tensors(info.path / piece.file, info.files[piece.file])
            its_ids = rows.pop("ids", torch.empty(0))
            check_ids(info.path / piece.file, piece, its_ids)
            check_shapes(info.path / piece.file, piece, states, {name: row.shape for name, row in rows.items()})
            if ids is not None and not torch.equal(ids, its_ids):
                raise CheckpointError(f"{info.path / piece.file} does not hold the rows that {part.file} has")
            ids = its_ids
            pieces.append((range(*piece.columns), rows))
        assert ids is not None
        if mine is not None and not mine.all():
            keep = mine.nonzero().squeeze(1)
            ids = ids[keep]
            pieces = [(c, {key: value[keep] for key, value in rows.items()}) for c, rows in pieces]
        yield part.rows, (ids, joined_rows(pieces, columns, states))


def _covering(contents: TableInfo, columns: range) -> list[tuple[int, int]]:
    """The column shards that hold some of the columns, ascending."""
    return [c for c in contents.columns if c[0] < columns.stop and c[1] > columns.start]


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
            table.remove(_listed(info, part))
        return
    ids = table.ids()
    stays = torch.zeros(len(ids), dtype=torch.bool)
    for part in contents.removed:
        stays |= among(ids, _listed(info, part))
    table.remove(ids[~stays])


def _listed(info: CheckpointInfo, part: PartInfo) -> Tensor:
    """The ids of a file that has ids alone."""
    path = info.path / part.file
    ids = read_tensors(path, info.files[part.file]).get("ids", torch.empty(0))
    check_ids(path, part, ids)
    return ids


def held_rows(table: Table) -> int | None:
    """How many rows :func:`load_rows` has given a shard; None where some did not stay, for want of room."""
    return None if table.stats().evicted and table.options.cold_store is None else len(table)


def check_rows(chain: Sequence[CheckpointInfo], name: str, held: int | None) -> None:
    """Compares the rows that were loaded with what the checkpoint says of the table.

    A part that is left out, or that holds ids of another part, is found by the number of rows. Which ids these are is
    found by reading all ids.

    Args:
        chain: as for :func:`load_rows`.
        name: of the table.
        held: rows of all shards that hold its first column; None where some did not stay.

    Raises:
        CheckpointError: the numbers differ, or an id is in several parts.
    """
    wanted = chain[-1].tables[name].rows
    if held == wanted:
        return
    folded = FoldedTable(chain, name, [])
    while (bound := folded.bound()) is not None:
        folded.take(bound)
    if held is not None:
        raise CheckpointError(
            f"table {name!r} of {chain[-1].path} has {held} rows when loaded, and should have {wanted}"
        )
