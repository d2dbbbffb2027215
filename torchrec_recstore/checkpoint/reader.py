"""Reads the rows of a chain of checkpoints into shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar, cast

import torch

from torchrec_recstore.checkpoint.blocks import blocks_by_rank, listed_ids, saved_state
from torchrec_recstore.checkpoint.files import CheckpointError
from torchrec_recstore.checkpoint.fold import FoldedTable, tables_named
from torchrec_recstore.checkpoint.info import CheckpointInfo, TableInfo
from torchrec_recstore.optim import Optimizer, state_names
from torchrec_recstore.store import Part, Table
from torchrec_recstore.store.arguments import among
from torchrec_recstore.store.parts import Owned

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


def rows_to_read(chain: Sequence[CheckpointInfo], name: str) -> int:
    """Returns the number of rows that :func:`load_rows` reports in all.

    Args:
        chain: The result of :func:`torchrec_recstore.checkpoint.info.read_chain`.
        name: The table's name.
    """
    return sum(part.rows for table in tables_named(name, chain) for part in table.parts if part.columns[0] == 0)


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
    # The state comes first: eviction computes the age of the rows from it.
    table.set_state(saved_state(chain[-1], name).owned(owned))
    for info in chain:
        if name not in info.tables:
            continue  # The table was added after this checkpoint was saved.
        _remove_rows(table, info.tables[name], info)
        for count, part in _one_ahead(_parts_of(info, name, table.columns, owned)):
            if part is not None:
                table.write(part)
            on_rows(count)


def _parts_of(
    info: CheckpointInfo, name: str, columns: range, owned: Owned | None
) -> Iterator[tuple[int, Part | None]]:
    """Yields for each block its number of rows, and the rows of the block that belong to the shard."""
    for block in (block for of_rank in blocks_by_rank(info, name) for block in of_rank):
        # The ids are not checked yet. If an id is damaged, the shard that owns the damaged id reads the file too and
        # finds the damage.
        if owned is not None and not owned(block.ids(columns)).any():
            yield block.rows, None
            continue
        block.open(columns, verify=True)
        yield block.rows, block.part(columns).owned(owned)


def _one_ahead(items: Iterator[_T]) -> Iterator[_T]:
    """Yields the items. Another thread makes the next item while the caller uses the current one."""
    end = object()
    with ThreadPoolExecutor(1, "checkpoint-files") as thread:
        coming = thread.submit(next, items, end)
        while (item := coming.result()) is not end:
            coming = thread.submit(next, items, end)
            yield cast(_T, item)


def _remove_rows(table: Table, contents: TableInfo, info: CheckpointInfo) -> None:
    """Removes the ids that left the table between the base of a delta and the delta."""
    if info.delta_of is None:
        return
    listed = (listed_ids(info, part, verify=True) for part in contents.removed)
    if contents.removal == "left":
        for ids in listed:
            table.remove(ids)
        return
    ids = table.ids()
    stays = torch.zeros(len(ids), dtype=torch.bool)
    for some in listed:
        stays |= among(ids, some)
    table.remove(ids[~stays])


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
    for _ in FoldedTable(chain, name, []):
        pass
    if held is not None:
        raise CheckpointError(
            f"table {name!r} of {chain[-1].path} has {held} rows when loaded, and should have {wanted}"
        )
