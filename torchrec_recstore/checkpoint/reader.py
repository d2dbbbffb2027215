"""Reads the rows of a chain of checkpoints into shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import Tensor

from torchrec_recstore.checkpoint.files import CheckpointError, read_ids, read_tensors
from torchrec_recstore.checkpoint.fold import FoldedTable
from torchrec_recstore.checkpoint.info import CheckpointInfo, PartInfo, TableInfo, check_ids, check_shapes
from torchrec_recstore.optim import Optimizer, state_names
from torchrec_recstore.store import Table
from torchrec_recstore.store.arguments import among
from torchrec_recstore.store.parts import COUNTER_SHAPE, joined_rows, merged_counters, write_joined

Owned = Callable[[Tensor], Tensor]
"""A function from (N,) int64 ids to (N,) bool: whether each id belongs to a shard."""

_T = TypeVar("_T")


def check_fits(name: str, saved: TableInfo, path: Path, dim: int, optimizer: Optimizer, owner: str) -> None:
    """Refuses a saved table if its rows do not fit the table that would receive them.

    Args:
        name: The table's name.
        saved: The table's metadata in the checkpoint.
        path: The checkpoint's directory.
        dim: The dim of the table that would receive the rows.
        optimizer: The optimizer of the table that would receive the rows.
        owner: The owner of that table, for error messages: "the model".

    Raises:
        ValueError: The dim or the tensors of the optimizer's state differ.
    """
    if saved.dim != dim:
        raise ValueError(f"table {name!r} has dim {saved.dim} in the checkpoint {path}, {dim} in {owner}")
    if state_names(saved.optimizer) != state_names(optimizer):
        raise ValueError(
            f"table {name!r} was saved with the optimizer {saved.optimizer}, "
            f"whose state does not fit {owner}'s {optimizer}"
        )


def rows_to_read(chain: Sequence[CheckpointInfo], name: str, columns: range) -> int:
    """Returns the number of rows that :func:`load_rows` reports in all.

    Args:
        chain: The result of :func:`torchrec_recstore.checkpoint.info.read_chain`.
        name: The table's name.
        columns: The columns of the shard.
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
    """Reads a table's rows from a full checkpoint and its deltas into an empty shard, part by part.

    Rows of another data type are converted: exactly to float32, otherwise rounded to nearest.

    Args:
        table: The shard. It receives its own columns of the rows.
        name: The table's name in the checkpoints.
        chain: The result of :func:`torchrec_recstore.checkpoint.info.read_chain`.
        owned: A function that selects the ids that belong to the shard. None: all ids do.
        on_rows: A callback that is called after each part with the part's number of rows, which includes rows of other
            shards.

    Raises:
        CheckpointError: A file is missing or damaged.
        MemoryError: There is no memory for the rows.
    """
    last = chain[-1].tables[name]
    table.steps = last.steps  # This comes first: eviction computes the age of the rows from it.
    if last.times is not None:
        table.set_times(last.times.numbers())
    for info in chain:
        if name not in info.tables:
            continue  # The table was added after this checkpoint was saved.
        contents = info.tables[name]
        _remove_rows(table, contents, info)
        for count, (ids, rows) in _one_ahead(_rows_of(contents, info, table.columns, owned)):
            if len(ids):
                write_joined(table, ids, rows)
            on_rows(count)
    table.optimizer_steps = last.optimizer_steps
    _load_sightings(table, chain, name)


def _rows_of(
    contents: TableInfo, info: CheckpointInfo, columns: range, owned: Owned | None
) -> Iterator[tuple[int, tuple[Tensor, dict[str, Tensor]]]]:
    """Yields for each part its number of rows, and the ids and rows of the part that belong to the shard."""
    states = state_names(contents.optimizer)
    covering = _covering(contents, columns)
    for part in contents.parts:
        if part.columns != covering[0]:
            continue
        mine: Tensor | None = None
        if owned is not None:
            # The ids are not checked yet. If an id is damaged, the shard that owns the damaged id reads the file too
            # and finds the damage.
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
            check_shapes(info.path / piece.file, piece, contents, {name: row.shape for name, row in rows.items()})
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
    """Returns the column shards that hold some of the columns, in ascending order."""
    return [c for c in contents.columns if c[0] < columns.stop and c[1] > columns.start]


