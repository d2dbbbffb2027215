"""A snapshot since a mark has the rows that have changed since, in memory and in the
cold store, and no others.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.recstore_server import RecStoreServer
from tests.redis_server import needs_redis, redis_server
from tests.store.dict_store import DictStore, DictStoreOptions
from torchrec_recstore import Adam, RowWiseAdagrad, ServerStore
from torchrec_recstore.options import (
    LFU,
    Expiry,
    RedisStore,
    RocksDBStore,
    SSDStore,
    TableOptions,
)
from torchrec_recstore.store import Part, Table

DIM, MAX_ROWS, IDS = 3, 20, 120


class Changes:
    """A table, and the time at which each id has changed last, in plain Python."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.now = 0
        self.changed: dict[int, int] = {}
        self.marks: dict[int, int] = {}  # the time of each mark

    def _write(self, ids: Tensor) -> None:
        self.now += 1
        self.changed.update(dict.fromkeys(ids.tolist(), self.now))

    def lookup(self, ids: Tensor) -> None:
        self.table.lookup(ids, train=True)
        self._write(ids)

    def update(self, ids: Tensor) -> None:
        self.table.update(ids, torch.ones(len(ids), DIM))
        self._write(ids)

    def insert(self, ids: Tensor) -> None:
        self.table.insert(ids, torch.full((len(ids), DIM), float(self.now)))
        self._write(ids)

    def write_rows(self, ids: Tensor) -> None:
        ids = ids[self.table.contains(ids)]
        self.table.write_rows(ids, self.table.read_rows(ids))
        self._write(ids)

    def remove(self, ids: Tensor) -> None:
        self.table.remove(ids[:3])
        for id_ in ids[:3].tolist():
            self.changed.pop(id_, None)

    def read(self, ids: Tensor) -> None:
        """Reads rows in each way that changes none, with rows on their way to memory."""
        self.table.lookup(ids)
        self.table.tier.prefetch(ids)
        self.table.read_rows(ids[self.table.contains(ids)])

    def move(self, ids: Tensor) -> None:
        """Moves rows from the cold store to memory, and others to the store, in a call
        that fails.
        """
        with self.table.tier.lock:
            self.table.tier.bring(ids, "write")

    def mark(self, ids: Tensor) -> None:
        self.marks[self.table.mark()] = self.now

    def forget(self, ids: Tensor) -> None:
        for _ in range(100):
            self.mark(ids)

    def check(self, mark: int) -> None:
        last = self.table.mark()
        self.marks[last] = self.now
        try:
            snapshot = self.table.snapshot(since=mark)
        except ValueError:
            assert mark < last - 127
            return
        with snapshot:
            self.marks[snapshot.mark] = self.now
            parts = [snapshot.read(0)]
            while len(snapshot):
                parts.append(snapshot.read(min(7, len(snapshot))))
            left = snapshot.left
        part = Part.concatenated(parts)
        here = set(self.table.ids().tolist())
        expected = sorted(
            id_
            for id_, time in self.changed.items()
            if time > self.marks[mark] and id_ in here
        )
        assert part.ids.tolist() == expected
        for name, value in self.table.read_rows(part.ids).items():
            assert torch.equal(part.rows[name], value), name
        assert left is None or not here & set(left.tolist())

    def run(self, calls: list[tuple[str, int]]) -> None:
        self.mark(torch.empty(0))
        for name, seed in calls:
            chosen = random.Random(seed)
            if name == "check":
                self.check(chosen.choice(sorted(self.marks)[-200:]))
            else:
                getattr(self, name)(
                    torch.tensor(chosen.sample(range(IDS), chosen.randint(1, 12)))
                )
        for mark in sorted(self.marks)[-3:]:
            self.check(mark)


CALLS = [
    "lookup",
    "update",
    "insert",
    "write_rows",
    "remove",
    "read",
    "read",
    "move",
    "move",
    "mark",
    "check",
    "forget",
]


