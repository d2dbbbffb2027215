"""The record of the ids that leave a table: against a model, its bound, cold stores,
and rows that are replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.kernels import PooledGroup
from torchrec_recstore.modules import RecStoreEmbedding
from torchrec_recstore.optim import SGD, Adam
from torchrec_recstore.options import (
    LFU,
    LRU,
    Expiry,
    MinFrequency,
    Scored,
    TableOptions,
)
from torchrec_recstore.store import ColdStoreError, LeftIds, Table
from torchrec_recstore.store.table import exchange_all

from .dict_store import DictStore, DictStoreOptions

TEN = torch.arange(10)
MANY = 10_000

OPTIONS: dict[str, Callable[[], TableOptions]] = {
    "plain": lambda: TableOptions(left_ids=MANY),
    "lru": lambda: TableOptions(max_rows=12, eviction=LRU(), left_ids=MANY),
    "lfu": lambda: TableOptions(max_rows=12, eviction=LFU(3), left_ids=MANY),
    "scored": lambda: TableOptions(max_rows=12, eviction=Scored(), left_ids=MANY),
    "expiry": lambda: TableOptions(expiry=Expiry(steps=3), left_ids=MANY),
    "bounded_expiry": lambda: TableOptions(
        max_rows=12, eviction=LRU(), expiry=Expiry(steps=3), left_ids=MANY
    ),
    "cold": lambda: TableOptions(
        max_rows=12, cold_store=DictStoreOptions(), left_ids=MANY
    ),
    "cold_expiry": lambda: TableOptions(
        max_rows=12,
        expiry=Expiry(steps=6),
        cold_store=DictStoreOptions(),
        left_ids=MANY,
    ),
}


def table_of(options: TableOptions) -> Table:
    return Table(4, optimizer=SGD(lr=0.5), options=options, name="t")


def as_ids(ids: list[int]) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64)


def assert_left(table: Table, expected: list[int]) -> None:
    left = table.left_ids()
    assert left.complete
    assert left.ids.tolist() == expected


@pytest.mark.parametrize("options", OPTIONS)
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_the_record_against_a_model(options: str, data: st.DataObject) -> None:
    """The ids that had a row at any time since the last call, and have none now."""
    table = table_of(OPTIONS[options]())
    with_row: set[int] = set()
    some_ids = st.lists(st.integers(0, 40), max_size=10)
    calls = st.sampled_from(
        [
            "lookup",
            "lookup",
            "lookup",
            "insert",
            "remove",
            "exchange",
            "snapshot",
            "read",
        ]
    )
    for _ in range(data.draw(st.integers(1, 25))):
        what, ids = data.draw(calls), data.draw(some_ids)
        if what == "lookup":
            table.lookup(as_ids(ids), train=True)
            with_row |= set(ids)
        elif what == "insert":
            table.insert(as_ids(ids), torch.ones(len(ids), 4))
            with_row |= set(ids)
        elif what == "remove":
            table.remove(as_ids(ids))
        elif what == "snapshot":
            with table.snapshot():
                table.remove(as_ids(ids))
        elif what == "exchange":  # as a load does
            other = table.empty_copy()
            other.set_state(table.state())
            other.insert(as_ids(ids), torch.ones(len(ids), 4))
            table.exchange_rows(other)
            other.close()
        else:
            assert_left(table, sorted(with_row - set(table.ids().tolist())))
            with_row = set()
        with_row |= set(table.ids().tolist())
    assert_left(table, sorted(with_row - set(table.ids().tolist())))
    assert_left(table, [])


def test_a_sweep_records_no_row_that_was_deleted_after_it_began() -> None:
    table = table_of(OPTIONS["cold_expiry"]())
    cold = [6, 13, 14, 15, 16, 17]
    resident = [8, 9, 10, 11, 12, 0, 1, 2, 3, 4, 5, 7]
    in_steps = [[15], [17], [6, 13, 14, 16], [], resident[:5], resident[5:]]
    for ids in [*in_steps, [], [], [], []]:
        table.lookup(as_ids(ids), train=True)
    assert_left(table, cold)
    for _ in range(4):
        table.lookup(as_ids(resident), train=True)
        assert_left(table, [])


def test_what_leaves_and_what_does_not() -> None:
    table = table_of(TableOptions(max_rows=10, eviction=LRU(), left_ids=100))
    table.lookup(TEN, train=True)
    assert_left(table, [])
    table.lookup(TEN + 5, train=True)
    table.remove(torch.tensor([7, 99]))
    table.lookup(torch.tensor([3]), train=True)  # it left, and is back
    assert_left(table, [0, 1, 2, 4, 7])
    table.remove(torch.tensor([3]))
    table.lookup(torch.tensor([3]), train=True)
    assert_left(table, [])
    held_back = table_of(TableOptions(admission=MinFrequency(2), left_ids=5))
    held_back.lookup(TEN, train=True)
    held_back.remove(TEN)
    assert_left(held_back, [])


def test_a_full_record_says_so_and_begins_anew() -> None:
    table = table_of(TableOptions(left_ids=5))
    table.lookup(TEN, train=True)
    for _ in range(3):  # the same ids again do not fill the record
        table.remove(TEN[:5])
        table.lookup(TEN[:5], train=True)
    assert_left(table, [])
    table.remove(TEN[:5])
    table.lookup(TEN[:2], train=True)
    assert_left(table, [2, 3, 4])
    table.lookup(TEN, train=True)
    size = table.stats().bytes
    table.remove(TEN[:6])
    left = table.left_ids()
    assert not left.complete
    assert left.ids.tolist() == []
    assert repr(left) == "LeftIds(ids=tensor([], dtype=torch.int64), complete=False)"
    assert table.stats().bytes <= size
    table.remove(TEN[6:7])
    assert_left(table, [6])


def test_tables_without_the_option_keep_no_record() -> None:
    table = table_of(TableOptions())
    with pytest.raises(
        ValueError,
        match=(
            r"left_ids: table 't' does not record which ids leave it: make it with"
            r" Table"
        ),
    ):
        table.left_ids()
    recording = table_of(TableOptions(left_ids=50))
    for trained in (table, recording):
        trained.lookup(TEN, train=True)
    assert table.stats() == recording.stats(), "the record takes memory when ids leave"


def test_rows_that_a_backward_needs_leave_later() -> None:
    table = table_of(TableOptions(expiry=Expiry(steps=4), left_ids=50))
    group = PooledGroup([table], [0], "sum")
    waiting = group(TEN, torch.tensor([0, 10]), train=True)
    for _ in range(12):
        table.lookup(torch.tensor([50]), train=True)
    assert_left(table, [])
    waiting.sum().backward()
    for _ in range(8):
        table.lookup(torch.tensor([50]), train=True)
    assert_left(table, TEN.tolist())


def test_rows_in_the_cold_store_have_not_left_until_they_expire() -> None:
    options = OPTIONS["cold_expiry"]()
    table = table_of(replace(options, max_rows=10))
    table.lookup(TEN, train=True)
    table.lookup(TEN + 10, train=True)
    assert table.stats().cold_rows == 10
    assert_left(table, [])
    table.remove(torch.tensor([3]))  # a cold row
    assert_left(table, [3])
    for _ in range(9):
        table.lookup(torch.tensor([15]), train=True)
    expected = [*range(3), *range(4, 15), *range(16, 20)]
    assert table.ids().tolist() == [15]
    assert_left(table, expected)
    for _ in range(9):
        table.lookup(torch.tensor([15]), train=True)
    assert_left(table, [])


def with_expired_cold_rows() -> Table:
    """Returns a table in which the rows of 0 to 19 have expired, but that of 15, and
    some are still in the store.
    """
    table = table_of(OPTIONS["cold_expiry"]())
    table.lookup(TEN, train=True)
    table.lookup(TEN + 10, train=True)
    # Failing deletions leave the expired rows in the store, as a sweep does that has
    # not come to them.
    DictStore.failing = True
    try:
        for _ in range(20):
            table.lookup(torch.tensor([15]), train=True)
    finally:
        DictStore.failing = False
    assert table.ids().tolist() == [15]
    return table


def test_removing_a_cold_row_that_has_expired_records_it() -> None:
    """The row is still in the store, where a later sweep would have recorded it."""
    for removed in ([0], [], TEN.tolist(), [0, 10, 99]):
        table = with_expired_cold_rows()
        assert table.remove(as_ids(removed)) == 0
        assert_left(table, [*range(15), *range(16, 20)])
        assert_left(table, [])


def test_rows_that_move_to_the_cold_store_do_not_fill_the_record() -> None:
    table = table_of(replace(OPTIONS["cold"](), max_rows=10, left_ids=2))
    table.lookup(TEN, train=True)
    table.lookup(TEN + 10, train=True)
    table.remove(torch.tensor([3]))
    assert table.stats().evicted > 2
    assert_left(table, [3])


def test_a_cold_store_that_fails_loses_no_id() -> None:
    table = table_of(replace(OPTIONS["cold"](), max_rows=10))
    table.lookup(TEN, train=True)
    table.lookup(TEN + 100, train=True)
    table.remove(torch.tensor([0, 1, 2, 100]))  # of which three were cold
    DictStore.failing = True
    try:
        with pytest.raises(ColdStoreError):
            table.left_ids()
    finally:
        DictStore.failing = False
    assert_left(table, [0, 1, 2, 100])


def test_a_table_that_is_closed_after_the_exchange_keeps_no_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A load, a reset and a reshard end so.

    Each read of a whole cold store would take long.
    """
    scans = []
    scan = DictStore.scan

    def counted_scan(store: DictStore) -> Iterator[tuple[Tensor, Tensor]]:
        scans.append(store)
        return scan(store)

    monkeypatch.setattr(DictStore, "scan", counted_scan)
    table = table_of(OPTIONS["cold_expiry"]())
    table.lookup(TEN, train=True)
    table.lookup(TEN + 10, train=True)
    fresh = table.empty_copy()
    fresh.insert(torch.tensor([3, 99]), torch.ones(2, 4))
    scans.clear()
    exchange_all([(table, fresh)])
    # The store of the old rows is read for expired rows and for ids, and that of the
    # new rows for ids.
    assert len(scans) == 3
    assert table.ids().tolist() == [3, 99]
    assert_left(table, [id_ for id_ in range(20) if id_ != 3])
    with pytest.raises(ValueError, match="closed"):
        fresh.ids()


