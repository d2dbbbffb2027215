"""A table with a cold store has the same rows as a table without max_rows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.store.dict_store import DictStore, DictStoreOptions
from torchrec_recstore import ops
from torchrec_recstore.kernels import PooledGroup, SequenceGroup
from torchrec_recstore.optim import SGD, Adam, RowWiseAdagrad
from torchrec_recstore.options import LFU, LRU, Expiry, MinFrequency, TableOptions
from torchrec_recstore.store import ColdStoreError, Table
from torchrec_recstore.store.cold_tier import ColdTier

MAX_ROWS = 200


@pytest.fixture(autouse=True)
def _in_order() -> Iterator[None]:
    DictStore.failing = False
    yield
    DictStore.failing = False


def _tables(
    dtype: torch.dtype = torch.float32,
    optimizer: Any = None,
    dim: int = 5,
    **options: Any,
) -> tuple[Table, Table]:
    """Returns a table with a cold store, and the same table without max_rows."""
    optimizer = optimizer or Adam(lr=0.1)
    cold = {"eviction": LRU(), "max_rows": MAX_ROWS, "cold_store": DictStoreOptions()}
    whole = {
        key: value
        for key, value in options.items()
        if key not in ("eviction", "max_rows")
    }
    return (
        Table(dim, dtype, optimizer, TableOptions(**{**cold, **options})),
        Table(dim, dtype, optimizer, TableOptions(**whole)),
    )


def _batches(n: int, seed: int = 0, ids: int = 2000) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.rand(300, generator=generator) ** 3 * ids).long().unique()[:150] - 50
        for _ in range(n)
    ]


def _assert_same(tiered: Table, whole: Table) -> None:
    ids = tiered.ids()
    assert torch.equal(ids, whole.ids())
    assert len(tiered) == len(whole) == len(ids)
    rows, expected = tiered.read_rows(ids), whole.read_rows(ids)
    assert rows.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(rows[key], value), key
    shuffled = torch.cat([ids, ids + 10**6])[torch.randperm(2 * len(ids))]
    assert torch.equal(tiered.lookup(shuffled), whole.lookup(shuffled))
    assert torch.equal(tiered.contains(shuffled), whole.contains(shuffled))


@pytest.mark.parametrize(
    ("eviction", "dtype", "optimizer"),
    [
        (None, torch.float32, Adam(lr=0.1)),
        (LRU(), torch.float32, SGD(lr=0.1)),
        (LFU(), torch.float16, RowWiseAdagrad(lr=0.1)),
        (LFU(3), torch.bfloat16, Adam(lr=0.1)),
        (LRU(), torch.int8, Adam(lr=0.1)),
        pytest.param(LFU(3), torch.float32, SGD(lr=0.1), marks=pytest.mark.slow),
        pytest.param(
            LRU(), torch.float16, RowWiseAdagrad(lr=0.1), marks=pytest.mark.slow
        ),
        pytest.param(LFU(), torch.int8, Adam(lr=0.1), marks=pytest.mark.slow),
        pytest.param(LFU(3), torch.int8, Adam(lr=0.1), marks=pytest.mark.slow),
    ],
)
def test_rows_come_back_as_they_left(
    eviction: Any, dtype: torch.dtype, optimizer: Any
) -> None:
    halving = (
        eviction if isinstance(eviction, LFU) and eviction.half_life_steps else None
    )
    tiered, whole = _tables(dtype, optimizer, eviction=eviction)
    for number, ids in enumerate(_batches(30)):
        for table in (tiered, whole):
            rows = table.lookup(ids, train=True)
            table.update(ids, rows * 0.5 + number)
        assert tiered.stats().rows <= MAX_ROWS
    stats = tiered.stats()
    assert stats.cold_rows > MAX_ROWS
    assert stats.evicted > stats.cold_rows
    assert stats.cold_hits > 100
    assert stats.lookups == whole.stats().lookups
    assert stats.inserts == whole.stats().inserts
    assert stats.misses == stats.inserts + stats.cold_hits
    if halving is None:  # with halving, only one of the tables halves frequencies
        _assert_same(tiered, whole)
    else:
        assert torch.equal(tiered.lookup(tiered.ids()), whole.lookup(whole.ids()))


def test_every_call_sees_cold_rows() -> None:
    tiered, whole = _tables()
    for table in (tiered, whole):
        for ids in _batches(20):
            table.lookup(ids, train=True)
            table.update(ids, torch.ones(len(ids), 5))
    some = tiered.ids()[::7]
    for table in (tiered, whole):
        table.insert(some[:80], torch.full((80, 5), 2.0))
        assert (
            table.remove(torch.cat([some[50:], torch.tensor([10**9])]))
            == len(some) - 50
        )
        rows = table.read_rows(some[:50])
        table.write_rows(some[:50], {**rows, "frequency": rows["frequency"] + 7})
        table.update(some[40:80], torch.ones(40, 5))
    _assert_same(tiered, whole)


def test_evaluation_moves_nothing() -> None:
    tiered, whole = _tables(missing="init")
    for ids in _batches(10):
        tiered.lookup(ids, train=True)
        whole.lookup(ids, train=True)
    before = tiered.stats()
    absent = torch.arange(10**6, 10**6 + 50)
    ids = torch.cat([tiered.ids(), absent])
    assert torch.equal(tiered.lookup(ids), whole.lookup(ids))
    groups = [PooledGroup([table], [0, 0], "mean") for table in (tiered, whole)]
    offsets = torch.arange(0, len(ids) // 6 * 6 + 1, 3)
    weights = torch.rand(len(ids) // 6 * 6)
    pooled = [
        group(ids[: len(weights)], offsets, weights, train=False) for group in groups
    ]
    assert torch.equal(*pooled)
    rows = [
        SequenceGroup([table])(ids, [len(ids)], train=False)
        for table in (tiered, whole)
    ]
    assert torch.equal(*rows)
    assert tiered.stats() == before


@pytest.mark.parametrize("pending", [1, 3])
def test_groups_train_the_same_rows(pending: int) -> None:
    pairs = [_tables(), _tables(dim=3)]
    groups = [
        PooledGroup([pair[side] for pair in pairs], [0, 1, 0], "sum") for side in (0, 1)
    ]
    sequences = [SequenceGroup([pair[side] for pair in pairs]) for side in (0, 1)]
    for step in range(12):
        outputs: list[list[Tensor]] = [[], []]
        for p in range(pending):
            generator = torch.Generator().manual_seed(100 * step + p)
            ids = (torch.rand(60, generator=generator) ** 2 * 1000).long()
            for side in (0, 1):
                groups[side].prefetch(ids, [20, 20, 20])
                outputs[side].append(
                    groups[side](ids, torch.arange(0, 61, 2), train=True)
                )
                outputs[side].append(sequences[side](ids, [35, 25], train=True))
        for one, other in zip(*outputs, strict=True):
            assert torch.equal(one, other)
            one.square().sum().backward()
            other.square().sum().backward()
        assert all(tiered.stats().rows <= MAX_ROWS for tiered, _ in pairs)
    for tiered, whole in pairs:
        _assert_same(tiered, whole)


def test_prefetched_rows_are_not_read_again_and_never_out_of_date() -> None:
    tiered, whole = _tables()
    group, other = (
        PooledGroup([tiered], [0], "sum"),
        PooledGroup([whole], [0], "sum"),
    )
    batches = _batches(40)
    again = 0
    for number, ids in enumerate(batches):
        # its rows may be trained on and evicted again in between
        for ahead in batches[number + 1 : number + 2]:
            group.prefetch(ahead, [len(ahead)])
        if number % 10 == 0:
            removed = batches[min(number + 1, 39)][:20]
            assert tiered.remove(removed) == whole.remove(removed)
        before = DictStore.reads
        out = group(ids, torch.arange(len(ids) + 1), train=True)
        expected = other(ids, torch.arange(len(ids) + 1), train=True)
        if number > 0:
            again += DictStore.reads - before
        assert torch.equal(out, expected)
        for result in (out, expected):
            (result.sum() * 0.1).backward()
    # rows that were evicted in the meantime, and errors of the filter
    assert again < tiered.stats().cold_hits / 4
    _assert_same(tiered, whole)


def test_new_ids_are_not_looked_for() -> None:
    tiered, _ = _tables()
    for start in range(0, 5000, 100):
        tiered.lookup(torch.arange(start, start + 100), train=True)
    asked = DictStore.reads
    tiered.lookup(torch.arange(10**6, 10**6 + 100), train=True)
    assert DictStore.reads - asked <= 15  # of a hundred ids


def test_a_failing_store_loses_nothing() -> None:
    tiered, whole = _tables()
    generator = torch.Generator().manual_seed(5)
    failures = 0
    for number, ids in enumerate(_batches(40, seed=3)):
        DictStore.failing = bool(torch.rand((), generator=generator) < 0.5)
        for attempt in range(2):
            before = replace(tiered.stats(), bytes=0)  # the filter may have grown
            try:
                tiered.lookup(ids, train=True)
                break
            except ColdStoreError:
                assert attempt == 0
                failures += 1
                assert replace(tiered.stats(), bytes=0) == before
                DictStore.failing = False
        DictStore.failing = False
        tiered.update(ids, torch.full((len(ids), 5), float(number)))
        whole.lookup(ids, train=True)
        whole.update(ids, torch.full((len(ids), 5), float(number)))
    assert failures > 5
    _assert_same(tiered, whole)


def test_a_working_set_that_does_not_fit_leaves_the_table_as_it_was() -> None:
    tiered, whole = _tables()
    for ids in _batches(10):
        tiered.lookup(ids, train=True)
        whole.lookup(ids, train=True)
    before = tiered.stats()
    with pytest.raises(ValueError, match=r"needs 201 rows at once, max_rows is 200"):
        tiered.lookup(torch.arange(MAX_ROWS + 1), train=True)
    assert tiered.stats() == before
    _assert_same(tiered, whole)


@pytest.mark.parametrize("ascending", [True, False])
def test_old_rows_expire_in_the_store_too(
    ascending: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DictStore, "ascending_snapshots", ascending)
    tiered, _ = _tables(expiry=Expiry(8))
    for start in range(0, 1000, 100):
        tiered.lookup(torch.arange(start, start + 100), train=True)
    kept = tiered.ids()
    assert len(kept) >= 800
    assert int(kept.min()) <= 200
    for _ in range(12):
        tiered.lookup(torch.arange(5), train=True)
    assert tiered.ids().tolist() == list(range(5))
    stats = tiered.stats()
    assert stats.cold_rows == 0
    assert stats.rows == 5
    assert stats.expired >= 995


@pytest.mark.parametrize(
    ("steps", "ascending"),
    [
        (1, True),
        (1, False),
        (5, True),
        (8, False),
        pytest.param(5, False, marks=pytest.mark.slow),
        pytest.param(8, True, marks=pytest.mark.slow),
    ],
)
def test_rows_expire_in_the_step_in_which_they_do_without_a_cold_store(
    steps: int, ascending: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are read, updated and written between the steps, and some belong to a
    pending forward.
    """
    monkeypatch.setattr(DictStore, "ascending_snapshots", ascending)
    tables = _tables(expiry=Expiry(steps))
    groups = [PooledGroup([table], [0], "sum") for table in tables]
    pending = torch.arange(10**6, 10**6 + 10)
    for step, ids in enumerate(_batches(60, ids=600)):
        if step % 20 == 0:
            outputs = [
                group(pending, torch.tensor([0, len(pending)]), train=True)
                for group in groups
            ]
            _assert_same(*tables)
        if step % 20 == 7:
            for output in outputs:
                output.sum().backward()
        for table in tables:
            table.lookup(ids[:100] if step < 40 else ids[:20], train=True)
        _assert_same(*tables)
        assert tables[0].stats().expired == tables[1].stats().expired
        for table in tables:
            table.update(ids[90:110], torch.ones(len(ids[90:110]), 5))
            table.insert(ids[110:120], torch.ones(len(ids[110:120]), 5))
        if step == 50:
            for table in tables:
                # a load sets the clock like this
                table.set_state(replace(table.state(), steps=1003))
    assert tables[0].stats().expired > 100


