"""Reads the rows that a chain of checkpoints holds, one window of ids after the other, without a table in memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from torchrec_recstore.checkpoint.files import CheckpointError, check_file, read_ids
from torchrec_recstore.checkpoint.info import CheckpointInfo, PartInfo, TableInfo, check_ids, check_shapes
from torchrec_recstore.optim import state_names
from torchrec_recstore.row_types import as_stored, columns_of
from torchrec_recstore.store.arguments import among

Columns = tuple[int, int]
"""A range of columns: the first column and the column after the last."""

_WINDOW_BYTES = 16 << 20
_LEAST_ROWS = 64  # The minimum number of rows of each run in a window.


def check_files(chain: Iterable[CheckpointInfo], on_bytes: Callable[[int], object] = lambda count: None) -> None:
    """Compares every file of several checkpoints with its checksum.

    Args:
        chain: The metadata of the checkpoints.
        on_bytes: A callback that is called with the number of bytes read since the last call.

    Raises:
        CheckpointError: A file is missing or damaged. The message names the file.
    """
    for info in chain:
        for name, file in info.files.items():
            check_file(info.path / name, file, on_bytes)


def tables_named(name: str, chain: Iterable[CheckpointInfo]) -> list[TableInfo]:
    """Returns the table's metadata in each checkpoint that has the table."""
    return [info.tables[name] for info in chain if name in info.tables]


def common_columns(tables: Iterable[TableInfo]) -> list[Columns]:
    """Returns the widest ranges of columns such that no column shard of a table begins or ends within a range."""
    return list(pairwise(sorted({edge for table in tables for columns in table.columns for edge in columns})))


class FoldedTable:
    """A reader of one table of a chain of checkpoints, in ascending order of the ids.

    It needs memory for one window of rows, because the files are mapped. The files must have passed
    :func:`check_files`. Weights have the data type of the last checkpoint.

    Args:
        chain: The metadata of the checkpoints, the full checkpoint first.
        name: The name of a table of the last checkpoint.
        columns: The ranges of columns that the rows are split into: :func:`common_columns` of the chain's tables, or
            narrower ranges. If a range is a part of a saved column shard, it gets a copy of the row-wise states.

    Raises:
        CheckpointError: The table has different dims or optimizer states in the chain, or a file is missing or does
            not agree with the metadata. :meth:`take` also raises it if an id is in several parts of one checkpoint, or
            if the number of all rows differs from the metadata.
    """

    def __init__(self, chain: Sequence[CheckpointInfo], name: str, columns: Sequence[Columns]) -> None:
        newest = chain[-1].tables[name]
        self.states = state_names(newest.optimizer)
        """The optimizer's states; see :func:`torchrec_recstore.optim.state_names`."""
        self._dtype = getattr(torch, newest.dtype)
        self._row_bytes = newest.dim * 4 * (1 + len(self.states)) + 24  # The maximum.
        self._runs: list[_Run] = []
        self._removals: list[_Removal] = []
        self._name = name
        self._chain = chain
        self._rows = 0
        for level, info in enumerate(chain):
            table = info.tables.get(name)
            if table is None:
                continue
            if (table.dim, state_names(table.optimizer)) != (newest.dim, self.states):
                raise CheckpointError(f"table {name!r} of {info.path} has another dim or optimizer state later on")
            runs = [_Run(info.path, level, blocks, columns, table) for blocks in _runs(info.path, name, table)]
            self._runs = runs + self._runs  # The newest runs come first: the stable sort in take() keeps them first.
            self._removals.append(_Removal(info.path, level, table))
        self._check_end()

    def bound(self) -> int | None:
        """Returns an id such that the rows up to it fill about one window; None if no rows are left."""
        rows = max(_LEAST_ROWS, _WINDOW_BYTES // self._row_bytes // max(1, len(self._runs)))
        return min((run.bound(rows) for run in self._runs), default=None)

    def take(self, bound: int) -> tuple[Tensor, list[dict[str, Tensor]]]:
        """Reads the remaining rows with ids up to ``bound``.

        Args:
            bound: The greatest id to read. It is not greater than :meth:`bound`.

        Returns:
            ids, (N,) int64, in ascending order, and for each range of columns the rows in the form of
            :meth:`torchrec_recstore.store.Table.read_rows`. The list is empty if no rows are left.
        """
        if not self._runs:
            return torch.empty(0, dtype=torch.int64), []
        taken = [(run.level, *run.take(bound)) for run in self._runs]
        self._runs = [run for run in self._runs if run.left]
        levels = torch.cat([torch.full_like(ids, level) for level, ids, _ in taken])
        ids, order = torch.cat([ids for _, ids, _ in taken]).sort(stable=True)
        same = ids[1:] == ids[:-1]
        self._check_once(ids[1:][same], levels[order][1:][same], levels[order][:-1][same])
        kept = torch.ones_like(ids, dtype=torch.bool)
        kept[1:] = ~same
        for removal in self._removals:
            kept &= (levels[order] >= removal.level) | removal.stays(ids)
        order = order[kept]
        for _, _, rows in taken:
            for of_columns in rows:
                of_columns["weight"] = as_stored(of_columns["weight"], self._dtype)
        shards = [
            {name: torch.cat([rows[name] for rows in shard])[order] for name in shard[0]}
            for shard in zip(*(rows for _, _, rows in taken), strict=True)
        ]
        self._rows += len(order)
        self._check_end()
        return ids[kept], shards

    def _check_end(self) -> None:
        """Compares the number of rows with the metadata after the last row."""
        newest = self._chain[-1]
        wanted = newest.tables[self._name].rows
        if not self._runs and self._rows != wanted:
            raise CheckpointError(
                f"table {self._name!r} of {newest.path} folds into {self._rows} rows and should have {wanted}"
            )

    def _check_once(self, ids: Tensor, levels: Tensor, others: Tensor) -> None:
        """Refuses an id that is in several parts of one checkpoint.

        Args:
            ids: (N,) int64. The ids that occur more than once.
            levels: (N,) int64. The position in the chain of each id's checkpoint.
            others: (N,) int64. The position of the checkpoint of the previous row, which has the same id.
        """
        for place in (levels == others).nonzero().flatten().tolist():
            path = self._chain[int(levels[place])].path
            raise CheckpointError(f"table {self._name!r} of {path} has the id {int(ids[place])} in several parts")


class _Run:
    """A sequence of parts of one checkpoint with ascending ids. Each part has one file for each column shard."""

    def __init__(
        self,
        directory: Path,
        level: int,
        blocks: Sequence[Sequence[PartInfo]],
        columns: Sequence[Columns],
        table: TableInfo,
    ) -> None:
        self.level = level
        self._directory = directory
        self._blocks = list(blocks[::-1])
        self._columns = columns
        self._table = table
        states = state_names(table.optimizer)
        self._per_element = {name for name, kind in states.items() if kind == "element"}
        self._names = [*states, "last_step", "frequency"]
        self._at = 0
        self._ids: Tensor
        self._files: dict[Columns, Any]
        self._next_block()

    @property
    def left(self) -> bool:
        return self._at < len(self._ids)

    def bound(self, rows: int) -> int:
        return int(self._ids[min(self._at + rows, len(self._ids)) - 1])

    def take(self, bound: int) -> tuple[Tensor, list[dict[str, Tensor]]]:
        begin, end = self._at, int(torch.searchsorted(self._ids, bound, right=True))
        ids = self._ids[begin:end]
        rows = [self._rows(begin, end, columns) for columns in self._columns]
        self._at = end
        if not self.left and self._blocks:
            self._next_block()
        return ids, rows

    def _next_block(self) -> None:
        block = self._blocks.pop()
        self._files = {part.columns: _opened(self._directory / part.file) for part in block}
        for part in block:
            path, file = self._directory / part.file, self._files[part.columns]
            ids = read_ids(path)
            check_ids(path, part, ids)
            if part is not block[0] and not torch.equal(ids, self._ids):
                raise CheckpointError(f"{path} does not hold the rows that {block[0].file} has")
            self._ids = ids
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys() if name != "ids"}  # noqa: SIM118
            check_shapes(path, part, self._table, shapes)
        self._at = 0

    def _rows(self, begin: int, end: int, columns: Columns) -> dict[str, Tensor]:
        first, file = next(
            (shard[0], file) for shard, file in self._files.items() if shard[0] <= columns[0] and columns[1] <= shard[1]
        )
        cut = slice(columns[0] - first, columns[1] - first)
        rows = {
            name: file.get_slice(name)[begin:end, cut] if name in self._per_element else file.get_slice(name)[begin:end]
            for name in self._names
        }
        return {"weight": columns_of(file.get_slice("weight")[begin:end], cut), **rows}