def tiered(cold: Any, **options: Any) -> Changes:
    limits = TableOptions(max_rows=MAX_ROWS, cold_store=cold, **options)
    return Changes(Table(DIM, optimizer=Adam(lr=0.1), options=limits))


@pytest.mark.parametrize(
    "options",
    [{}, {"eviction": LFU(3)}, {"expiry": Expiry(8)}],
    ids=["lru", "lfu", "expiry"],
)
@pytest.mark.parametrize("ascending", [True, False], ids=["ascending", "spooled"])
@settings(max_examples=6, deadline=None)
@given(
    calls=st.lists(
        st.tuples(st.sampled_from(CALLS), st.integers(0, 10**6)),
        min_size=20,
        max_size=60,
    )
)
def test_a_delta_has_what_changed(
    ascending: bool, options: dict[str, Any], calls: list[tuple[str, int]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DictStore, "ascending_snapshots", ascending)
        tiered(DictStoreOptions(), **options).run(calls)


def in_a_fixed_order(seed: int, calls: int = 150) -> list[tuple[str, int]]:
    chosen = random.Random(seed)
    return [(chosen.choice(CALLS), chosen.randrange(10**6)) for _ in range(calls)]


@pytest.mark.parametrize("store", [SSDStore, RocksDBStore])
def test_a_delta_of_a_table_on_a_disk(
    tmp_path: Path, store: type[SSDStore | RocksDBStore]
) -> None:
    for seed in range(3):
        tiered(store(str(tmp_path))).run(in_a_fixed_order(seed))


@needs_redis
def test_a_delta_of_a_table_in_redis(tmp_path: Path) -> None:
    with redis_server(tmp_path / "server") as server:
        tiered(RedisStore(server.url)).run(in_a_fixed_order(1))


@pytest.mark.slow
def test_a_delta_of_a_table_on_servers(tmp_path: Path) -> None:
    server = RecStoreServer(tmp_path / "data")
    try:
        tiered(ServerStore(server.address)).run(in_a_fixed_order(2, calls=60))
    finally:
        server.kill()


def test_a_delta_has_what_changed_after_more_rows_have_left_than_the_table_remembers(
    tmp_path: Path,
) -> None:
    rows, changed = 100_000, torch.arange(0, 100_000, 1000)
    options = TableOptions(max_rows=4096, cold_store=SSDStore(str(tmp_path)))
    with Table(2, optimizer=RowWiseAdagrad(lr=0.1), options=options) as table:
        for ids in torch.arange(rows).split(4096):
            table.insert(ids, torch.ones(len(ids), 2))
        mark = table.mark()
        table.update(changed, torch.ones(len(changed), 2))
        # all rows move to memory, and most of them back
        for ids in torch.arange(rows).split(2048):
            with table.tier.lock:
                table.tier.bring(ids, "write")
        with table.snapshot(since=mark) as snapshot:
            assert snapshot.left is None
            assert torch.equal(snapshot.read(len(snapshot)).ids, changed)
        assert len(table) == rows


def test_a_row_takes_its_change_to_another_table_and_back() -> None:
    """Rows that were exchanged have not changed since a later mark, although the other
    table has had higher marks.
    """
    one, other = tiered(DictStoreOptions()).table, tiered(DictStoreOptions()).table
    for table, marks in ((one, 3), (other, 9)):
        for ids in torch.arange(60).split(10):
            table.insert(ids, torch.ones(10, DIM))
            for _ in range(marks):
                table.mark()
    one.exchange_rows(other)
    mark = one.mark()
    one.update(torch.arange(5), torch.ones(5, DIM))
    one.insert(torch.arange(30, 45), torch.ones(15, DIM))
    with one.snapshot(since=mark) as snapshot:
        assert snapshot.read(len(snapshot)).ids.tolist() == [*range(5), *range(30, 45)]