def test_a_step_is_done_though_what_has_expired_cannot_be_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Expired rows are invalid at once, and are deleted when the store works again."""
    monkeypatch.setattr(DictStore, "ascending_snapshots", False)
    tiered, whole = _tables(expiry=Expiry(8))
    for ids in _batches(30):
        for table in (tiered, whole):
            table.lookup(ids, train=True)
    assert tiered.stats().cold_rows > 100
    resident = ids[:5]
    for _ in range(20):
        DictStore.failing = True
        tiered.lookup(resident, train=True)
        DictStore.failing = False
        whole.lookup(resident, train=True)
        _assert_same(tiered, whole)
    assert tiered.ids().tolist() == resident.tolist()
    assert tiered.stats().cold_rows == 0
    for _ in range(4):
        tiered.lookup(resident, train=True)
    assert isinstance(tiered.tier, ColdTier)
    assert isinstance(tiered.tier.store, DictStore)
    assert set(tiered.tier.store.rows) <= set(resident.tolist())


def test_memory_does_not_grow_with_the_ids_that_were_ever_cold() -> None:
    tiered, whole = _tables(expiry=Expiry(8))
    found = []
    for step in range(100):
        # some come back, from memory or from the store
        ids = torch.arange(step * 100 - 300, step * 100 + 100, 2)
        for table in (tiered, whole):
            table.lookup(ids[:150], train=True)
        found.append(tiered.stats().bytes)
        if step % 50 == 0:
            _assert_same(tiered, whole)
    assert max(found[50:]) == max(found[:50])


@pytest.mark.parametrize("expiry", [Expiry(64), Expiry(seconds=64)])
def test_a_sweep_sees_each_row_about_twice_until_it_expires(
    expiry: Expiry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scan returns batches that are larger than the part of the store that a step
    sweeps.
    """
    scan, seen = DictStore.scan, 0

    def in_batches(store: DictStore) -> Iterator[tuple[Tensor, Tensor]]:
        nonlocal seen
        rows = list(scan(store))
        for start in range(0, len(rows), 100):
            ids, images = (
                torch.cat(parts)
                for parts in zip(*rows[start : start + 100], strict=True)
            )
            seen += len(ids)
            yield ids, images

    monkeypatch.setattr(DictStore, "scan", in_batches)
    tiered, whole = _tables(expiry=expiry)
    for step in range(256):
        if step == 128:
            seen = 0
        for table in (tiered, whole):
            table.set_time(1e9 + step)
            table.lookup(torch.arange(step * 20, step * 20 + 100), train=True)
    _assert_same(tiered, whole)
    assert isinstance(tiered.tier, ColdTier)
    assert isinstance(tiered.tier.store, DictStore)
    rows = tiered.stats().cold_rows + MAX_ROWS
    assert 0.7 < seen / (4 * rows) < 1.7
    assert len(tiered.tier.store.rows) < 2 * rows