class _Removal:
    """The ids that a delta removes from the older checkpoints of its chain."""

    def __init__(self, directory: Path, level: int, table: TableInfo) -> None:
        self.level = level
        self._those_that_stay = table.removal == "stay"
        self._listed = [(part.first_id, part.last_id, read_ids(directory / part.file)) for part in table.removed]
        for part, (_, _, ids) in zip(table.removed, self._listed, strict=True):
            check_ids(directory / part.file, part, ids)

    def stays(self, ids: Tensor) -> Tensor:
        """Returns whether each id remains: (N,) bool for (N,) ids in ascending order."""
        listed = torch.zeros_like(ids, dtype=torch.bool)
        for first, last, part in self._listed:
            if len(ids) and first <= ids[-1] and ids[0] <= last:
                begin, end = torch.searchsorted(part, ids[0]), torch.searchsorted(part, ids[-1], right=True)
                listed |= among(ids, part[begin:end])
        return listed if self._those_that_stay else ~listed


def _runs(directory: Path, name: str, table: TableInfo) -> list[list[list[PartInfo]]]:
    """Groups the parts that hold the same rows, and returns these groups by rank, in ascending order of the ids.

    Raises:
        CheckpointError: A column shard has no part for some rows.
    """
    blocks: dict[tuple[int, int, int], list[PartInfo]] = defaultdict(list)
    for part in table.parts:
        blocks[part.first_id, part.last_id, part.rows].append(part)
    runs: dict[int, list[list[PartInfo]]] = defaultdict(list)
    for _, block in sorted(blocks.items()):
        if sorted(part.columns for part in block) != sorted(table.columns):
            raise CheckpointError(f"{directory}: table {name!r} has no part of a column shard for some rows")
        runs[min(block, key=lambda part: part.columns).rank].append(block)
    return list(runs.values())


def _opened(path: Path) -> Any:
    try:
        return safetensors.safe_open(path, framework="pt")
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is missing or damaged: {error}") from error
