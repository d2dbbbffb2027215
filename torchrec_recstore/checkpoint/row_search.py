"""Finds the hottest, longest, most changed and nearest rows of tables.

The tables are in this process or in checkpoints.

A look needs memory for one block of rows, and for one float32 of each row for the
quantiles.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from torchrec_recstore.checkpoint.fold import FoldedTable, check_files, together
from torchrec_recstore.checkpoint.info import CheckpointInfo, read_chain
from torchrec_recstore.options import Scored
from torchrec_recstore.store import Part, Parts, Table
from torchrec_recstore.store.arguments import among
from torchrec_recstore.store.parts import STAMPS

By = Literal["frequency", "last_step", "norm", "drift"]
Metric = Literal["cosine", "dot", "l2"]
Source = Table | str | os.PathLike[str]
"""A table in this process, or the directory of a checkpoint."""

_BLOCK_ROWS = 1 << 16
_QUANTILES = (0.5, 0.9, 0.99, 1.0)


@dataclass(frozen=True)
class TopRows:
    """The rows with the largest values, and a summary of all rows of the table.

    Args:
        rows: The number of rows of the table.
        steps: The number of its training lookups.
        added: The number of rows that the checkpoint ``since`` does not have. None
            without ``since``.
        gone: The number of rows of ``since`` that have left. None without ``since``.
        ids: (n,) int64, by the value in descending order, and by the id where values
            are equal.
        columns: By name, (n,) tensors of the same rows: ``frequency`` and
            ``last_step``, int64, ``norm``, float32, and with ``since`` also ``drift``,
            float32, NaN for rows that ``since`` does not have.
        quantiles: By name of a column, its quantiles over all rows: of 0.5, 0.9, 0.99
            and 1.
    """

    rows: int
    steps: int
    added: int | None
    gone: int | None
    ids: Tensor
    columns: Mapping[str, Tensor]
    quantiles: Mapping[str, Mapping[float, float]]


def top_rows(
    source: Source,
    table: str | None = None,
    *,
    by: By = "frequency",
    count: int = 20,
    since: str | os.PathLike[str] | None = None,
    advance: Callable[[int], object] = lambda rows: None,
) -> TopRows:
    """Returns the rows with the largest frequency, last step, norm or drift.

    Nothing is changed.

    Args:
        source: A table, or the directory of a checkpoint. The files of a checkpoint are
            verified.
        table: The name of a table of the checkpoint, needed if there are several.
        by: The value: ``"frequency"``, the number of steps that looked the row up (see
            :class:`LFU`, which may count occurrences; 0 with :class:`Scored`, which
            does not count); ``"last_step"``, the last such step; ``"norm"``, the L2
            norm of the weights; ``"drift"``, the L2 norm of the change since ``since``.
        count: The number of rows to return.
        since: The directory of an earlier checkpoint with the same table.
        advance: A callback that is called with the number of rows read since the last
            call.

    Raises:
        ValueError: The table is not in the checkpoint or has another dim in ``since``,
            an argument is invalid, or ``by="drift"`` has no ``since``.
        CheckpointError: A file is missing or damaged.
    """
    _check_arguments("by", by, By, count)
    if by == "drift" and since is None:
        raise ValueError("by='drift' compares with an earlier checkpoint: pass since=")
    opened = _open(source, table)
    earlier = None if since is None else _Earlier(since, opened)
    top = _Top(by, count)
    # The values of all rows, in parts.
    measured: dict[str, list[Tensor]] = {"frequency": [], "norm": []}
    if earlier is not None:
        measured["drift"] = []

    for block, drift in _blocks_with_drift(opened, earlier):
        columns = {name: block.rows[name] for name in STAMPS}
        columns["norm"] = block.weights.norm(dim=1)
        if isinstance(opened.options.eviction, Scored):
            columns["frequency"] = torch.zeros_like(columns["frequency"])
        if drift is not None:
            columns["drift"] = drift

        for name, parts in measured.items():
            values = columns[name]
            is_number = ~values.isnan()
            parts.append(values[is_number].float())
        top.add(block.ids, columns)
        advance(len(block.ids))

    quantiles = {}
    for name, parts in measured.items():
        if parts:
            quantiles[name] = _quantiles(torch.cat(parts))
    added: int | None = None
    gone: int | None = None
    if earlier is not None:
        added = opened.rows - earlier.remaining
        gone = earlier.rows - earlier.remaining
    return TopRows(
        rows=opened.rows,
        steps=opened.steps,
        added=added,
        gone=gone,
        ids=top.ids,
        columns=top.columns,
        quantiles=quantiles,
    )


class _Top:
    """The rows with the largest values of one column, of the rows added so far."""

    def __init__(self, by: By, count: int) -> None:
        self._by = by
        self._count = count
        self.ids = torch.empty(0, dtype=torch.int64)
        self.columns: dict[str, Tensor] = {}

    def add(self, ids: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Adds the rows of a block, (N,) int64 ids and (N,) columns by name."""
        all_ids = torch.cat([self.ids, ids])
        all_columns: dict[str, Tensor] = {}
        for name, values in columns.items():
            if name in self.columns:
                values = torch.cat([self.columns[name], values])
            all_columns[name] = values

        keys = all_columns[self._by].double().nan_to_num(nan=-torch.inf)
        order = descending(keys, all_ids)[: self._count]
        self.ids = all_ids[order]
        for name, values in all_columns.items():
            self.columns[name] = values[order]


