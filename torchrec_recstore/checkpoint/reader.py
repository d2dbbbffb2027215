"""Reads the files of a table, and reads a chain of checkpoints into shards.

All functions raise ``CheckpointError`` if a file is missing or damaged, or does not
agree with the metadata.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar, cast

import safetensors
import torch
from torch import Tensor

from torchrec_recstore.checkpoint.files import CheckpointError, check_file, read_tensors
from torchrec_recstore.checkpoint.info import CheckpointInfo, PartInfo, TableInfo
from torchrec_recstore.checkpoint.warm_start import RowsWithoutState
from torchrec_recstore.optim import Optimizer, state_names
from torchrec_recstore.row_types import stored_columns
from torchrec_recstore.store import Part, Table, TableState
from torchrec_recstore.store.arguments import among
from torchrec_recstore.store.parts import STAMPS, Owned

_T = TypeVar("_T")


class Block:
    """The files of a checkpoint that hold the same rows.

    They are the part of each column shard, in the order of the columns.
    """

    def __init__(
        self,
        info: CheckpointInfo,
        table: TableInfo,
        parts: Sequence[PartInfo],
    ) -> None:
        self._info = info
        self._table = table
        self._parts = parts
        self._opened: list[tuple[PartInfo, Any]] = []
        self.rows = parts[0].rows

    def ids(self, columns: range) -> Tensor:
        """Returns the ids, (N,) int64, without any check.

        They are read from the first file that holds some of the columns.
        """
        part = self._covering(columns)[0]
        file = _opened(self._info.path / part.file)
        ids: Tensor = file.get_tensor("ids")
        return ids

    def open(self, columns: range, *, verify: bool) -> Tensor:
        """Opens and checks the files with the columns, and returns their ids.

        Without ``verify``, the files must have been compared with their checksums
        before.
        """
        parts_ids = []
        for part in self._covering(columns):
            file, ids = _checked(self._info, part, verify=verify)
            path = self._info.path / part.file
            _check_shapes(path, part, self._table, file)
            parts_ids.append(ids)
            if not torch.equal(ids, parts_ids[0]):
                first_part, _ = self._opened[0]
                raise CheckpointError(
                    f"{path} does not hold the rows that {first_part.file} has"
                )
            self._opened.append((part, file))
        return parts_ids[0]

    def part(
        self,
        columns: range,
        rows: slice = slice(None),
        *,
        states: bool = True,
    ) -> Part:
        """Returns some of the rows, after :meth:`open`.

        They are mapped from the files where nothing must be cut or joined.

        Without ``states``, the part does not have the states of the optimizer.
        """
        names = ["weight", *STAMPS]
        if states:
            names += state_names(self._table.optimizer)
        parts = []
        for part, file in self._opened:
            part_columns = range(*part.columns)
            if overlap(part_columns, columns):
                ids = file.get_slice("ids")[rows]
                tensors = {name: file.get_slice(name)[rows] for name in names}
                parts.append(Part(ids, part_columns, tensors))
        return Part.joined(parts, columns)

    def _covering(self, columns: range) -> list[PartInfo]:
        return [part for part in self._parts if overlap(range(*part.columns), columns)]


def blocks_by_rank(info: CheckpointInfo, name: str) -> list[list[Block]]:
    """Returns the blocks of a table for each rank that wrote some.

    The ids of a rank's blocks ascend.
    """
    table = info.tables[name]
    column_shards = sorted(table.columns)
    in_order = sorted(table.parts, key=lambda part: (part.block, part.columns))
    by_rank: dict[int, list[Block]] = defaultdict(list)
    for _, parts_of_block in groupby(in_order, key=lambda part: part.block):
        parts = list(parts_of_block)
        columns = [part.columns for part in parts]
        if columns != column_shards:
            raise CheckpointError(
                f"{info.path}: table {name!r} has no part of a column shard for some"
                " rows"
            )
        rank = parts[0].rank
        by_rank[rank].append(Block(info, table, parts))
    return [by_rank[rank] for rank in sorted(by_rank)]


def listed_ids(
    info: CheckpointInfo,
    part: PartInfo,
    *,
    verify: bool,
) -> Tensor:
    """Returns the ids of a file that holds no rows, (N,) int64, ascending.

    See :meth:`Block.open`.
    """
    _, ids = _checked(info, part, verify=verify)
    return ids


def saved_state(info: CheckpointInfo, name: str) -> TableState:
    """Returns the state of a whole table: its clocks, and the counts of admission."""
    table = info.tables[name]
    states = [TableState(table.steps, table.optimizer_steps, table.times)]
    for file in table.sightings:
        path = info.path / file
        try:
            sightings = read_tensors(path, info.files[file])
            states.append(TableState.from_tensors(sightings))
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error
    return TableState.merged(states)


def overlap(columns: range, others: range) -> bool:
    """Returns whether two ranges have a column in common."""
    return columns.start < others.stop and others.start < columns.stop


def _opened(path: Path) -> Any:
    try:
        return safetensors.safe_open(path, framework="pt")
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is missing or damaged: {error}") from error


def _checked(
    info: CheckpointInfo,
    part: PartInfo,
    *,
    verify: bool,
) -> tuple[Any, Tensor]:
    """Opens a file, checks its ids, and returns the file and the ids."""
    path = info.path / part.file
    if verify:
        check_file(path, info.files[part.file])
    file = _opened(path)
    ids = torch.empty(0)
    if "ids" in file.keys():  # noqa: SIM118
        ids = file.get_tensor("ids")
    if ids.dtype != torch.int64 or ids.shape != (part.rows,):
        shape = tuple(ids.shape)
        raise CheckpointError(
            f"{path} has ids of shape {shape}, and metadata.json says {part.rows}"
        )

    first_id = int(ids[0])
    last_id = int(ids[-1])
    has_ends = first_id == part.first_id and last_id == part.last_id
    ascends = ids[1:] > ids[:-1]
    if not has_ends or not ascends.all():
        raise CheckpointError(
            f"{path} does not have the ids from {part.first_id} to {part.last_id}, each"
            " once"
        )
    return file, ids


def _check_shapes(
    path: Path,
    part: PartInfo,
    table: TableInfo,
    file: Any,
) -> None:
    begin, end = part.columns
    columns = end - begin
    dtype = getattr(torch, table.dtype)
    expected = {"weight": [part.rows, stored_columns(dtype, columns)]}
    for name, kind in state_names(table.optimizer).items():
        if kind == "element":
            expected[name] = [part.rows, columns]
        else:
            expected[name] = [part.rows]
    for name in STAMPS:
        expected[name] = [part.rows]

    shapes = {}
    for name in file.keys():  # noqa: SIM118
        if name != "ids":
            tensor = file.get_slice(name)
            shapes[name] = list(tensor.get_shape())
    if shapes != expected:
        raise CheckpointError(
            f"{path} has tensors of the shapes {shapes} instead of {expected}"
        )


def check_fits(
    name: str,
    saved: TableInfo,
    path: Path,
    dim: int,
    optimizer: Optimizer | None,
    owner: str,
    *,
    hints: bool = True,
) -> None:
    """Refuses a saved table whose dim or optimizer states do not fit.

    They are compared with those of the table of ``owner``.

    ``optimizer`` is None if the states are not loaded. ``hints`` tells whether the
    messages name the arguments of a load that would help.
    """
    if saved.dim != dim:
        hint = ""
        if hints:
            hint = (
                ": a function in rows={...}, with optimizer=False, can make rows of the"
                " other dim"
            )
        raise ValueError(
            f"table {name!r} has dim {saved.dim} in the checkpoint {path}, {dim} in"
            f" {owner}{hint}"
        )
    if optimizer is None:
        return
    if state_names(saved.optimizer) != state_names(optimizer):
        hint = ": optimizer=False loads the rows without it" if hints else ""
        raise ValueError(
            f"table {name!r} was saved with the optimizer {saved.optimizer}, "
            f"whose state does not fit {owner}'s {optimizer}{hint}"
        )


def rows_to_read(chain: Sequence[CheckpointInfo], name: str) -> int:
    """Returns the number of a table's rows that :func:`load_rows` reports in all."""
    rows = 0
    for info in chain:
        if name not in info.tables:
            continue
        for part in info.tables[name].parts:
            first_column, _ = part.columns
            if first_column == 0:
                rows += part.rows
    return rows


