"""Reads the newest rows of a chain of checkpoints, and folds the chain.

The rows are read one window of ids after the other.

All functions raise ``CheckpointError`` if a file is missing or damaged, or does not
agree with the metadata.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from torchrec_recstore.checkpoint.destination import Destination
from torchrec_recstore.checkpoint.files import CheckpointError, FileInfo, check_file
from torchrec_recstore.checkpoint.info import (
    DENSE,
    TRAINING_STATE,
    CheckpointInfo,
    PartInfo,
    TableInfo,
    read_chain,
)
from torchrec_recstore.checkpoint.reader import Block, blocks_by_rank, listed_ids
from torchrec_recstore.checkpoint.writer import (
    PartWriter,
    finish,
    part_rows,
    warn_of_nonfinite,
)
from torchrec_recstore.encoding import encode
from torchrec_recstore.optim import state_names
from torchrec_recstore.store import Part
from torchrec_recstore.store.arguments import among

_WINDOW_BYTES = 16 << 20
_LEAST_ROWS = 64  # The minimum number of rows of each run in a window.


def check_files(
    chain: Iterable[CheckpointInfo],
    on_bytes: Callable[[int], object] = lambda count: None,
) -> None:
    """Compares every file of several checkpoints with its checksum.

    ``on_bytes`` gets the size of each block read.
    """
    for info in chain:
        for name, file in info.files.items():
            check_file(info.path / name, file, on_bytes)


def common_columns(name: str, checkpoints: Iterable[CheckpointInfo]) -> list[range]:
    """Returns the widest ranges of columns that no column shard of a table divides."""
    edges: set[int] = set()
    for info in checkpoints:
        if name in info.tables:
            for begin, end in info.tables[name].columns:
                edges.add(begin)
                edges.add(end)
    return [range(first, last) for first, last in pairwise(sorted(edges))]


class FoldedTable:
    """A reader of one table of a chain of checkpoints, in ascending order of the ids.

    It needs memory for one window of rows, because the files, which must have passed
    :func:`check_files`, are mapped. Weights have the data type of the last checkpoint.
    The rows are split into ``columns``, by default the :func:`common_columns` of the
    chain; a part of a saved column shard gets a copy of its row-wise states.
    """

    def __init__(
        self,
        chain: Sequence[CheckpointInfo],
        name: str,
        columns: Sequence[range] | None = None,
    ) -> None:
        newest = chain[-1].tables[name]
        if columns is None:
            columns = common_columns(name, chain)
        self.columns = columns
        self.states = state_names(newest.optimizer)
        self._dtype = getattr(torch, newest.dtype)
        # The maximum: float32 weights and element-wise states, the id and the stamps.
        columns_bytes = newest.dim * 4
        self._row_bytes = columns_bytes * (1 + len(self.states)) + 24
        self._runs: list[_Run] = []
        self._removals: list[_Removal] = []
        self._name = name
        self._chain = chain
        self._rows = 0

        for level, info in enumerate(chain):
            table = info.tables.get(name)
            if table is None:
                continue
            states = state_names(table.optimizer)
            if table.dim != newest.dim or states != self.states:
                raise CheckpointError(
                    f"table {name!r} of {info.path} has another dim or optimizer state"
                    " later on"
                )
            runs = []
            for blocks in blocks_by_rank(info, name):
                run = _Run(level, blocks, self.columns, table.dim)
                runs.append(run)
            # The newest runs come first: the stable sort in take() keeps them first.
            self._runs = runs + self._runs
            self._removals.append(_Removal(info, level, table))
        self._check_end()

    def bound(self) -> int | None:
        """Returns an id up to which the rows fill about one window.

        The result is None if no rows are left.
        """
        if not self._runs:
            return None
        window_rows = _WINDOW_BYTES // self._row_bytes
        run_rows = max(_LEAST_ROWS, window_rows // len(self._runs))
        return min(run.bound(run_rows) for run in self._runs)

    def take(self, bound: int) -> list[Part]:
        """Reads the rows up to a bound: a part for each range of columns.

        The bound is an id that :meth:`bound` allows. After the last row, the list is
        empty.
        """
        if not self._runs:
            return []

        # From each run its ids, its level for each id, and its parts.
        run_ids = []
        run_levels = []
        run_parts = []
        for run in self._runs:
            ids, parts = run.take(bound)
            newest_parts = [self._as_newest(part, run.level) for part in parts]
            run_ids.append(ids)
            run_levels.append(torch.full_like(ids, run.level))
            run_parts.append(newest_parts)
        self._runs = [run for run in self._runs if run.has_rows]

        # Of the rows of an id, the newest one comes first, and only it is kept.
        ids, order = torch.cat(run_ids).sort(stable=True)
        levels = torch.cat(run_levels)[order]
        is_repeated = ids[1:] == ids[:-1]
        self._check_distinct(ids, levels, is_repeated)

        is_kept = torch.ones_like(ids, dtype=torch.bool)
        is_kept[1:] = ~is_repeated
        for removal in self._removals:
            is_newer = levels >= removal.level
            is_kept &= is_newer | removal.stays(ids)
        order = order[is_kept]

        self._rows += len(order)
        self._check_end()
        window = []
        for column_parts in zip(*run_parts, strict=True):
            all_rows = Part.concatenated(column_parts)
            window.append(all_rows.take(order))
        return window

    def _as_newest(self, part: Part, level: int) -> Part:
        """Returns a part with the data type and frequencies of the last checkpoint."""
        saved = self._chain[level].tables[self._name]
        newest = self._chain[-1].tables[self._name]
        part = part.with_frequencies_of(saved.options, newest.options)
        return part.stored_as(self._dtype)

    def _check_distinct(
        self,
        ids: Tensor,
        levels: Tensor,
        is_repeated: Tensor,
    ) -> None:
        """Refuses an id that several parts of one checkpoint have."""
        is_of_same_level = levels[1:] == levels[:-1]
        is_damaged = is_repeated & is_of_same_level
        for position in is_damaged.nonzero().flatten().tolist():
            level = int(levels[position])
            path = self._chain[level].path
            id = int(ids[position])
            raise CheckpointError(
                f"table {self._name!r} of {path} has the id {id} in several parts"
            )

    def __iter__(self) -> Iterator[list[Part]]:
        bound = self.bound()
        while bound is not None:
            yield self.take(bound)
            bound = self.bound()

    def _check_end(self) -> None:
        """Compares the number of rows with the metadata after the last row."""
        newest = self._chain[-1]
        expected = newest.tables[self._name].rows
        if not self._runs and self._rows != expected:
            raise CheckpointError(
                f"table {self._name!r} of {newest.path} folds into {self._rows} rows"
                f" and should have {expected}"
            )


def together(
    first: FoldedTable,
    second: FoldedTable,
) -> Iterator[tuple[list[Part], list[Part]]]:
    """Yields windows of two tables with the same range of ids.

    A window is an empty list after the last row of a table.
    """
    while True:
        first_bound = first.bound()
        second_bound = second.bound()
        bounds = [bound for bound in (first_bound, second_bound) if bound is not None]
        if not bounds:
            return
        bound = min(bounds)
        yield first.take(bound), second.take(bound)


class _Run:
    """The blocks that one rank has written of one checkpoint. Their ids ascend."""

    def __init__(
        self,
        level: int,
        blocks: Sequence[Block],
        columns: Sequence[range],
        dim: int,
    ) -> None:
        self.level = level
        self._columns = columns
        self._all_columns = range(dim)
        self._blocks = list(blocks[::-1])
        self._position = 0  # of the next id in the block
        self._next_block()

    @property
    def has_rows(self) -> bool:
        """Whether rows remain."""
        return self._position < len(self._ids)

    def bound(self, rows: int) -> int:
        """Returns an id such that about this number of rows precede it."""
        end = min(self._position + rows, len(self._ids))
        return int(self._ids[end - 1])

    def take(self, bound: int) -> tuple[Tensor, list[Part]]:
        """Returns the ids up to a bound, and a part for each range of columns."""
        end = int(torch.searchsorted(self._ids, bound, right=True))
        rows = slice(self._position, end)
        ids = self._ids[rows]
        parts = [self._block.part(columns, rows) for columns in self._columns]
        self._position = end
        if not self.has_rows and self._blocks:
            self._next_block()
        return ids, parts

    def _next_block(self) -> None:
        self._block = self._blocks.pop()
        self._ids = self._block.open(self._all_columns, verify=False)
        self._position = 0  # of the next id in the block


class _Removal:
    """The ids that a delta removes from the older checkpoints of its chain."""

    def __init__(
        self,
        info: CheckpointInfo,
        level: int,
        table: TableInfo,
    ) -> None:
        self.level = level
        self._lists_those_that_stay = table.removal == "stay"
        self._listed: list[tuple[PartInfo, Tensor]] = []
        for part in table.removed:
            ids = listed_ids(info, part, verify=False)
            self._listed.append((part, ids))

    def stays(self, ids: Tensor) -> Tensor:
        """Returns whether each id remains: (N,) bool for (N,) ids in ascending order."""
        is_listed = torch.zeros_like(ids, dtype=torch.bool)
        if len(ids):
            first_id = ids[0]
            last_id = ids[-1]
            for part, listed in self._listed:
                if part.last_id < first_id or part.first_id > last_id:
                    continue
                begin = torch.searchsorted(listed, first_id)
                end = torch.searchsorted(listed, last_id, right=True)
                is_listed |= among(ids, listed[begin:end])

        if self._lists_those_that_stay:
            return is_listed
        return ~is_listed


def check_rows(
    chain: Sequence[CheckpointInfo],
    name: str,
    loaded_rows: int | None,
) -> None:
    """Compares the number of loaded rows with the metadata.

    The rows are those of the shards of the first column.

    A missing part, or one with ids of another part, changes the number. All ids are
    then read again to find that id.

    Args:
        chain: The checkpoints.
        name: The name of the table.
        loaded_rows: The number of rows. None: a shard had no room for some of them.
    """
    expected = chain[-1].tables[name].rows
    if loaded_rows == expected:
        return
    for _ in FoldedTable(chain, name, []):
        pass
    if loaded_rows is not None:
        raise CheckpointError(
            f"table {name!r} of {chain[-1].path} has {loaded_rows} rows when loaded,"
            f" and should have {expected}"
        )


def compact_checkpoint(path: str | Path, output: str | Path) -> CheckpointInfo:
    """Folds a delta and its bases into one full checkpoint; returns its metadata.

    The full checkpoint loads to the same bits.

    A ``RecStoreWarning`` names each table with rows that are not finite.

    The function needs no model, no process group and no memory for a table. The
    checkpoints of the chain are not changed. A model that has saved or loaded the chain
    must load ``output`` before it can save deltas of ``output``.

    Args:
        path: The delta's directory. A full checkpoint is copied.
        output: The directory of the new checkpoint. It is complete or does not exist.

    Raises:
        FileNotFoundError: There is no checkpoint at ``path``, or the base of a delta is
            missing.
        FileExistsError: ``output`` exists.
        BlockingIOError: Another process is writing to ``output``, or is replacing a
            checkpoint of the chain.
        CheckpointError: A file is missing or damaged, or the format is that of another
            version.
        OSError: A file cannot be written.
    """
    with folding(path, output) as (chain, destination):
        check_files(chain)
        return compact_chain(chain, destination)


@contextmanager
def folding(
    path: str | Path,
    output: str | Path,
) -> Iterator[tuple[list[CheckpointInfo], Destination]]:
    """Yields the chain of ``path``, locked, and the destination at ``output``."""
    if os.path.lexists(output):
        raise FileExistsError(f"{output} exists already: name a path that does not")
    chain = read_chain(path)
    with Destination(Path(os.path.abspath(output)), bases=chain) as destination:
        yield chain, destination


def compact_chain(
    chain: Sequence[CheckpointInfo],
    destination: Destination,
    on_rows: Callable[[int], object] = lambda count: None,
) -> CheckpointInfo:
    """Folds what :func:`folding` yields, after :func:`check_files`.

    ``on_rows`` gets each part's number of rows.
    """
    staging = destination.stage()
    writer = PartWriter(staging, rank=0)
    newest = chain[-1]
    tables = {}
    nonfinite: Counter[str] = Counter()
    try:
        for name in newest.tables:
            tables[name] = _compact_table(
                chain,
                name,
                writer,
                on_rows,
                nonfinite,
            )
    finally:
        files = writer.close()

    copied = [DENSE, TRAINING_STATE]
    for table in newest.tables.values():
        copied += table.sightings
    for name in copied:
        if name in newest.files:
            files[name] = newest.files[name]
            _copy(newest.path / name, staging / name, files[name])

    info = replace(
        newest,
        path=destination.path,
        tables=tables,
        files=files,
        delta_of=None,
    )
    training_state = encode(newest.training_state, {})
    compacted = finish(destination, info, training_state)
    for name, count in nonfinite.items():
        warn_of_nonfinite(name, count)
    return compacted


def _compact_table(
    chain: Sequence[CheckpointInfo],
    name: str,
    writer: PartWriter,
    on_rows: Callable[[int], object],
    nonfinite: Counter[str],
) -> TableInfo:
    """Writes the rows of a table, and adds those that are not finite to
    ``nonfinite``.
    """
    table = chain[-1].tables[name]
    folded = FoldedTable(chain, name)
    parts: list[PartInfo] = []
    dtype = getattr(torch, table.dtype)
    size = part_rows(table.dim, dtype, table.optimizer)
    for number, shards in enumerate(_resized(folded, size)):
        parts += [writer.part(name, number, part) for part in shards]
        nonfinite_count = count_nonfinite(shards)
        if nonfinite_count:
            nonfinite[name] += nonfinite_count
        on_rows(len(shards[0]))

    bounds_of_columns = []
    for columns in folded.columns:
        bounds_of_columns.append((columns.start, columns.stop))
    return replace(
        table,
        columns=tuple(bounds_of_columns),
        parts=tuple(parts),
        removal="left",
        removed=(),
    )


def count_nonfinite(parts: Sequence[Part]) -> int:
    """Returns how many rows have a weight or state that is not finite.

    Args:
        parts: The same rows in each range of columns. At least one part.
    """
    is_finite = parts[0].is_finite()
    for part in parts[1:]:
        is_finite &= part.is_finite()
    return int((~is_finite).sum())


def _resized(folded: FoldedTable, size: int) -> Iterator[list[Part]]:
    """Yields the rows in windows of ``size`` rows, as a save by one rank has them."""
    windows: list[list[Part]] = []
    count = 0
    for window in folded:
        windows.append(window)
        count += len(window[0])
        while count >= size:
            shards = _concatenated(windows)
            first_rows = slice(0, size)
            other_rows = slice(size, None)
            yield [part.take(first_rows) for part in shards]
            remaining = [part.take(other_rows) for part in shards]
            windows = [remaining]
            count -= size
    if count:
        yield _concatenated(windows)


def _concatenated(windows: Sequence[Sequence[Part]]) -> list[Part]:
    return [Part.concatenated(parts) for parts in zip(*windows, strict=True)]


def _copy(
    source: Path,
    target: Path,
    expected: FileInfo,
) -> None:
    with source.open("rb") as source_file:
        try:
            with target.open("wb") as target_file:
                shutil.copyfileobj(source_file, target_file)
                target_file.flush()
                os.fsync(target_file.fileno())
        except OSError as error:
            reason = f"cannot be written: {error.strerror}"
            raise OSError(error.errno, reason, os.fspath(target)) from error
    check_file(target, expected)