def _blocks_with_drift(
    opened: _Opened,
    earlier: _Earlier | None,
) -> Iterator[tuple[Part, Tensor | None]]:
    """Yields the rows, and their drift if there is an earlier checkpoint."""
    if earlier is not None:
        yield from earlier.blocks()
        return
    for block in opened.blocks():
        yield block, None


def neighbours(
    source: Source,
    id: int,
    table: str | None = None,
    *,
    count: int = 10,
    metric: Metric = "cosine",
    advance: Callable[[int], object] = lambda rows: None,
) -> tuple[Tensor, Tensor]:
    """Returns the rows that are nearest to the row of an id.

    All rows are compared; nothing is changed.

    Args:
        source: A table, or the directory of a checkpoint. The files of a checkpoint are
            verified.
        id: The id. Its own row is not among the results.
        table: The name of a table of the checkpoint, needed if there are several.
        count: The number of rows to return.
        metric: ``"cosine"`` or ``"dot"``, the larger the nearer, or ``"l2"``, the
            Euclidean distance.
        advance: A callback that is called with the number of rows read since the last
            call, in two passes.

    Returns:
        ids, (n,) int64, the nearest first, and their cosines, products or distances,
        (n,) float32.

    Raises:
        ValueError: The id has no row, or a reason of :func:`top_rows`.
        CheckpointError: A file is missing or damaged.
    """
    _check_arguments("metric", metric, Metric, count)
    opened = _open(source, table)
    row = None
    for block in opened.blocks():
        is_match = block.ids == id
        matching_rows = block.weights[is_match]
        if len(matching_rows):
            row = matching_rows[0]
        advance(len(block.ids))
    if row is None:
        raise ValueError(f"id {id} has no row in {opened.name}")
    return _nearest(opened, row, id, metric, count, advance)


def nearest(
    table: Table,
    row: Tensor,
    *,
    but: int,
    count: int = 10,
    metric: Metric = "cosine",
) -> tuple[Tensor, Tensor]:
    """Returns the rows of a table that are nearest to ``row``, (dim,) float32.

    The id ``but`` is left out. See :func:`neighbours`.
    """
    _check_arguments("metric", metric, Metric, count)
    return _nearest(
        _OfTable(table),
        row,
        but,
        metric,
        count,
        lambda rows: None,
    )


def _check_arguments(
    name: str,
    value: str,
    literal: Any,
    count: int,
) -> None:
    choices = get_args(literal)
    if value not in choices:
        listed = ", ".join(choices)
        raise ValueError(f"{name}={value!r} is not one of {listed}")
    if count < 1:
        raise ValueError(f"count must be at least 1, not {count}")


def _nearest(
    opened: _Opened,
    row: Tensor,
    but: int,
    metric: Metric,
    count: int,
    advance: Callable[[int], object],
) -> tuple[Tensor, Tensor]:
    nearness: dict[Metric, Callable[[Tensor], Tensor]] = {
        "cosine": lambda weights: cosine_similarity(weights, row, dim=1),
        "dot": lambda weights: weights @ row,
        "l2": lambda weights: (weights - row).norm(dim=1),
    }
    ids = torch.empty(0, dtype=torch.int64)
    values = torch.empty(0)
    for block in opened.blocks():
        is_candidate = block.ids != but
        block_values = nearness[metric](block.weights[is_candidate])
        ids = torch.cat([ids, block.ids[is_candidate]])
        values = torch.cat([values, block_values])

        keys = values.double()
        if metric == "l2":
            keys = -keys
        order = descending(keys, ids)[:count]
        ids = ids[order]
        values = values[order]
        advance(len(block.ids))
    return ids, values


