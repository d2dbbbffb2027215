"""Tests of the named tables of one process, compared with :class:`Table`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.optim import (
    SGD,
    Adam,
    Optimizer,
    PartialRowWiseAdam,
    RowWiseAdagrad,
)
from torchrec_recstore.options import (
    LFU,
    LRU,
    ConstantInit,
    Expiry,
    MinFrequency,
    RocksDBStore,
    Scored,
    TableOptions,
)
from torchrec_recstore.row_types import value_dtype
from torchrec_recstore.store import Table
from torchrec_recstore_service.tables.hosted import HostedTables
from torchrec_recstore_service.tables.limits import Limits, held_options
from torchrec_recstore_service.wire.protocol import NoInitialRow
from torchrec_recstore_service.wire.row_requests import RowRead, RowUpdate
from torchrec_recstore_service.wire.table_spec import TableSpec

DIM = 6
ZERO = TableOptions(initializer=ConstantInit(0.0))


def spec(
    options: TableOptions = ZERO,
    optimizer: Optimizer = SGD(lr=1.0),  # noqa: B008  (frozen)
    dtype: torch.dtype = torch.float32,
    **more: object,
) -> TableSpec:
    return TableSpec(DIM, dtype, optimizer, options, **more)  # type: ignore[arg-type]


def ids(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def ones(n: int) -> Tensor:
    return torch.ones(n, DIM)


@pytest.mark.parametrize(
    "optimizer",
    [SGD(lr=0.1), RowWiseAdagrad(lr=0.1), Adam(lr=0.1), PartialRowWiseAdam(lr=0.1)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_rows_are_a_tables_to_the_bit(optimizer: Optimizer, dtype: torch.dtype) -> None:
    options = TableOptions(seed=3)
    tables = HostedTables()
    tables.create("t", spec(options, optimizer, dtype))
    oracle = Table(
        DIM, dtype, optimizer, TableOptions(seed=3, missing="init"), name="t"
    )
    every = torch.arange(-50, 150)
    for step in range(12):
        batch = torch.randint(-50, 150, (64,))
        values = torch.randn(64, DIM).to(
            value_dtype(dtype) if step % 2 else torch.float32
        )
        tables.update("t", batch, values)
        oracle.lookup(batch, train=True)
        oracle.update(batch, values)
        if step % 4 == 1:
            tables.push("t", batch[:9], values[:9])
            oracle.insert(batch[:9], values[:9])
        if step % 4 == 2:
            assert tables.delete("t", batch[20:30]) == oracle.remove(batch[20:30]) > 0
        assert torch.equal(tables.pull("t", every), oracle.lookup(every))
        assert tables.pull("t", every).dtype is value_dtype(dtype)
        assert torch.equal(tables.exists("t", every), oracle.contains(every))
        found, rows = tables.found_rows("t", every)
        assert torch.equal(found, oracle.contains(every))
        assert torch.equal(rows, oracle.lookup(every[found]))
    assert torch.equal(tables.ids("t"), oracle.ids())
    assert tables.stats("t") == oracle.stats()
    tables.close()


def test_pull_changes_nothing() -> None:
    tables = HostedTables()
    tables.create("t", spec(TableOptions()))
    tables.update("t", ids(1, 2), ones(2))
    before = tables.stats("t")
    rows = tables.pull("t", ids(1, 7, 8, 7))
    assert torch.equal(rows[1], rows[3])
    assert rows.abs().sum(1).min() > 0
    assert not tables.exists("t", ids(7, 8)).any()
    assert tables.stats("t") == before
    tables.update("t", ids(7), torch.zeros(1, DIM))
    assert torch.equal(tables.pull("t", ids(7)), rows[1:2])


def test_create_again() -> None:
    tables = HostedTables()
    tables.create("t", spec())
    tables.push("t", ids(1), ones(1))
    tables.create("t", spec())
    assert tables.exists("t", ids(1)).all()
    other = TableSpec(DIM + 1, torch.float32, SGD(lr=2.0), ZERO)
    with pytest.raises(
        ValueError, match=r"table 't'.* dim is 6, not 7, optimizer.lr is 1.0, not 2.0$"
    ):
        tables.create("t", other)
    assert tables.spec("t") == spec()
    assert tables.specs() == {"t": spec()}
    assert tables.spec("u") is None


def test_unknown_and_dropped_tables() -> None:
    tables = HostedTables()
    with pytest.raises(ValueError, match="no table 'u': there is none"):
        tables.stats("u")
    tables.create("s", spec())
    tables.create("t", spec())
    tables.push("t", ids(1), ones(1))
    calls: list[Callable[[str], object]] = [
        lambda name: tables.pull(name, ids(1)),
        lambda name: tables.found_rows(name, ids(1)),
        lambda name: tables.push(name, ids(1), ones(1)),
        lambda name: tables.update(name, ids(1), ones(1)),
        lambda name: tables.delete(name, ids(1)),
        lambda name: tables.exists(name, ids(1)),
        lambda name: tables.ids(name),
        lambda name: tables.stats(name),
        lambda name: tables.drop(name),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="no table 'u': there is 's', 't'"):
            call("u")
    tables.drop("t")
    with pytest.raises(ValueError, match="no table 't': there is 's'"):
        tables.pull("t", ids(1))
    tables.create("t", spec(optimizer=SGD(lr=2.0)))
    assert not tables.exists("t", ids(1)).any()
    tables.close()
    tables.close()
    with pytest.raises(ValueError, match="closed"):
        tables.stats("s")
    with pytest.raises(ValueError, match="closed"):
        tables.create("v", spec())


def test_updates_are_the_steps_of_lru_and_its_bound() -> None:
    tables = HostedTables()
    tables.create(
        "t",
        spec(TableOptions(initializer=ConstantInit(0.0), max_rows=4, eviction=LRU())),
    )
    for number in (1, 2, 3, 4, 1, 5):
        tables.update("t", ids(number), ones(1))
    assert tables.ids("t").tolist() == [1, 3, 4, 5]
    stats = tables.stats("t")
    assert (stats.steps, stats.lookups, stats.misses, stats.evicted, stats.updates) == (
        6,
        6,
        5,
        1,
        6,
    )
    with pytest.raises(
        ValueError, match="table 't' needs 5 rows at once, max_rows is 4"
    ):
        tables.update("t", ids(6, 7, 8, 9, 10), ones(5))
    assert tables.stats("t") == stats
    assert tables.ids("t").tolist() == [1, 3, 4, 5]


def test_updates_are_the_steps_of_lfu_expiry_and_admission() -> None:
    tables = HostedTables()
    tables.create("lfu", spec(TableOptions(max_rows=2, eviction=LFU())))
    for number in (1, 1, 2, 3):
        tables.update("lfu", ids(number), ones(1))
    assert tables.ids("lfu").tolist() == [1, 3]

    tables.create("expiry", spec(TableOptions(expiry=Expiry(4))))
    tables.update("expiry", ids(1), ones(1))
    for _ in range(7):
        tables.update("expiry", ids(2), ones(1))
    assert tables.ids("expiry").tolist() == [2]
    assert tables.stats("expiry").expired == 1

    tables.create(
        "admission",
        spec(TableOptions(initializer=ConstantInit(0.0), admission=MinFrequency(3))),
    )
    for expected in (False, False, True, True):
        tables.update("admission", ids(1, 1), ones(2))
        assert tables.exists("admission", ids(1)).tolist() == [expected]
    # two updates of two gradients each
    assert tables.pull("admission", ids(1)).tolist() == [[-4.0] * DIM]
    assert tables.stats("admission").refused == 2


def test_a_cold_store_keeps_what_leaves(tmp_path: Path) -> None:
    tables = HostedTables(
        Limits(max_rows=8, cold_store=RocksDBStore(str(tmp_path / "cold")))
    )
    tables.create("t", spec())
    for first in range(0, 40, 4):
        tables.update("t", torch.arange(first, first + 4), ones(4))
    tables.update("t", torch.arange(4), ones(4))
    stats = tables.stats("t")
    assert (stats.rows, stats.rows + stats.cold_rows, stats.cold_hits) == (8, 40, 4)
    assert (
        tables.pull("t", torch.arange(40)).tolist()
        == [[-2.0] * DIM] * 4 + [[-1.0] * DIM] * 36
    )
    tables.drop("t")
    tables.create("t", spec())
    assert len(tables.ids("t")) == 0
    tables.close()


@pytest.mark.parametrize(
    ("options", "limits", "shard", "held"),
    [
        (TableOptions(), Limits(), (0, 1), TableOptions()),
        (TableOptions(max_rows=7), Limits(), (1, 2), TableOptions(max_rows=3)),
        (
            TableOptions(max_rows=7),
            Limits(max_rows=2),
            (0, 2),
            TableOptions(max_rows=2),
        ),
        (
            TableOptions(max_rows=7),
            Limits(max_rows=9, eviction=LFU(5)),
            (0, 2),
            TableOptions(max_rows=4, eviction=LFU(5)),
        ),
        (
            TableOptions(max_rows=7, eviction=LRU(), expiry=Expiry(3)),
            Limits(eviction=LFU(), expiry=Expiry(9), admission=MinFrequency(2)),
            (0, 1),
            TableOptions(
                max_rows=7, eviction=LRU(), expiry=Expiry(3), admission=MinFrequency(2)
            ),
        ),
        (
            TableOptions(),
            Limits(eviction=LRU(), cold_store=RocksDBStore("x")),
            (0, 1),
            TableOptions(),
        ),
        (
            TableOptions(max_rows=3),
            Limits(cold_store=RocksDBStore("x")),
            (0, 1),
            TableOptions(max_rows=3, cold_store=RocksDBStore("x")),
        ),
    ],
)
def test_limits_fill_in_what_is_left_open(
    options: TableOptions, limits: Limits, shard: tuple[int, int], held: TableOptions
) -> None:
    found = held_options("t", spec(options, shard=shard), limits)
    assert found.missing == "init"
    fields = ("max_rows", "eviction", "expiry", "admission", "cold_store")
    assert [getattr(found, field) for field in fields] == [
        getattr(held, field) for field in fields
    ]


def test_limits_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="max_rows must be at least 1"):
        Limits(max_rows=0)
    with pytest.raises(TypeError, match="eviction must be LRU or LFU"):
        Limits(eviction="lru")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'t': max_rows=1 is less than the 2 shards"):
        HostedTables().create("t", spec(TableOptions(max_rows=1), shard=(0, 2)))


def test_initial_rows_are_for_ids_without_a_row() -> None:
    tables = HostedTables()
    tables.create("t", spec(initial_rows="some"))
    tables.push("t", ids(1), 5 * ones(1))
    rows = torch.arange(3.0)[:, None].expand(3, DIM)
    tables.update("t", ids(3, 1, 2, 3), ones(4), (ids(1, 2, 3), rows))
    assert tables.pull("t", ids(1, 2, 3)).tolist() == [
        [4.0] * DIM,
        [0.0] * DIM,
        [0.0] * DIM,
    ]
    stats = tables.stats("t")
    for call in (
        lambda: tables.update("t", ids(1, 4), ones(2)),
        lambda: tables.update("t", ids(4, 5), ones(2), (ids(4, 6), rows[:2])),
        lambda: tables.pull("t", ids(1, 4)),
    ):
        with pytest.raises(
            NoInitialRow, match="table 't' has rows that an init_func or row_func makes"
        ) as raised:
            call()
        assert raised.value.pending is not None
        assert raised.value.pending.tolist() == [0, 1]
    assert tables.stats("t") == stats
    assert tables.ids("t").tolist() == [1, 2, 3]
    tables.update("t", ids(1), ones(1))  # all ids have a row


def test_initial_rows_and_bounds(tmp_path: Path) -> None:
    """A row that was not admitted, was evicted or has expired in a cold store begins
    again with its initial row.
    """
    tables = HostedTables(Limits(cold_store=RocksDBStore(str(tmp_path))))
    seven = (ids(1), 7 * ones(1))
    tables.create(
        "admission", spec(TableOptions(admission=MinFrequency(2)), initial_rows="some")
    )
    tables.update("admission", ids(1), ones(1), seven)
    assert not tables.exists("admission", ids(1)).any()
    tables.update("admission", ids(1), ones(1), seven)
    assert tables.pull("admission", ids(1)).tolist() == [[6.0] * DIM]

    evicting = HostedTables()
    evicting.create(
        "t", spec(TableOptions(max_rows=1, eviction=LRU()), initial_rows="some")
    )
    for number in (1, 2, 1):
        evicting.update("t", ids(number), ones(1), (ids(number), 7 * ones(1)))
    assert evicting.ids("t").tolist() == [1]
    assert evicting.pull("t", ids(1)).tolist() == [[6.0] * DIM]

    tables.create(
        "t",
        spec(
            TableOptions(max_rows=2, eviction=LRU(), expiry=Expiry(4)),
            initial_rows="some",
        ),
    )
    tables.update("t", ids(1), ones(1), seven)
    tables.update("t", ids(2, 3), ones(2), (ids(2, 3), ones(2)))
    tables.update("t", ids(1), ones(1), seven)  # returns unchanged from the cold store
    assert tables.pull("t", ids(1)).tolist() == [[5.0] * DIM]
    for _ in range(8):
        tables.update("t", ids(2, 3), ones(2), (ids(2, 3), ones(2)))
    assert tables.stats("t").expired == 1
    tables.update("t", ids(1), ones(1), seven)
    assert tables.pull("t", ids(1)).tolist() == [[6.0] * DIM]
    tables.close()


def test_nobody_sees_initial_rows_without_their_update() -> None:
    tables = HostedTables()
    tables.create("t", spec(initial_rows="some"))
    batch, seen = torch.arange(200), []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.append(tables.found_rows("t", batch)[1].unique().tolist())

    with ThreadPoolExecutor() as threads:
        watching = threads.submit(watch)
        for _ in range(300):
            tables.update("t", batch, ones(200), (batch, 7 * ones(200)))
            tables.delete("t", batch)
        done.set()
        watching.result()
    assert {tuple(values) for values in seen} <= {(), (6.0,)}


def test_reads_go_on_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a pull waits for the cold store, the table answers other reads."""
    tables = HostedTables(Limits(max_rows=8, cold_store=RocksDBStore(str(tmp_path))))
    tables.create("t", spec())
    for batch in torch.arange(16).split(4):
        tables.update("t", batch, -ones(4))
    store = tables._by_name()["t"].table.tier.store
    get, reading, go_on = store.get, threading.Event(), threading.Event()

    def slow(wanted: Tensor) -> tuple[Tensor, Tensor]:
        reading.set()
        assert go_on.wait(60)
        return get(wanted)

    monkeypatch.setattr(store, "get", slow)
    with ThreadPoolExecutor(2) as threads:
        try:
            pull = threads.submit(tables.pull, "t", torch.arange(16))
            assert reading.wait(60)
            assert threads.submit(tables.stats, "t").result(60).cold_rows >= 8
        finally:
            go_on.set()
        assert torch.equal(pull.result(), ones(16))