def test_no_row_is_forgotten_though_sweeps_fail() -> None:
    tiered, whole = _tables(expiry=Expiry(6))
    generator = torch.Generator().manual_seed(0)
    for step, ids in enumerate(_batches(60, ids=1500)):
        for table in (tiered, whole):
            table.lookup(ids, train=True)
        DictStore.failing = bool(torch.rand((), generator=generator) < 0.3)
        for table in (tiered, whole):
            # of a row in memory; the sweep after the step fails, or not
            table.lookup(ids[:1], train=True)
        DictStore.failing = False
        if step % 10 == 0:
            _assert_same(tiered, whole)
    assert tiered.stats().cold_hits > 500


def test_admission_asks_for_new_ids_alone() -> None:
    tiered, whole = _tables(admission=MinFrequency(2))
    for ids in _batches(40):
        for table in (tiered, whole):
            assert table.lookup(ids, train=True).shape == (len(ids), 5)
            table.update(ids, torch.ones(len(ids), 5))
    stats = tiered.stats()
    assert stats.refused == whole.stats().refused > 0
    assert stats.cold_rows > 0
    assert stats.misses == stats.cold_hits + stats.refused + stats.inserts
    assert stats.lookups == stats.hits + stats.misses
    _assert_same(tiered, whole)


def test_a_row_that_changes_on_its_way_to_the_store_stays_in_memory() -> None:
    tiered, _ = _tables(optimizer=SGD(lr=0.5), dim=2)
    ids = torch.arange(3)
    tiered.lookup(ids, train=True)
    images = ops.table_images(tiered.handle, ids)
    tiered.update(ids[1:2], torch.ones(1, 2))  # as a backward in another thread may do
    changed = tiered.lookup(ids)
    assert ops.table_evict(tiered.handle, ids, images).tolist() == [True, False, True]
    assert ops.table_ids(tiered.handle).tolist() == [1]
    assert torch.equal(tiered.lookup(ids[1:2]), changed[1:2])


