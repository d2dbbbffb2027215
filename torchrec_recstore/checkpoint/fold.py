"""Reads the rows that a chain of checkpoints holds, one window of ids after the other, without a table in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from torchrec_recstore.checkpoint.blocks import Block, blocks_by_rank, listed_ids
from torchrec_recstore.checkpoint.files import CheckpointError, check_file
from torchrec_recstore.checkpoint.info import CheckpointInfo, TableInfo
from torchrec_recstore.optim import state_names
from torchrec_recstore.store import Part
from torchrec_recstore.store.arguments import among

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


def common_columns(tables: Iterable[TableInfo]) -> list[range]:
    """Returns the widest ranges of columns such that no column shard of a table begins or ends within a range."""
    edges = sorted({edge for table in tables for columns in table.columns for edge in columns})
    return [range(first, last) for first, last in pairwise(edges)]


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

    def __init__(self, chain: Sequence[CheckpointInfo], name: str, columns: Sequence[range]) -> None:
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
            runs = [_Run(level, blocks, columns, table.dim) for blocks in blocks_by_rank(info, name)]
            self._runs = runs + self._runs  # The newest runs come first: the stable sort in take() keeps them first.
            self._removals.append(_Removal(info, level, table))
        self._check_end()

    def bound(self) -> int | None:
        """Returns an id such that the rows up to it fill about one window; None if no rows are left."""
        rows = max(_LEAST_ROWS, _WINDOW_BYTES // self._row_bytes // max(1, len(self._runs)))
        return min((run.bound(rows) for run in self._runs), default=None)

    def take(self, bound: int) -> list[Part]:
        """Reads the remaining rows with ids up to ``bound``.

        Args:
            bound: The greatest id to read. It is not greater than :meth:`bound`.

        Returns:
            For each range of columns a part with the same ids, in ascending order. An empty list if no rows are left.
        """
        if not self._runs:
            return []
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
        self._rows += len(order)
        self._check_end()
        return [
            Part.concatenated([part.stored_as(self._dtype) for part in of_columns]).take(order)
            for of_columns in zip(*(parts for _, _, parts in taken), strict=True)
        ]

    def __iter__(self) -> Iterator[list[Part]]:
        """Yields all windows; see :meth:`take`."""
        while (bound := self.bound()) is not None:
            yield self.take(bound)

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
    """The blocks that one rank has written of one checkpoint. Their ids ascend."""

    def __init__(self, level: int, blocks: Sequence[Block], columns: Sequence[range], dim: int) -> None:
        self.level = level
        self._columns = columns
        self._whole = range(dim)
        self._blocks = list(blocks[::-1])
        self._at = 0
        self._ids: Tensor
        self._next_block()

    @property
    def left(self) -> bool:
        return self._at < len(self._ids)

    def bound(self, rows: int) -> int:
        return int(self._ids[min(self._at + rows, len(self._ids)) - 1])

    def take(self, bound: int) -> tuple[Tensor, list[Part]]:
        rows = slice(self._at, int(torch.searchsorted(self._ids, bound, right=True)))
        ids = self._ids[rows]
        parts = [self._block.part(columns, rows) for columns in self._columns]
        self._at = rows.stop
        if not self.left and self._blocks:
            self._next_block()
        return ids, parts

    def _next_block(self) -> None:
        self._block = self._blocks.pop()
        self._ids = self._block.open(self._whole, verify=False)
        self._at = 0


class _Removal:
    """The ids that a delta removes from the older checkpoints of its chain."""

    def __init__(self, info: CheckpointInfo, level: int, table: TableInfo) -> None:
        self.level = level
        self._those_that_stay = table.removal == "stay"
        self._listed = [(part.first_id, part.last_id, listed_ids(info, part, verify=False)) for part in table.removed]

    def stays(self, ids: Tensor) -> Tensor:
        """Returns whether each id remains: (N,) bool for (N,) ids in ascending order."""
        listed = torch.zeros_like(ids, dtype=torch.bool)
        for first, last, part in self._listed:
            if len(ids) and first <= ids[-1] and ids[0] <= last:
                begin, end = torch.searchsorted(part, ids[0]), torch.searchsorted(part, ids[-1], right=True)
                listed |= among(ids, part[begin:end])
        return listed if self._those_that_stay else ~listed