def test_many_threads(tmp_path: Path) -> None:
    """Updates, pulls, saves and creates run at the same time.

    No update is lost, and every save is of one moment.
    """
    tables = HostedTables()
    for name in ("a", "b"):
        tables.create(name, spec())
    hot, errors = torch.arange(300), []
    done = threading.Event()

    def updates() -> None:
        for _ in range(150):
            tables.update("a", hot, -ones(300))
            tables.update("b", hot, -ones(300))

    def until_done(work: Callable[[int], None]) -> None:
        number = 0
        while not done.is_set():
            work(number)
            number += 1

    def pulls(number: int) -> None:
        rows = tables.pull("a", hot)
        if not torch.equal(rows, rows[:1].expand_as(rows)):
            errors.append("an update in halves")

    def comes_and_goes(number: int) -> None:
        tables.create(f"c{number % 2}", spec())
        tables.update(f"c{number % 2}", torch.arange(500), ones(500))
        tables.drop(f"c{number % 2}")

    def saves(number: int) -> None:
        tables.save(tmp_path / f"{number % 8}", overwrite=True)

    with ThreadPoolExecutor(8) as threads:
        others = [
            threads.submit(until_done, work) for work in (pulls, comes_and_goes, saves)
        ]
        for writer in [threads.submit(updates) for _ in range(2)]:
            writer.result()
        done.set()
        for other in others:
            other.result()
    assert not errors
    assert any(tmp_path.iterdir())
    for name in ("a", "b"):
        assert tables.pull(name, hot).unique().tolist() == [300.0]
    for path in tmp_path.iterdir():
        loaded = HostedTables()
        loaded.load(path)
        if not len(loaded.ids("a")):
            continue
        a, b = (loaded.pull(name, hot).unique().tolist() for name in ("a", "b"))
        assert len(a) == len(b) == 1
        # at most one update of each of the two writers
        assert a[0] - b[0] in (0.0, 1.0, 2.0)


