"""Unused rows expire: never too early, never too late, and the same rows in every run."""

from __future__ import annotations

import pytest
import torch

from torchrec_recstore.kernels import PooledGroup
from torchrec_recstore.optim import SGD
from torchrec_recstore.options import LRU, Expiry, TableOptions
from torchrec_recstore.store import Table

from .policies import zipf_steps

NONE = torch.empty(0, dtype=torch.int64)


def aging(steps: int, **options: object) -> Table:
    return Table(
        4, optimizer=SGD(lr=1.0), options=TableOptions(expiry=Expiry(steps), **options)
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [3, 20_000])
@pytest.mark.parametrize("steps", [1, 2, 5, 40])
def test_rows_leave_when_they_are_old_enough(steps: int, rows: int) -> None:
    table = aging(steps)
    table.lookup(torch.arange(rows), train=True)
    kept = torch.arange(0, rows, 3)
    for since in range(1, steps + steps // 2 + 2):
        table.lookup(kept, train=True)
        if since <= steps:
            assert len(table) == rows, since
        else:
            assert table.contains(kept).all()
    # The last lookup of the row is now more than steps + steps // 2 steps ago.
    assert torch.equal(table.ids(), kept)
    stats = table.stats()
    assert (stats.expired, stats.evicted, stats.rows) == (
        rows - len(kept),
        0,
        len(kept),
    )
    for _ in range(2 * steps + 2):
        table.lookup(NONE, train=True)
    assert len(table) == 0
    assert table.stats().expired == rows


def test_an_expired_row_comes_back_as_new() -> None:
    table = aging(2)
    first = table.lookup(torch.tensor([7]), train=True)
    table.update(torch.tensor([7]), torch.ones(1, 4))
    for _ in range(4):
        table.lookup(NONE, train=True)
    assert not table.contains(torch.tensor([7])).item()
    assert torch.equal(table.lookup(torch.tensor([7]), train=True), first)
    assert table.read_rows(torch.tensor([7]))["frequency"].tolist() == [1]


def test_training_lookups_alone_count() -> None:
    table = aging(3)
    table.lookup(torch.arange(10), train=True)
    for _ in range(20):
        table.lookup(torch.arange(10))
        table.update(torch.arange(5), torch.ones(5, 4))
        table.insert(torch.arange(5), torch.ones(5, 4))
    assert (len(table), table.stats().expired) == (10, 0)
    for _ in range(5):
        table.lookup(NONE, train=True)
        # creates the rows again, in this step
        table.update(torch.arange(5), torch.ones(5, 4))
    assert table.ids().tolist() == list(range(5))


def test_rows_of_pending_forwards_do_not_expire() -> None:
    table = aging(2)
    group = PooledGroup([table], [0], "sum")
    first = table.lookup(torch.arange(10), train=True)
    output = group(torch.arange(5), torch.tensor([0, 5]), train=True)
    for _ in range(20):
        table.lookup(NONE, train=True)
    assert table.ids().tolist() == list(range(5))
    output.sum().backward()
    assert torch.equal(table.lookup(torch.arange(5)), first[:5] - 1.0)
    for _ in range(4):
        table.lookup(NONE, train=True)
    assert len(table) == 0


@pytest.mark.parametrize("max_rows", [None, 6000])
def test_the_same_steps_leave_the_same_rows(max_rows: int | None) -> None:
    """Threads, slots and columns make no difference.

    Otherwise column shards would not have the same rows.
    """
    bound = {} if max_rows is None else {"max_rows": max_rows, "eviction": LRU()}
    options = TableOptions(expiry=Expiry(8), **bound)  # type: ignore[arg-type]
    tables = [
        Table(4, options=options, columns=columns)
        for columns in (range(4), range(2), range(2, 4))
    ]
    for ids in zipf_steps(1.0, 50_000, steps=60, batch=1000):
        for threads, table in enumerate(tables, start=1):
            torch.set_num_threads(threads)
            table.lookup(ids[torch.randperm(len(ids))], train=True)
        assert torch.equal(tables[0].ids(), tables[1].ids())
        assert torch.equal(tables[1].ids(), tables[2].ids())
    assert tables[0].stats().expired == tables[1].stats().expired > 1000


def test_with_a_bound_rows_leave_for_either_reason() -> None:
    table = aging(4, max_rows=100, eviction=LRU())
    for step in range(40):
        table.lookup(torch.arange(60 * step, 60 * step + 60), train=True)
        assert len(table) <= 100
    assert table.stats().evicted > 1000
    assert table.stats().expired == 0  # the rows had been evicted before
    for _ in range(7):
        table.lookup(NONE, train=True)
    assert len(table) == 0
    stats = table.stats()
    assert stats.evicted + stats.expired == stats.inserts == 2400


def test_a_snapshot_is_of_its_moment_whatever_expires() -> None:
    table = aging(2)
    table.lookup(torch.arange(500), train=True)
    ids, rows = table.ids(), table.read_rows(table.ids())
    with table.snapshot() as snapshot:
        for start in range(1000, 2000, 100):
            table.lookup(torch.arange(start, start + 100), train=True)
        assert not table.contains(ids).any()
        part = snapshot.read(len(snapshot))
        found, values = part.ids, part.rows
    assert torch.equal(found, ids)
    for name, value in rows.items():
        assert torch.equal(values[name], value), name