def descending(keys: Tensor, ids: Tensor) -> Tensor:
    """Returns the positions of keys in descending order.

    Equal keys are in ascending order of ``ids``.
    """
    by_id = ids.argsort()
    keys_by_id = keys[by_id]
    order = keys_by_id.argsort(descending=True, stable=True)
    return by_id[order]


def _quantiles(measured: Tensor) -> dict[float, float]:
    if not len(measured):
        return {}
    ascending = measured.sort().values
    quantiles = {}
    last = len(ascending) - 1
    for fraction in _QUANTILES:
        position = int(fraction * len(ascending))
        quantiles[fraction] = float(ascending[min(position, last)])
    return quantiles


class _OfTable:
    """Reads the rows of a table in this process."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self.rows = len(table)
        self.steps = table.steps
        self.name = repr(table)
        self.options = table.options

    def blocks(self) -> Parts:
        for ids in torch.split(self._table.ids(), _BLOCK_ROWS):
            yield self._block(ids)

    def _block(self, ids: Tensor) -> Part:
        """Reads the rows of those of the ids that have one."""
        while True:
            has_row = self._table.contains(ids)
            present = ids[has_row]
            try:
                return self._table.part(present)
            except ValueError:
                # Otherwise rows have left since, in another thread: try again.
                if self._table.contains(present).all():
                    raise


class _OfCheckpoint:
    """Reads the rows of one table of a checkpoint."""

    def __init__(self, chain: list[CheckpointInfo], table: str) -> None:
        info = chain[-1].tables[table]
        self.chain = chain
        self.table = table
        self.rows = info.rows
        self.steps = info.steps
        self.dim = info.dim
        self.options = info.options
        self.name = f"table {table!r} of {chain[-1].path}"

    def blocks(self) -> Parts:
        for window in FoldedTable(self.chain, self.table):
            yield Part.joined(window, range(self.dim))


_Opened = _OfTable | _OfCheckpoint


class _Earlier:
    """The rows of an earlier checkpoint, which are read next to those of a later one."""

    def __init__(self, path: str | os.PathLike[str], later: _Opened) -> None:
        if not isinstance(later, _OfCheckpoint):
            raise ValueError("since= compares two checkpoints: save the table first")
        earlier = _open(path, later.table)
        assert isinstance(earlier, _OfCheckpoint)
        if earlier.dim != later.dim:
            raise ValueError(
                f"{later.name} has dim {later.dim}, and {earlier.name} has dim"
                f" {earlier.dim}"
            )
        self.rows = earlier.rows
        self.remaining = 0  # the number of rows that the later checkpoint has, too
        self._later = later
        self._earlier = earlier

    def blocks(self) -> Iterator[tuple[Part, Tensor]]:
        """Yields the rows of the later checkpoint, and the L2 norm of their changes.

        The change of a new row is NaN.
        """
        columns = range(self._later.dim)
        later_table = FoldedTable(self._later.chain, self._later.table)
        earlier_table = FoldedTable(self._earlier.chain, self._earlier.table)
        for later_window, earlier_window in together(later_table, earlier_table):
            if not later_window:
                return
            later = Part.joined(later_window, columns)
            changes = torch.full((len(later),), torch.nan)
            if earlier_window:
                earlier = Part.joined(earlier_window, columns)
                in_earlier = among(later.ids, earlier.ids)
                in_later = among(earlier.ids, later.ids)
                weights_after = later.weights[in_earlier]
                weights_before = earlier.weights[in_later]
                difference = weights_after - weights_before
                changes[in_earlier] = difference.norm(dim=1)
                self.remaining += int(in_earlier.sum())
            yield later, changes


def _open(source: Source, table: str | None) -> _Opened:
    if isinstance(source, Table):
        if table is not None:
            raise ValueError(
                "table= names a table of a checkpoint, and the source is a table"
            )
        return _OfTable(source)

    chain = read_chain(Path(source))
    check_files(chain)
    newest = chain[-1]
    names = sorted(newest.tables)
    if table is None and len(names) == 1:
        (table,) = names
    if table not in names:
        problem = f"there is no table {table!r}"
        if table is None:
            problem = "name one of its tables"
        listed = ", ".join(names)
        raise ValueError(f"{newest.path}: {problem}: {listed}")
    return _OfCheckpoint(list(chain), table)
