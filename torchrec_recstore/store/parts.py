"""The rows and the counts of whole tables, made of those of several shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from torchrec_recstore.optim import Optimizer, state_names
from torchrec_recstore.row_types import columns_of, joined_columns, stored_dtype, values
from torchrec_recstore.store.snapshot import column_weighted_mean
from torchrec_recstore.store.table import Table
from torchrec_recstore.store.writing import write_all

PART_BYTES = 1 << 25
"""The approximate size in bytes of a part of a checkpoint. The format allows parts of 256 MB."""
COUNTER_SHAPE = (2, 4)
"""The number of generations and of rows of cells in the counter of an admission; see csrc/sightings.h."""


def rows_in(size: int, dim: int, dtype: torch.dtype, optimizer: Optimizer) -> int:
    """Returns the number of rows in a part of ``size`` bytes, at least 1.

    The number is the same for every column shard of a table, so that the parts of all column shards hold the same ids.

    Args:
        size: The size of the part in bytes.
        dim: The number of columns of the whole table.
        dtype: The data type of the table's weights.
        optimizer: The table's optimizer.
    """
    states = state_names(optimizer).values()
    row = dim * (dtype.itemsize + 4 * sum(kind == "element" for kind in states)) + 4 * len(states) + 24
    return max(1, size // row)


def common_columns(
    rows: Mapping[str, Tensor], held: range, wanted: range, states: Mapping[str, str]
) -> dict[str, Tensor]:
    """Returns the part of a column shard's rows that lies in other columns. Row-wise states are not cut.

    Args:
        rows: The rows of the column shard, in the form of :meth:`Table.read_rows`.
        held: The columns of the column shard.
        wanted: The other columns. Some of them are in ``held``.
        states: The optimizer's states; see :func:`torchrec_recstore.optim.state_names`.
    """
    if held.start >= wanted.start and held.stop <= wanted.stop:
        return dict(rows)
    cut = slice(max(held.start, wanted.start) - held.start, min(held.stop, wanted.stop) - held.start)
    found = {name: value[:, cut] if states.get(name) == "element" else value for name, value in rows.items()}
    return {**found, "weight": columns_of(rows["weight"], cut)}


def joined_rows(
    pieces: Sequence[tuple[range, dict[str, Tensor]]], columns: range, states: Mapping[str, str]
) -> dict[str, Tensor]:
    """Returns the rows of a shard, made of the rows of the column shards that cover it.

    A row-wise state is the column-weighted mean of the states of the column shards, or a copy if there is only one. The
    weights of 8-bit rows are exact. Those of several column shards, which have different scales, are float32.

    Args:
        pieces: The columns and the rows of each covering column shard, in ascending order. The rows have the form of
            :meth:`Table.read_rows`, and all pieces hold the same ids.
        columns: The columns of the shard.
        states: The optimizer's states; see :func:`torchrec_recstore.optim.state_names`.
    """
    cut = [common_columns(rows, held, columns, states) for held, rows in pieces]
    widths = [min(held.stop, columns.stop) - max(held.start, columns.start) for held, _ in pieces]

    def joined(name: str) -> Tensor:
        return cut[0][name] if len(cut) == 1 else torch.cat([rows[name] for rows in cut], dim=1)

    def mean(name: str) -> Tensor:
        return column_weighted_mean([rows[name] for rows in cut], widths)

    rows = {name: joined(name) if kind == "element" else mean(name) for name, kind in states.items()}
    weight = joined_columns([rows["weight"] for rows in cut])
    return {"weight": weight, **rows, "last_step": cut[0]["last_step"], "frequency": cut[0]["frequency"]}


def write_joined(table: Table, ids: Tensor, rows: dict[str, Tensor]) -> None:
    """Writes the result of :func:`joined_rows` into a shard, rounded to nearest if the table has another data type."""
    if rows["weight"].dtype is not stored_dtype(table.dtype):
        rows = {**rows, "weight": values(rows["weight"])}  # Every table accepts float32 and rounds to its own type.
    write_all(table, ids, rows)


def merged_counters(counters: Iterable[tuple[Tensor, int]], cells: int) -> tuple[Tensor, int]:
    """Merges the counters of the admissions of several shards, for any number of shards and any sizes of counters.

    Shards have different ids. The merged cell is the maximum of the shards' cells, so the count of an id may be too
    high and is never too low. Cells of a larger counter are merged, and cells of a smaller counter are repeated.

    Args:
        counters: The cells, (2, 4, N) uint8, and the number of sightings in the present generation, of each shard.
        cells: The number of cells in each row of the merged counter.

    Returns:
        (2, 4, cells) uint8, the counts; and the greatest number of sightings in the present generation of a shard.
    """
    counts = torch.zeros(*COUNTER_SHAPE, cells, dtype=torch.uint8)
    taken = 0
    for found, its_taken in counters:
        if found.shape[2] > cells:  # The number of a cell is the low bits of a hash.
            found = found.view(*COUNTER_SHAPE, -1, cells).amax(dim=2)
        counts = torch.maximum(counts, found.repeat(1, 1, cells // found.shape[2]))
        taken = max(taken, its_taken)
    return counts, taken