def test_tables_exchange_their_stores() -> None:
    (one, whole), other = _tables(), _tables()[0]
    for ids in _batches(20):
        one.lookup(ids, train=True)
        whole.lookup(ids, train=True)
    other.lookup(torch.arange(100), train=True)
    one.exchange_rows(other)
    assert one.ids().tolist() == list(range(100))
    _assert_same(other, whole)
    with pytest.raises(ValueError, match="different bounds"):
        one.exchange_rows(whole)


def test_threads_share_a_table() -> None:
    tiered, whole = _tables(optimizer=SGD(lr=1.0))
    batches = _batches(60, seed=9)
    errors: list[BaseException] = []

    def train(part: list[Tensor]) -> None:
        try:
            for ids in part:
                tiered.lookup(ids, train=True)
                tiered.update(ids, torch.ones(len(ids), 5))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(batches[i::3],)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for ids in batches:
        whole.lookup(ids, train=True)
        whole.update(ids, torch.ones(len(ids), 5))
    ids = whole.ids()
    assert torch.equal(tiered.ids(), ids)
    assert torch.equal(tiered.lookup(ids), whole.lookup(ids))
    assert torch.equal(
        tiered.read_rows(ids)["frequency"], whole.read_rows(ids)["frequency"]
    )


def test_a_clock_that_is_set_back_expires_nothing() -> None:
    tiered, _ = _tables(expiry=Expiry(8))
    tiered.set_state(replace(tiered.state(), steps=1000))
    for start in range(0, 2000, 100):
        tiered.lookup(torch.arange(start, start + 100), train=True)
    tiered.set_state(replace(tiered.state(), steps=100))
    for start in range(0, 600, 100):
        tiered.lookup(torch.arange(start, start + 100), train=True)
    assert set(range(600)) <= set(tiered.ids().tolist())
    assert len(tiered) == len(tiered.ids())


