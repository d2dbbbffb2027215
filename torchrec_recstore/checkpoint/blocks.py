"""Reads and checks the files of a checkpoint that belong to a table: its rows, the ids that left, and its state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from torchrec_recstore.checkpoint.files import CheckpointError, check_file, read_tensors
from torchrec_recstore.checkpoint.info import CheckpointInfo, PartInfo, TableInfo
from torchrec_recstore.optim import state_names
from torchrec_recstore.row_types import stored_columns
from torchrec_recstore.store import Part, TableState
from torchrec_recstore.store.parts import STAMPS


class Block:
    """The files of a checkpoint that hold the same rows, one file for each column shard.

    :attr:`ids` may be read at any time. :meth:`open` must be called before :meth:`part`.

    Args:
        info: The checkpoint.
        table: The metadata of the table.
        parts: The metadata of the files, in ascending order of their columns.
    """

    def __init__(self, info: CheckpointInfo, table: TableInfo, parts: Sequence[PartInfo]) -> None:
        self._info = info
        self._table = table
        self._parts = parts
        self._opened: list[tuple[PartInfo, Any]] = []
        self.rows = parts[0].rows
        """The number of rows."""

    def ids(self, columns: range) -> Tensor:
        """Returns the ids, (N,) int64, of the first file that holds some of the columns, without any check."""
        ids: Tensor = _opened(self._info.path / self._covering(columns)[0].file).get_tensor("ids")
        return ids

    def open(self, columns: range, *, verify: bool) -> Tensor:
        """Opens and checks the files that hold some of the columns, and returns the ids of their rows.

        Args:
            columns: The columns that :meth:`part` will read.
            verify: Whether the files are compared with their checksums. Otherwise that must have been done before.

        Raises:
            CheckpointError: A file is missing or damaged, or does not agree with the metadata.
        """
        first: Tensor | None = None
        for part in self._covering(columns):
            path = self._info.path / part.file
            if verify:
                check_file(path, self._info.files[part.file])
            file = _opened(path)
            ids = file.get_tensor("ids") if "ids" in file.keys() else torch.empty(0)  # noqa: SIM118
            _check_ids(path, part, ids)
            _check_shapes(path, part, self._table, file)
            if first is not None and not torch.equal(ids, first):
                raise CheckpointError(f"{path} does not hold the rows that {self._opened[0][0].file} has")
            first = ids
            self._opened.append((part, file))
        assert first is not None
        return first

    def part(self, columns: range, rows: slice = slice(None)) -> Part:
        """Returns some of the rows. Their memory is mapped from the files where nothing must be cut or joined."""
        names = ["weight", *state_names(self._table.optimizer), *STAMPS]
        parts = []
        for part, file in self._opened:
            if part.columns[0] < columns.stop and columns.start < part.columns[1]:
                read = {name: file.get_slice(name)[rows] for name in names}
                parts.append(Part(file.get_slice("ids")[rows], range(*part.columns), read))
        return Part.joined(parts, columns)

    def _covering(self, columns: range) -> list[PartInfo]:
        return [part for part in self._parts if part.columns[0] < columns.stop and columns.start < part.columns[1]]


def blocks_by_rank(info: CheckpointInfo, name: str) -> list[list[Block]]:
    """Returns the blocks of a table for each rank that wrote some, rank by rank, in ascending order of the ids.

    Raises:
        CheckpointError: A column shard has no file for some rows.
    """
    table = info.tables[name]
    found: dict[tuple[int, int, int], list[PartInfo]] = defaultdict(list)
    for part in table.parts:
        found[part.first_id, part.last_id, part.rows].append(part)
    by_rank: dict[int, list[Block]] = defaultdict(list)
    for _, parts in sorted(found.items()):
        parts.sort(key=lambda part: part.columns)
        if [part.columns for part in parts] != sorted(table.columns):
            raise CheckpointError(f"{info.path}: table {name!r} has no part of a column shard for some rows")
        by_rank[parts[0].rank].append(Block(info, table, parts))
    return [by_rank[rank] for rank in sorted(by_rank)]


def listed_ids(info: CheckpointInfo, part: PartInfo, *, verify: bool) -> Tensor:
    """Returns the ids of a file that holds no rows, (N,) int64, ascending.

    Raises:
        CheckpointError: See :meth:`Block.open`.
    """
    path = info.path / part.file
    if verify:
        check_file(path, info.files[part.file])
    file = _opened(path)
    ids: Tensor = file.get_tensor("ids") if "ids" in file.keys() else torch.empty(0)  # noqa: SIM118
    _check_ids(path, part, ids)
    return ids


def saved_state(info: CheckpointInfo, name: str) -> TableState:
    """Returns the state of a whole table: its clocks, and what the admission of all its shards has counted.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    table = info.tables[name]
    states = [TableState(table.steps, table.optimizer_steps, table.times)]
    for file in table.sightings:
        try:
            states.append(TableState.from_tensors(read_tensors(info.path / file, info.files[file])))
        except ValueError as error:
            raise CheckpointError(f"{info.path / file}: {error}") from error
    return TableState.merged(states)


def _opened(path: Path) -> Any:
    try:
        return safetensors.safe_open(path, framework="pt")
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is missing or damaged: {error}") from error


def _check_ids(path: Path, part: PartInfo, ids: Tensor) -> None:
    """Compares a file's ids with the metadata of the part.

    Raises:
        CheckpointError: The number of ids, the first or the last id differs, or the ids are not in ascending order.
    """
    if ids.dtype != torch.int64 or ids.dim() != 1 or len(ids) != part.rows:
        raise CheckpointError(f"{path} has ids of shape {tuple(ids.shape)}, and metadata.json says {part.rows}")
    if (int(ids[0]), int(ids[-1])) != (part.first_id, part.last_id) or bool((ids[1:] <= ids[:-1]).any()):
        raise CheckpointError(f"{path} does not have the ids from {part.first_id} to {part.last_id}, each once")


def _check_shapes(path: Path, part: PartInfo, table: TableInfo, file: Any) -> None:
    """Compares the shapes of a file's tensors with the metadata of the part.

    Raises:
        CheckpointError: A tensor is missing, unknown or of another shape.
    """
    columns = part.columns[1] - part.columns[0]
    wanted = {"weight": [part.rows, stored_columns(getattr(torch, table.dtype), columns)]}
    for name, kind in state_names(table.optimizer).items():
        wanted[name] = [part.rows, columns] if kind == "element" else [part.rows]
    wanted |= {name: [part.rows] for name in STAMPS}
    found = {name: list(file.get_slice(name).get_shape()) for name in file.keys() if name != "ids"}  # noqa: SIM118
    if found != wanted:
        raise CheckpointError(f"{path} has tensors of the shapes {found} instead of {wanted}")