def load_rows(
    table: Table,
    name: str,
    chain: Sequence[CheckpointInfo],
    owned: Owned | None = None,
    on_rows: Callable[[int], object] = lambda count: None,
    without_state: RowsWithoutState | None = None,
    expected_rows: int = 0,
) -> None:
    """Reads the rows of an empty shard from a full checkpoint and its deltas.

    Rows of another data type are converted: exactly to float32, otherwise rounded to
    nearest. ``on_rows`` gets the number of rows of each part, those of other shards
    included. ``without_state`` is given if the states of the optimizer are not loaded.
    ``expected_rows`` is about the number of rows that the shard will have, or 0 if it
    is not known: the index is made for them first, because an index that grows moves
    its entries.
    """
    table.reserve(expected_rows)
    # The state comes first: eviction computes the age of the rows from it.
    state = saved_state(chain[-1], name).owned(owned)
    columns = table.columns
    if without_state is not None:
        state = without_state.state(state)
        columns = without_state.source_columns(table.columns)
    table.set_state(state)

    for info in chain:
        if name not in info.tables:
            continue  # The table was added after this checkpoint was saved.
        _remove_rows(table, info.tables[name], info)
        saved_options = info.tables[name].options
        parts = _parts_of(
            info,
            name,
            columns,
            owned,
            states=without_state is None,
        )
        for count, part in _one_ahead(parts):
            if part is not None:
                part = part.with_frequencies_of(saved_options, table.options)
                if without_state is not None:
                    part = without_state.part(part, table.columns)
                table.write(part)
            on_rows(count)


