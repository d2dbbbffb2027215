"""8-bit rows of dims that are not whole floats, in calls of one row or none: the bytes
of a row begin at any place.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torchrec_recstore.optim import Adam
from torchrec_recstore.options import LRU, NormalInit, RocksDBStore, TableOptions
from torchrec_recstore.row_types import (
    as_numbers,
    as_stored,
    columns_of,
    joined_columns,
    values,
)
from torchrec_recstore.store import Table

INT8 = torch.int8
DIMS = [1, 2, 3, 5, 6, 7, 9]
ID = torch.tensor([7])

by_dim = pytest.mark.parametrize("dim", DIMS)


def trained(
    dim: int, state_dtype: torch.dtype = torch.float32, columns: range | None = None
) -> Table:
    table = Table(
        dim,
        INT8,
        Adam(lr=0.1),
        TableOptions(NormalInit()),
        state_dtype=state_dtype,
        columns=columns,
    )
    table.update(ID, torch.ones(1, len(table.columns)))
    return table


@by_dim
def test_stored_rows_are_read_at_every_place(dim: int) -> None:
    weights = torch.randn(5, dim, generator=torch.Generator().manual_seed(dim))
    rows = as_stored(weights, INT8)
    expected = values(rows)
    for first in range(5):
        assert torch.equal(
            as_stored(weights[first : first + 1], INT8), rows[first : first + 1]
        )
        for count in range(3):
            some = slice(first, first + count)
            assert torch.equal(values(rows[some]), expected[some])
    one = rows[3:4]
    for cut in range(1, dim):
        parts = [columns_of(one, slice(0, cut)), columns_of(one, slice(cut, dim))]
        assert torch.equal(joined_columns(parts), expected[3:4])


def test_numbers_are_read_at_every_place() -> None:
    content = torch.arange(40, dtype=torch.uint8).reshape(1, 40)
    for dtype in (torch.uint8, torch.float16, torch.float32, torch.int64):
        for first in range(9):
            for columns in range(3):
                part = content[:, first : first + columns * dtype.itemsize]
                found = as_numbers(part, dtype)
                assert found.shape == (1, columns)
                assert (
                    found.view(torch.uint8).flatten().tolist()
                    == part.flatten().tolist()
                )
                assert as_numbers(part[:0], dtype).shape == (0, columns)


@by_dim
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float16], ids=str)
def test_one_row_is_read_and_written(dim: int, state_dtype: torch.dtype) -> None:
    table, copy = (
        trained(dim, state_dtype),
        Table(dim, INT8, Adam(lr=0.1), state_dtype=state_dtype),
    )
    rows = table.read_rows(ID)
    assert torch.equal(values(rows["weight"]), table.lookup(ID))
    copy.write_rows(ID, rows)
    with copy.snapshot() as snapshot:
        part = snapshot.read(1)
        ids, found = part.ids, part.rows
    assert torch.equal(ids, ID)
    for name, value in rows.items():
        assert torch.equal(found[name], value), name
    wide = Table(dim, torch.float32)
    wide.insert(ID, values(rows["weight"]))
    assert torch.equal(wide.lookup(ID), table.lookup(ID))


@by_dim
def test_column_shards_have_the_columns_of_the_row(dim: int) -> None:
    for cut in range(1, dim):
        for columns in (range(cut), range(cut, dim)):
            table = trained(dim, columns=columns)
            assert torch.equal(values(table.read_rows(ID)["weight"]), table.lookup(ID))


@by_dim
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float16], ids=str)
def test_one_cold_row(dim: int, state_dtype: torch.dtype, tmp_path: Path) -> None:
    options = TableOptions(
        NormalInit(), max_rows=4, eviction=LRU(), cold_store=RocksDBStore(str(tmp_path))
    )
    plain = trained(dim, state_dtype)
    with Table(dim, INT8, Adam(lr=0.1), options, state_dtype=state_dtype) as table:
        mark = table.mark()
        table.update(ID, torch.ones(1, dim))
        table.lookup(torch.arange(100, 104), train=True)
        assert table.stats().cold_rows == 1
        assert torch.equal(table.lookup(ID), plain.lookup(ID))
        for name, value in plain.read_rows(ID).items():
            assert torch.equal(table.read_rows(ID)[name], value), name
        with table.snapshot(since=mark) as snapshot:
            for _ in range(len(snapshot)):
                part = snapshot.read(1)
                ids, rows = part.ids, part.rows
                assert torch.equal(values(rows["weight"]), table.lookup(ids))
        table.lookup(ID, train=True)
        assert torch.equal(table.lookup(ID), plain.lookup(ID))
