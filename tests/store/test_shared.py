"""Tables with a shared cold store: they read each other's rows, and refuse calls that
need all jobs' rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.store.dict_store import DictStore, DictStoreOptions
from tests.store.shared_store import ROWS, WRITTEN, SharedDictOptions, SharedDictStore
from torchrec_recstore.kernels import PooledGroup
from torchrec_recstore.optim import SGD, Adam
from torchrec_recstore.options import LFU, Expiry, MinFrequency, TableOptions
from torchrec_recstore.store import ColdStoreError, Table
from torchrec_recstore.store.conformance import check_cold_store

DIM, MAX_ROWS = 5, 200
ADAM = Adam(lr=0.1)


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    ROWS.clear()
    WRITTEN.clear()
    yield
    DictStore.failing = False


def shared(
    max_rows: int = MAX_ROWS, optimizer: Any = ADAM, owned: Any = None, **options: Any
) -> Table:
    bounds = {"max_rows": max_rows, "cold_store": SharedDictOptions()}
    return Table(
        DIM,
        optimizer=optimizer,
        options=TableOptions(**{**bounds, **options}),
        owned=owned,
    )


def batches(n: int, seed: int = 0, ids: int = 2000) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.rand(300, generator=generator) ** 3 * ids).long().unique()[:150] - 50
        for _ in range(n)
    ]


def train(some: list[Tensor], *tables: Table) -> None:
    for number, ids in enumerate(some):
        for table in tables:
            table.update(ids, table.lookup(ids, train=True) * 0.5 + number)


def assert_same(table: Table, whole: Table) -> None:
    """Asserts that the tables have the same rows, and that no last step is later than
    the table's clock.
    """
    ids = whole.ids()
    assert torch.equal(table.ids(), ids)
    assert len(table) == len(ids)
    rows, expected = table.read_rows(ids), whole.read_rows(ids)
    expected["last_step"].clamp_(max=table.steps)
    for key, value in expected.items():
        assert torch.equal(rows[key], value), key


def test_a_shared_store_of_a_third_party() -> None:
    check_cold_store(SharedDictOptions())
    assert not any(ROWS.values())


@pytest.mark.parametrize(
    ("broken", "promise"),
    [
        (
            {"close": lambda store: store.rows.clear()},
            "keeps its rows when it is closed",
        ),
        (
            {
                "ids": lambda store: torch.tensor(
                    list(store.rows)[1:], dtype=torch.int64
                )
            },
            "ids returns every id once",
        ),
        (
            {"__init__": lambda store, rows, row_bytes: _init(store, {}, row_bytes)},
            "stores of one name have the same rows",
        ),
        ({"_check": lambda store: None}, "get after close raises ColdStoreError"),
    ],
)
def test_broken_shared_stores_do_not_pass(
    broken: dict[str, Any], promise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, call in broken.items():
        monkeypatch.setattr(SharedDictStore, name, call)
    with pytest.raises(
        AssertionError, match=f"broken promise of a cold store: .*{promise}"
    ):
        check_cold_store(SharedDictOptions())


_init = SharedDictStore.__init__


def test_a_table_reads_what_another_has_trained() -> None:
    trainer, whole = shared(), Table(DIM, optimizer=ADAM)
    train(batches(20), trainer, whole)
    trainer.flush()
    reader = shared(max_rows=1)
    assert_same(reader, whole)
    unseen = torch.cat([whole.ids(), torch.tensor([10**9])])
    assert torch.equal(reader.lookup(unseen), whole.lookup(unseen))
    groups = [PooledGroup([table], [0], "sum") for table in (reader, whole)]
    ids, offsets = whole.ids()[:600], torch.arange(0, 601, 3)
    assert torch.equal(*(group(ids, offsets, train=False) for group in groups))
    assert torch.equal(reader.contains(unseen), whole.contains(unseen))
    written = len(WRITTEN)
    stats = reader.stats()
    assert (stats.rows, stats.cold_rows, stats.inserts, stats.evicted) == (0, 0, 0, 0)
    reader.close()
    assert len(WRITTEN) == written  # a reader writes nothing when it is closed


@pytest.mark.parametrize(
    "options", [{}, {"eviction": LFU()}, {"admission": MinFrequency(1)}]
)
def test_another_table_goes_on_where_one_was_closed(options: dict[str, Any]) -> None:
    one, whole = shared(**options), Table(DIM, optimizer=ADAM)
    train(batches(20), one, whole)
    state = one.state()
    one.close()
    one.close()
    with shared(max_rows=150, **options) as other:
        other.set_state(state)
        train(batches(20, seed=1), other, whole)
        assert other.stats().cold_hits > 0
        assert other.stats().rows <= 150
        assert_same(other, whole)
    assert_same(shared(), whole)


def test_tables_of_another_name_or_columns_are_apart() -> None:
    train(batches(5), one := shared())
    one.flush()
    options = one.options
    for other in (
        Table(DIM, optimizer=ADAM, options=options, name="other"),
        shared(cold_store=SharedDictOptions("b")),
    ):
        assert len(other) == 0
    assert len(Table(DIM, optimizer=ADAM, options=options, columns=range(2))) == 0


def test_a_flush_writes_what_has_changed_and_nothing_else() -> None:
    table = shared()
    train(batches(1), table)
    table.flush()
    assert sorted(WRITTEN) == table.ids().tolist()
    WRITTEN.clear()
    table.flush()
    assert WRITTEN == []
    some = table.ids()[3:8]
    group = PooledGroup([table], [0], "sum")
    out = group(some, torch.arange(6), train=True)
    table.flush()  # between forward and backward
    WRITTEN.clear()
    out.sum().backward()
    table.insert(torch.tensor([10**6]), torch.ones(1, DIM))
    table.flush()
    assert sorted(WRITTEN) == [*some.tolist(), 10**6]
    assert_same(shared(), table)


def test_marks_of_saves_do_not_hide_changes() -> None:
    table = shared()
    train(batches(1), table)
    table.flush()
    ids = table.ids()
    table.update(ids[:1], torch.ones(1, DIM))
    for _ in range(300):
        table.mark()
    table.flush()
    assert torch.equal(shared().lookup(ids), table.lookup(ids))


def test_of_two_tables_the_last_write_wins_row_by_row() -> None:
    one, other = shared(optimizer=SGD(lr=1.0)), shared(optimizer=SGD(lr=1.0))
    ids = torch.arange(10)
    one.insert(ids, torch.zeros(10, DIM))
    one.flush()
    other.update(ids, torch.full((10, DIM), -1.0))
    other.flush()
    # it updates its own copies in memory
    one.update(ids[:3], torch.full((3, DIM), -5.0))
    assert one.lookup(ids)[:, 0].tolist() == [5.0] * 3 + [0.0] * 7
    one.flush()
    reader = shared(optimizer=SGD(lr=1.0))
    assert reader.lookup(ids)[:, 0].tolist() == [5.0] * 3 + [1.0] * 7
    one.refresh()
    assert one.lookup(ids)[:, 0].tolist() == [5.0] * 3 + [1.0] * 7
    assert one.stats().rows == 0


def test_a_refresh_keeps_what_a_backward_needs() -> None:
    table, whole = shared(), Table(DIM, optimizer=ADAM)
    train(batches(3), table, whole)
    ids = whole.ids()[10:20]
    outs = [
        PooledGroup([each], [0], "sum")(ids, torch.arange(11), train=True)
        for each in (table, whole)
    ]
    table.refresh()
    assert table.stats().rows == 10
    for out in outs:
        out.square().sum().backward()
    assert_same(table, whole)
    table.flush()
    assert_same(shared(), whole)


@pytest.mark.parametrize("moment", ["flush", "_changed", "_put"])
def test_a_backward_in_the_midst_of_a_refresh_is_not_lost(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, whole = shared(), Table(DIM, optimizer=ADAM)
    train(batches(3), table, whole)
    table.flush()
    ids = whole.ids()[10:20]
    outs = [
        PooledGroup([each], [0], "sum")(ids, torch.arange(11), train=True)
        for each in (table, whole)
    ]
    tier = table.tier
    assert tier is not None
    call, pending = getattr(tier, moment), True

    def then_backward(*arguments: Any) -> Any:
        nonlocal pending
        result = call(*arguments)
        if pending:  # a backward in another thread may run at this moment
            pending = False
            for out in outs:
                out.square().sum().backward()
        return result

    monkeypatch.setattr(tier, moment, then_backward)
    table.refresh()
    assert not pending
    assert_same(table, whole)
    table.flush()
    assert_same(shared(), whole)


def test_rows_of_a_clock_ahead_come_as_of_now() -> None:
    ahead = shared()
    ahead.set_state(replace(ahead.state(), steps=10**6))
    train(batches(10), ahead)
    ahead.close()
    table = shared(eviction=LFU(3))
    ids = table.ids()
    assert int(table.read_rows(ids)["last_step"].max()) == 0
    train(batches(20), table)
    rows = table.read_rows(table.ids())
    assert int(rows["last_step"].max()) == table.steps == 20
    with table.snapshot() as snapshot:
        saved = snapshot.read(len(snapshot)).rows
    assert torch.equal(saved["last_step"], rows["last_step"])


def test_a_row_is_removed_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = shared(), shared()
    train(batches(5), one)
    one.flush()
    gone = one.ids()[::2]
    assert torch.equal(other.ids(), one.ids())
    assert one.remove(gone) == len(gone)
    for table in (one, other):
        assert not table.contains(gone).any()
        assert not torch.isin(gone, table.ids()).any()
    left, before = one.ids(), one.stats()

    def fails(ids: Tensor) -> None:
        raise ColdStoreError("out of order")

    assert one.tier is not None
    with monkeypatch.context() as broken:
        broken.setattr(one.tier.store, "delete", fails)
        with pytest.raises(ColdStoreError):
            one.remove(left)
    assert one.stats() == before
    assert torch.equal(one.ids(), left)
    assert one.remove(left) == len(left)
    assert len(other) == 0


def test_a_failing_store_loses_nothing() -> None:
    table, whole = shared(), Table(DIM, optimizer=ADAM)
    train(batches(10), table, whole)
    DictStore.failing = True
    for call in (table.flush, table.refresh, table.close):
        with pytest.raises(ColdStoreError):
            call()
    DictStore.failing = False
    assert_same(table, whole)
    table.close()
    assert_same(shared(), whole)


def test_shards_of_rows_share_a_store_and_see_their_own() -> None:
    def of_rest(rest: int) -> Callable[[Tensor], Tensor]:
        return lambda ids: ids % 3 == rest

    whole = Table(DIM, optimizer=SGD(lr=0.1))
    shards = [
        shared(owned=of_rest(rest), max_rows=70, optimizer=SGD(lr=0.1))
        for rest in range(3)
    ]
    for batch in batches(20):
        train([batch], whole)
        for rest, shard in enumerate(shards):
            train([batch[batch % 3 == rest]], shard)
    for rest, shard in enumerate(shards):
        ids = whole.ids()[whole.ids() % 3 == rest]
        assert torch.equal(shard.ids(), ids)
        assert len(shard) == len(ids)
        with shard.snapshot() as snapshot:
            assert snapshot.table_rows == len(ids)
            train([ids[:5]], shard)  # the snapshot does not have this step
            part = snapshot.read(len(snapshot))
            saved, rows = part.ids, part.rows
        assert torch.equal(saved, ids)
        assert torch.equal(rows["weight"], whole.lookup(ids))


def test_a_snapshot_has_resident_and_cold_rows() -> None:
    table, whole = shared(), Table(DIM, optimizer=ADAM)
    train(batches(20), table, whole)
    table.flush()
    train(batches(3, seed=1), table, whole)  # the copies in the store are outdated
    with table.snapshot() as snapshot:
        shared().remove(whole.ids()[:50])
        part = snapshot.read(len(snapshot))
        ids, rows = part.ids, part.rows
    assert torch.equal(ids, whole.ids())
    for key, value in whole.read_rows(ids).items():
        assert torch.equal(rows[key], value), key


def test_what_a_shared_store_does_not_allow_is_said() -> None:
    table = shared()
    train(batches(5), table)
    rows = table.read_rows(table.ids())
    mark = table.mark()
    with pytest.raises(
        ValueError,
        match=r"table 'table'.*SharedDictOptions.*is shared.*save the whole table",
    ):
        table.snapshot(mark)
    with pytest.raises(ValueError, match=r"table 'table'.*is shared"):
        table.empty_copy()
    with pytest.raises(ValueError, match=r"table 'table'.*is shared"):
        table.exchange_rows(shared())
    private = Table(
        DIM,
        optimizer=ADAM,
        options=TableOptions(max_rows=MAX_ROWS, cold_store=DictStoreOptions()),
    )
    with pytest.raises(ValueError, match=r"table 'table'.*is shared"):
        private.exchange_rows(table)
    for without in (private, Table(DIM)):
        with pytest.raises(ValueError, match="table 'table' has no shared cold store"):
            without.flush()
        with pytest.raises(ValueError, match="table 'table' has no shared cold store"):
            without.refresh()
    table.flush()
    with table.snapshot(), pytest.raises(ValueError, match="being saved"):
        table.flush()
    with pytest.raises(
        ValueError,
        match=r"TableOptions\.expiry cannot be used with a shared cold store",
    ):
        shared(expiry=Expiry(5))
    assert all(
        torch.equal(value, rows[key])
        for key, value in table.read_rows(table.ids()).items()
    )


def _of_type(dtype: torch.dtype) -> Table:
    options = TableOptions(max_rows=MAX_ROWS, cold_store=SharedDictOptions())
    return Table(4, dtype, optimizer=ADAM, options=options, name="typed")


def test_rows_of_another_kind_are_apart() -> None:
    ids = torch.arange(10)
    with _of_type(torch.float16) as one:
        one.insert(ids, torch.ones(10, 4))
    with _of_type(torch.bfloat16) as other:
        assert not other.contains(ids).any()
    with _of_type(torch.float16) as again:
        assert torch.equal(again.lookup(ids), torch.ones(10, 4, dtype=torch.float16))


def test_staged_rows_are_not_those_that_others_have_written_since() -> None:
    ids = torch.arange(10)
    with _of_type(torch.float32) as one, _of_type(torch.float32) as other:
        one.insert(ids, torch.ones(10, 4))
        one.flush()
        other.tier.prefetch(ids)
        one.insert(ids, torch.full((10, 4), 2.0))
        one.flush()
        assert torch.equal(other.lookup(ids), torch.full((10, 4), 2.0))
        other.refresh()
        assert torch.equal(other.lookup(ids, train=True), torch.full((10, 4), 2.0))


def test_a_table_whose_store_fails_can_be_closed() -> None:
    table = shared()
    table.lookup(torch.arange(10), train=True)
    DictStore.failing = True
    with pytest.raises(ColdStoreError):
        table.close()
    table.close(flush=False)
    with pytest.raises(ValueError, match="is closed"):
        table.lookup(torch.arange(10))
    DictStore.failing = False
    table = shared()
    table.lookup(torch.arange(10), train=True)
    DictStore.failing = True
    with pytest.raises(KeyError), table:
        raise KeyError