def _parts_of(
    info: CheckpointInfo,
    name: str,
    columns: range,
    owned: Owned | None,
    *,
    states: bool,
) -> Iterator[tuple[int, Part | None]]:
    """Yields the number of rows of each block, and the rows of the shard in it."""
    for rank_blocks in blocks_by_rank(info, name):
        for block in rank_blocks:
            # The ids are not checked yet. The shard that owns a damaged id reads the
            # file too, and finds the damage.
            if owned is not None and not owned(block.ids(columns)).any():
                yield block.rows, None
                continue
            block.open(columns, verify=True)
            part = block.part(columns, states=states)
            yield block.rows, part.owned(owned)


def _one_ahead(items: Iterator[_T]) -> Iterator[_T]:
    """Yields the items.

    Another thread makes the next item while the caller uses the current one.
    """
    end = object()
    with ThreadPoolExecutor(1, "checkpoint-files") as thread:
        item = thread.submit(next, items, end).result()
        while item is not end:
            following = thread.submit(next, items, end)
            yield cast(_T, item)
            item = following.result()


def _remove_rows(
    table: Table,
    contents: TableInfo,
    info: CheckpointInfo,
) -> None:
    """Removes the ids that left the table between the base of a delta and the delta."""
    if info.delta_of is None:
        return
    if contents.removal == "left":
        for part in contents.removed:
            table.remove(listed_ids(info, part, verify=True))
        return
    leaving = table.ids()
    for part in contents.removed:
        staying_ids = listed_ids(info, part, verify=True)
        stays = among(leaving, staying_ids)
        leaving = leaving[~stays]
    table.remove(leaving)


def held_rows(table: Table) -> int | None:
    """Returns the number of rows of a shard after :func:`load_rows`.

    The result is None if the shard had no room for some of them.
    """
    if table.stats().evicted and table.options.cold_store is None:
        return None
    return len(table)