def test_what_is_fetched_of_a_store_is_of_no_use_with_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = (
        Table(2, options=TableOptions(max_rows=4, cold_store=DictStoreOptions()))
        for _ in range(2)
    )
    for table, value in ((one, 1.0), (other, 2.0)):
        for start in (0, 4, 8):
            table.insert(torch.arange(start, start + 4), torch.full((4, 2), value))
    reading, go_on = threading.Event(), threading.Event()
    assert one.tier is not None
    get = one.tier.store.get

    def slow(ids: Tensor) -> tuple[Tensor, Tensor]:
        reading.set()
        assert go_on.wait(10)
        return get(ids)

    monkeypatch.setattr(one.tier.store, "get", slow)
    fetching = threading.Thread(target=one.tier.prefetch, args=(torch.arange(4),))
    fetching.start()
    assert reading.wait(10)
    one.exchange_rows(other)
    go_on.set()
    fetching.join()
    assert torch.equal(one.lookup(torch.arange(4), train=True), torch.full((4, 2), 2.0))


@pytest.mark.parametrize("put", ["while it is fetched", "when it is staged"])
def test_a_row_that_was_fetched_before_it_was_trained_on_and_put_is_not_used(
    put: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiered, whole = _tables()
    ids, others = torch.arange(20), torch.arange(1000, 1000 + MAX_ROWS)
    for table in (tiered, whole):
        table.lookup(ids, train=True)
        table.lookup(others, train=True)  # evicts the rows of ids
    tier = tiered.tier
    assert isinstance(tier, ColdTier)
    assert torch.equal(tier.read(ids)[0], ids)
    get, fetched, held = tier.store.get, threading.Event(), threading.Event()

    def first_get(asked: Tensor) -> tuple[Tensor, Tensor]:
        monkeypatch.undo()  # later calls are the store's own
        rows = get(asked)
        fetched.set()
        assert held.wait(60)
        return rows

    def train() -> None:
        for table in (tiered, whole):
            table.lookup(ids, train=True)
            table.update(ids, torch.ones(20, 5))

    def leave() -> None:
        for table in (tiered, whole):
            table.lookup(others, train=True)

    monkeypatch.setattr(tier.store, "get", first_get)
    fetching = threading.Thread(target=tier.prefetch, args=(ids,))
    fetching.start()
    assert fetched.wait(60)
    with tier.lock:  # prefetch stages the rows that it has read when it gets this lock
        held.set()
        train()
        if put == "while it is fetched":
            leave()
    fetching.join()
    if put == "when it is staged":
        leave()
    assert torch.equal(tier.read(ids)[0], ids)
    _assert_same(tiered, whole)
    train()
    _assert_same(tiered, whole)


class _Failing:
    """Makes a call of the store fail after it has done a part of its work."""

    def __init__(
        self, table: Table, monkeypatch: pytest.MonkeyPatch, call: str
    ) -> None:
        assert table.tier is not None
        self._do = getattr(table.tier.store, call)
        self.on = True
        monkeypatch.setattr(table.tier.store, call, self)

    def __call__(self, ids: Tensor, *rows: Tensor) -> None:
        if not self.on:
            self._do(ids, *rows)
            return
        half = len(ids) // 2
        self._do(ids[:half], *(part[:half] for part in rows))
        raise ColdStoreError("the answer is lost")


def test_a_put_that_failed_in_mid_way_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiered, whole = _tables()
    for table in (tiered, whole):
        table.insert(torch.arange(MAX_ROWS), torch.ones(MAX_ROWS, 5))
    put = _Failing(tiered, monkeypatch, "put")
    with pytest.raises(ColdStoreError, match="the answer is lost"):
        tiered.lookup(torch.arange(1000, 1100), train=True)
    put.on = False
    for table in (tiered, whole):
        assert table.remove(torch.arange(150)) == 150
        table.insert(torch.arange(1000, 1100), torch.ones(100, 5))
    _assert_same(tiered, whole)
    with tiered.snapshot() as snapshot:
        assert torch.equal(snapshot.read(len(snapshot)).ids, whole.ids())


def test_what_could_not_be_deleted_is_gone_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiered, whole = _tables()
    for ids in _batches(10):
        tiered.lookup(ids, train=True)
        whole.lookup(ids, train=True)
    delete = _Failing(tiered, monkeypatch, "delete")
    for number in range(3):
        some = whole.ids()[number::5]
        assert tiered.remove(some) == whole.remove(some) == len(some)
        _assert_same(tiered, whole)
        with tiered.snapshot() as snapshot:
            assert torch.equal(snapshot.read(len(snapshot)).ids, whole.ids())
        for table in (tiered, whole):  # some rows are created again, and evicted again
            table.insert(some[::2], torch.full((len(some[::2]), 5), float(number)))
            for ids in _batches(5, seed=number):
                table.lookup(ids, train=True)
    delete.on = False
    gone = whole.ids()[:3]
    for table in (tiered, whole):
        table.remove(gone)
    assert tiered.tier is not None
    assert len(tiered.tier.dead) == 0
    _assert_same(tiered, whole)


def test_what_could_not_be_deleted_does_not_come_back_by_a_prefetch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiered, whole = _tables()
    for ids in _batches(10):
        tiered.lookup(ids, train=True)
        whole.lookup(ids, train=True)
    _Failing(tiered, monkeypatch, "delete")
    assert tiered.tier is not None
    gone = whole.ids()[~torch.isin(whole.ids(), ops.table_ids(tiered.handle))][:20]
    for table in (tiered, whole):
        table.insert(gone, torch.full((len(gone), 5), 9.0))
        for ids in _batches(10, seed=1):
            table.lookup(ids, train=True)
        assert table.remove(gone) == len(gone)
    tiered.tier.prefetch(gone)
    for table in (tiered, whole):
        table.lookup(gone, train=True)
    _assert_same(tiered, whole)


def test_rows_written_as_old_as_what_has_expired() -> None:
    tiered, _ = _tables(expiry=Expiry(8))
    for start in range(0, 2000, 100):
        tiered.lookup(torch.arange(start, start + 100), train=True)
    ids = torch.arange(10**6, 10**6 + 100)
    tiered.insert(ids, torch.ones(100, 5))
    rows = tiered.read_rows(ids)
    tiered.write_rows(ids, {**rows, "last_step": torch.full((100,), 3)})
    # evicts the rows of ids, which have expired
    tiered.insert(torch.arange(10**7, 10**7 + 150), torch.ones(150, 5))
    assert len(tiered) == len(tiered.ids())
    with tiered.snapshot() as snapshot:
        assert torch.equal(snapshot.read(len(snapshot)).ids, tiered.ids())