@pytest.mark.parametrize(
    "error", ["recstore out of memory: for 8 ids", "std::bad_alloc"]
)
def test_an_exchange_without_memory_for_the_record_says_so(
    error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The native calls that bury expired rows and that extend the record fail as they
    do without memory.
    """
    for failing in ("table_may_be_cold", "table_add_left"):
        table = with_expired_cold_rows()
        fresh = table.empty_copy()
        fresh.insert(torch.tensor([3, 99]), torch.ones(2, 4))
        native = getattr(ops, failing)

        def without_memory(
            handle: int, ids: Tensor, *more: Any, native: Callable[..., Any] = native
        ) -> Any:
            if len(ids):
                raise RuntimeError(error)
            return native(handle, ids, *more)

        with monkeypatch.context() as patched:
            patched.setattr(ops, failing, without_memory)
            table.exchange_rows(fresh)
        assert table.ids().tolist() == [3, 99]
        assert not table.left_ids().complete


@pytest.mark.parametrize("options", ["plain", "lru", "cold_expiry"])
def test_the_record_stays_when_a_module_gets_another_optimizer(options: str) -> None:
    module = RecStoreEmbedding(
        100, 4, options=OPTIONS[options](), optimizer=Adam(lr=0.1)
    )
    module(TEN).sum().backward()
    module.table.remove(torch.tensor([1, 2]))
    module(torch.arange(20, 30)).sum().backward()
    before = set(module.table.ids().tolist())
    module.use_optimizer(Adam(lr=0.1, betas=(0.5, 0.9)))
    with_row = set(module.table.ids().tolist())
    assert with_row == before
    left = sorted({*TEN.tolist(), *range(20, 30)} - with_row)
    assert {1, 2} <= set(left)
    assert_left(module.table, left)
    assert_left(module.table, [])
    full = RecStoreEmbedding(
        100, 4, options=TableOptions(left_ids=1), optimizer=Adam(lr=0.1)
    )
    full(TEN)
    full.table.remove(TEN)
    full.use_optimizer(Adam(lr=0.1, betas=(0.5, 0.9)))
    assert not full.table.left_ids().complete


def test_records_of_shards_merge() -> None:
    one, other = LeftIds(as_ids([3, 5]), True), LeftIds(as_ids([1, 5]), True)
    assert LeftIds.merged([one, other]).ids.tolist() == [1, 3, 5]
    assert LeftIds.merged([]).complete
    full = LeftIds.merged([one, LeftIds(as_ids([]), False)])
    assert (full.ids.tolist(), full.complete) == ([], False)
    assert one.owned(lambda ids: ids > 3).ids.tolist() == [5]