def _one_ahead(items: Iterator[_T]) -> Iterator[_T]:
    """Yields the items. Another thread makes the next item while the caller uses the current one."""
    end = object()
    with ThreadPoolExecutor(1, "checkpoint-files") as thread:
        coming = thread.submit(next, items, end)
        while (item := coming.result()) is not end:
            coming = thread.submit(next, items, end)
            yield cast(_T, item)


def _same_rows(contents: TableInfo, part: PartInfo, columns: tuple[int, int], info: CheckpointInfo) -> PartInfo:
    """Returns the part of the column shard ``columns`` that holds the same ids as ``part``."""
    wanted = (part.first_id, part.last_id, part.rows)
    for other in contents.parts:
        if other.columns == columns and (other.first_id, other.last_id, other.rows) == wanted:
            return other
    raise CheckpointError(f"{info.path}: there are no columns {columns} of the rows in {part.file}")


def _remove_rows(table: Table, contents: TableInfo, info: CheckpointInfo) -> None:
    """Removes the ids that left the table between the base of a delta and the delta."""
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
    """Returns the ids of a file that holds no rows."""
    path = info.path / part.file
    ids = read_tensors(path, info.files[part.file]).get("ids", torch.empty(0))
    check_ids(path, part, ids)
    return ids


def held_rows(table: Table) -> int | None:
    """Returns the number of rows of a shard after :func:`load_rows`; None if the shard had no room for some of them."""
    return None if table.stats().evicted and table.options.cold_store is None else len(table)


def check_rows(chain: Sequence[CheckpointInfo], name: str, held: int | None) -> None:
    """Compares the number of loaded rows with the number in the table's metadata.

    A part that is missing, or that holds ids of another part, changes the number of rows. In this case all ids are read
    again to find the id that is in several parts.

    Args:
        chain: The chain of checkpoints; see :func:`load_rows`.
        name: The table's name.
        held: The number of rows in all shards that hold the table's first column. None if a shard had no room for some
            of its rows.

    Raises:
        CheckpointError: The numbers differ, or an id is in several parts.
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


def _load_sightings(table: Table, chain: Sequence[CheckpointInfo], name: str) -> None:
    """Loads the counts of all saved shards into the admission of a shard.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    if table.options.admission is not None and table.options.admission.count > 1:
        table.set_sightings(*merged_sightings(chain[-1], name, table.sightings()[0].shape[2]))


def merged_sightings(info: CheckpointInfo, name: str, cells: int) -> tuple[Tensor, int]:
    """Merges the counts of all saved shards into one counter, for any number of shards and any sizes of their counters.

    See :func:`torchrec_recstore.store.parts.merged_counters`.

    Args:
        info: The checkpoint's metadata.
        name: The table's name.
        cells: The number of cells in each row of the merged counter.

    Returns:
        (2, 4, cells) uint8, the counts; and the greatest number of sightings in the present generation of a shard.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    return merged_counters(_counters(info, name), cells)


def _counters(info: CheckpointInfo, name: str) -> Iterator[tuple[Tensor, int]]:
    """Yields the saved counters of a table's shards."""
    for saved in info.tables[name].sightings:
        tensors = read_tensors(info.path / saved.file, info.files[saved.file])
        flat = torch.zeros(prod(COUNTER_SHAPE) * saved.cells, dtype=torch.uint8)
        if tensors["position"].numel() and not 0 <= int(tensors["position"].max()) < len(flat):
            raise CheckpointError(f"{info.path / saved.file} does not hold counts of {saved.cells} cells a row")
        flat[tensors["position"]] = tensors["count"]
        yield flat.view(*COUNTER_SHAPE, -1), saved.taken