def test_temporary_tables_that_nobody_uses_are_dropped() -> None:
    tables = HostedTables()
    for name in ("used", "idle"):
        tables.create(name, spec(temporary=True))
    tables.create("kept", spec())
    assert tables.drop_idle(3600) == []
    for name in ("used", "idle", "kept"):
        tables._by_name()[name].last_used -= 7200
    tables.pull("used", ids(1))
    tables.stats("idle")  # reads no row
    assert tables.drop_idle(3600) == ["idle"]
    assert set(tables.specs()) == {"used", "kept"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            TableOptions(max_rows=9, eviction=Scored()),
            r"options\.eviction=Scored\(\) cannot be used on servers",
        ),
        (
            TableOptions(max_rows=9, eviction=LFU(count="occurrences")),
            (
                r'options\.eviction=LFU\(count="occurrences"\) cannot be used on'
                r" servers, because clients send each id"
            ),
        ),
        (
            TableOptions(left_ids=9),
            r"options\.left_ids cannot be used on servers, which keep no record",
        ),
    ],
)
def test_options_that_servers_do_not_have(options: TableOptions, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec(options)
    if options.eviction is not None:
        with pytest.raises(ValueError, match=message.removeprefix(r"options\.")):
            Limits(max_rows=9, eviction=options.eviction)


@pytest.mark.parametrize(
    "call",
    [
        lambda tables: tables.pull("t", ids(1, 2)),
        lambda tables: tables.found_rows("t", ids(1, 2)),
        lambda tables: tables.pull_each([RowRead("t", ids(1, 2))]),
        lambda tables: tables.update("t", ids(1), ones(1)),
        lambda tables: tables.update("t", ids(1), ones(1), (ids(1), ones(1))),
        lambda tables: tables.update_each([RowUpdate("t", ids(1), ones(1))]),
        lambda tables: tables.stats("t"),
    ],
)
def test_calls_see_updates_whose_gradients_are_on_their_way(
    call: Callable[[HostedTables], object],
) -> None:
    tables = HostedTables()
    tables.create("t", spec())
    table = tables.call_without_lock("t", lambda table: table)
    ops.waiting_updates.append(lambda: table.update(ids(1, 3), ones(2)))
    call(tables)
    assert not ops.waiting_updates
    assert tables.ids("t").tolist() == [1, 3]
