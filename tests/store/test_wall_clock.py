"""Expiry after a time: never too early, never too late, the same rows in every run,
with and without a cold store.

Times of the events that are far away from the others are in ``test_refused_times.py``.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.store.dict_store import DictStore, DictStoreOptions
from torchrec_recstore.kernels import PooledGroup
from torchrec_recstore.optim import SGD, Adam
from torchrec_recstore.options import LRU, Expiry, MinFrequency, TableOptions
from torchrec_recstore.store import Table, TableState

NONE = torch.empty(0, dtype=torch.int64)
START = 1_700_000_000.0


def timed(seconds: float, max_jump_s: float | None = None, **more: Any) -> Table:
    options = TableOptions(
        expiry=Expiry(seconds=seconds, max_jump_s=max_jump_s), **more
    )
    return Table(4, optimizer=SGD(lr=1.0), options=options)


@pytest.mark.parametrize("seconds", [0.5, 60, 86400.0])
@pytest.mark.parametrize("rows", [3, 20_000])
def test_rows_leave_when_they_are_old_enough(seconds: float, rows: int) -> None:
    table = timed(seconds)
    table.set_time(START)
    table.lookup(torch.arange(rows), train=True)
    kept = torch.arange(0, rows, 3)
    parts = 40
    for part in range(1, 3 * parts // 2 + 2):
        table.set_time(START + seconds * part / parts)
        table.lookup(kept, train=True)
        if part <= parts:
            assert len(table) == rows, part
        else:
            assert table.contains(kept).all()
    # The last lookup of the other rows is now more than 1.5 times the seconds ago.
    assert torch.equal(table.ids(), kept)
    assert (table.stats().expired, table.stats().evicted) == (rows - len(kept), 0)


def test_the_first_step_after_a_pause_removes_the_rows() -> None:
    table = timed(60, max_jump_s=10_000)
    for second in range(0, 50, 10):
        table.set_time(START + second)
        table.lookup(torch.tensor([second]), train=True)
    table.set_time(START + 10_000)
    table.insert(torch.tensor([8]), torch.ones(1, 4))
    table.lookup(torch.tensor([7]), train=True)
    # A row that was written after the last step has the number of that step, and so has
    # a row that it looked up.
    assert set(table.ids().tolist()) == {7, 8, 40}
    table.set_time(START + 10_061)
    table.lookup(NONE, train=True)
    assert table.ids().tolist() == [7]
    table.set_time(START + 10_122)
    table.lookup(NONE, train=True)
    assert len(table) == 0


class Model:
    """The time of the last lookup of each row, and what must and may have left."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.touched: dict[int, float] = {}
        self.now = START
        self.longest_gap = 0.0

    def step(self, ids: Tensor, now: float) -> None:
        self.longest_gap = max(self.longest_gap, now - self.now)
        self.now = max(self.now, now)
        self.touched.update(dict.fromkeys(ids.tolist(), self.now))

    def check(self, ids: set[int]) -> None:
        must_stay = {
            i for i, then in self.touched.items() if self.now - then <= self.seconds
        }
        limit = 1.25 * self.seconds + 2 * self.longest_gap
        may_stay = {i for i, then in self.touched.items() if self.now - then <= limit}
        assert must_stay <= ids <= may_stay
        self.touched = {i: then for i, then in self.touched.items() if i in ids}


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from([-5.0, 0.0, 0.5, 2.0, 9.0, 30.0]), st.integers(0, 2**32)
        ),
        max_size=60,
    ),
    bounded=st.booleans(),
)
def test_random_times_against_a_model(
    steps: list[tuple[float, int]], bounded: bool
) -> None:
    tables = [
        timed(40, max_jump_s=40),
        (
            timed(40, 40, max_rows=30, eviction=LRU(), cold_store=DictStoreOptions())
            if bounded
            else timed(40, 40)
        ),
    ]
    model = Model(40)
    now = START
    for table in tables:
        table.set_time(now)
    for passed, seed in steps:
        now += passed  # the clock does not go back, although the events do
        ids = torch.randint(0, 60, (15,), generator=torch.Generator().manual_seed(seed))
        for table in tables:
            table.set_time(now)
            table.lookup(ids, train=True)
        now = max(now, model.now)
        model.step(ids, now)
        found = tables[0].ids()
        model.check(set(found.tolist()))
        assert torch.equal(found, tables[1].ids())
        assert len(tables[0]) == len(tables[1]) == len(found)
        assert tables[0].stats().expired == tables[1].stats().expired
    for table in tables:
        table.close()


@pytest.mark.slow
@pytest.mark.parametrize("ascending", [True, False])
def test_cold_rows_expire_in_the_same_step(
    ascending: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are read, updated and written between the steps, and some belong to a
    pending forward.
    """
    monkeypatch.setattr(DictStore, "ascending_snapshots", ascending)
    expiry, generator = Expiry(seconds=8), torch.Generator().manual_seed(1)
    cold = TableOptions(
        expiry=expiry, max_rows=200, eviction=LRU(), cold_store=DictStoreOptions()
    )
    tables = [
        Table(4, optimizer=Adam(lr=0.1), options=o)
        for o in (cold, TableOptions(expiry=expiry))
    ]
    groups = [PooledGroup([table], [0], "sum") for table in tables]
    pending = torch.arange(10**6, 10**6 + 10)
    outputs: list[Tensor] = []
    for step in range(80):
        for table in tables:
            table.set_time(START + step)
        if step % 20 == 0:
            outputs = [
                group(pending, torch.tensor([0, len(pending)]), train=True)
                for group in groups
            ]
        if step % 20 == 17:
            for output in outputs:
                output.sum().backward()
        ids = torch.randint(0, 700, (100 if step < 60 else 20,), generator=generator)
        for table in tables:
            table.lookup(ids, train=True)
        assert torch.equal(tables[0].ids(), tables[1].ids())
        assert len(tables[0]) == len(tables[1])
        assert tables[0].stats().expired == tables[1].stats().expired
        for table in tables:
            table.update(ids[90:110], torch.ones(len(ids[90:110]), 4))
            table.insert(ids[:10], torch.ones(len(ids[:10]), 4))
            if step == 50:
                # a load sets the clock like this
                table.set_state(replace(table.state(), steps=1003, times=None))
            if step == 70:
                table.set_state(
                    replace(table.state(), steps=1000, times=None)
                )  # and a load of an older state like this
    assert tables[0].stats().expired > 100


@pytest.mark.parametrize("columns", [range(2), range(2, 4)])
def test_the_same_times_leave_the_same_rows(columns: range) -> None:
    """Threads, slots and columns make no difference.

    Otherwise column shards would not have the same rows.
    """
    options = TableOptions(expiry=Expiry(seconds=5.5), max_rows=6000, eviction=LRU())
    tables = [Table(4, options=options), Table(4, options=options, columns=columns)]
    for step in range(40):
        ids = (
            torch.rand(1000, generator=torch.Generator().manual_seed(step)) ** 4
            * 50_000
        ).long()
        for threads, table in enumerate(tables, start=1):
            torch.set_num_threads(threads)
            table.set_time(START + step)
            table.lookup(ids[torch.randperm(len(ids))], train=True)
        assert torch.equal(tables[0].ids(), tables[1].ids())
    assert tables[0].stats().expired == tables[1].stats().expired > 500


def test_rows_expire_by_the_clock_of_the_system() -> None:
    seconds = 0.2
    table, slow = timed(seconds), timed(10**6)
    begin = time.time()
    for each in (table, slow):
        each.lookup(torch.arange(5), train=True)
    for step in itertools.count():
        table.lookup(torch.tensor([7]), train=True)
        slow.lookup(torch.tensor([7]), train=True)
        if len(table) == 1:
            break
        time.sleep(seconds / 20)
        assert step < 10_000
    assert time.time() - begin > seconds
    assert table.ids().tolist() == [7]
    assert len(slow) == 6


def test_only_training_lookups_count() -> None:
    table = timed(60, max_jump_s=10_000)
    table.set_time(START)
    table.lookup(torch.arange(10), train=True)
    table.set_time(START + 10_000)
    table.lookup(torch.arange(10))
    table.update(torch.arange(5), torch.ones(5, 4))
    assert len(table) == 10  # no step has been made since the time was set


def test_a_time_that_goes_back() -> None:
    table = timed(60)
    table.set_time(START)
    table.lookup(torch.arange(3), train=True)
    table.set_time(START - 20)  # events out of order
    table.lookup(torch.arange(3), train=True)
    table.set_time(START + 30)
    table.lookup(torch.tensor([9]), train=True)
    assert len(table) == 4


@pytest.mark.parametrize("tiered", [False, True])
def test_the_time_of_the_events_may_follow_steps_by_the_systems_clock(
    tiered: bool,
) -> None:
    """It is years earlier than that of the system.

    Rows age on by the time that passes for the events.
    """
    table = (
        timed(60, max_rows=4, eviction=LRU(), cold_store=DictStoreOptions())
        if tiered
        else timed(60)
    )
    table.lookup(torch.arange(3), train=True)
    for second in range(0, 100, 10):
        table.set_time(START + second)
        table.lookup(torch.arange(3, 6), train=True)
        assert len(table) == (6 if second <= 70 else 3)
    late = timed(60)
    late.lookup(torch.arange(3), train=True)
    late.set_time(time.time() + 100)
    late.lookup(NONE, train=True)
    assert len(late) in (0, 3)
    table.close()


@pytest.mark.parametrize("wrong", ["now", None, True])
def test_a_time_of_the_wrong_type(wrong: Any) -> None:
    with pytest.raises(TypeError, match="unix_seconds must be a number, got"):
        timed(1).set_time(wrong)


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf"), 2.0**60])
def test_a_time_that_is_none(wrong: float) -> None:
    with pytest.raises(
        ValueError, match="unix_seconds must be a time in seconds since 1970, got"
    ):
        timed(1).set_time(wrong)


def test_a_table_without_seconds_ignores_the_time() -> None:
    table = Table(4, options=TableOptions(expiry=Expiry(2)))
    table.set_time(START)
    assert table.state().times is None
    table.set_state(replace(table.state(), times=(0, 5, 0)))  # ignored


def test_expiry_needs_one_of_the_two() -> None:
    assert Expiry(3) == Expiry(steps=3) != Expiry(seconds=3)
    assert (repr(Expiry(3)), repr(Expiry(seconds=3.5))) == (
        "Expiry(steps=3)",
        "Expiry(seconds=3.5)",
    )
    for both in ({}, {"steps": 1, "seconds": 1.0}):
        with pytest.raises(ValueError, match="Expiry needs either steps or seconds"):
            Expiry(**both)  # type: ignore[arg-type]
    for wrong in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"Expiry\.seconds must be"):
            Expiry(seconds=wrong)
    for kind in (True, "60"):
        with pytest.raises(TypeError, match=r"Expiry\.seconds must be a number"):
            Expiry(seconds=kind)  # type: ignore[arg-type]


def restored(table: Table) -> Table:
    """Returns a table with the rows, the clocks and the times of another one, as a load
    makes it.
    """
    fresh = table.empty_copy()
    fresh.set_state(table.state())
    ids = table.ids()
    fresh.write(table.part(ids))
    return fresh


@pytest.mark.slow
@pytest.mark.parametrize("cold", [False, True])
def test_a_run_that_is_restored_goes_on_as_if_undisturbed(cold: bool) -> None:
    bound = (
        {"max_rows": 120, "eviction": LRU(), "cold_store": DictStoreOptions()}
        if cold
        else {}
    )
    undisturbed, killed = timed(20, **bound), timed(20, **bound)
    generator = torch.Generator().manual_seed(3)
    for step in range(90):
        ids = torch.randint(0, 400, (20,), generator=generator)
        for table in (undisturbed, killed):
            # some events are out of order
            table.set_time(START + step + (0.5 if step % 7 else -3.0))
            table.lookup(ids, train=True)
        if step % 11 == 0:
            killed = restored(killed)
        assert undisturbed.state().times == killed.state().times
        assert torch.equal(undisturbed.ids(), killed.ids()), step
        assert len(undisturbed) == len(killed)
    assert undisturbed.stats().expired > 100


def test_time_passes_while_a_table_is_away() -> None:
    table = timed(60)
    table.lookup(torch.arange(3), train=True)
    of_events, now, before, *rest = table.state().times or ()
    refusals, ticks = rest[:4], rest[4:]
    assert (of_events, before, refusals, len(ticks)) == (0, 0, [0] * 4, 2)
    late = table.empty_copy()
    # saved 100 seconds ago
    times = (0, now - 100_000_000, 0, *refusals, ticks[0], now - 101_000_000)
    late.set_state(replace(table.state(), times=times))
    late.write_rows(torch.arange(3), table.read_rows(torch.arange(3)))
    late.lookup(torch.tensor([9]), train=True)
    assert late.ids().tolist() == [9]


def test_a_step_count_that_is_set_back_expires_nothing_too_early() -> None:
    table = timed(60)
    for step in range(20):
        table.set_time(START + 5 * step)
        table.lookup(torch.tensor([step]), train=True)
    table.set_state(replace(table.state(), steps=3, times=None))
    table.set_time(START + 101)
    table.lookup(torch.arange(100, 110), train=True)
    for second in range(102, 161, 8):
        table.set_time(START + second)
        table.lookup(NONE, train=True)
        assert table.contains(torch.arange(100, 110)).all()


@pytest.mark.parametrize(
    "damaged",
    [
        [1],
        [1, 5, 0],
        [0, 5, 0, 0, 0, 0, 0, 3],
        [3, 5, 0, 0, 0, 0, 0],
        [0, -2, 0, 0, 0, 0, 0],
        [1, -1, 0, 0, 0, 0, 0],
        [1, 5, 0, 6, 0, 0, 0],
        [1, 5, 0, -1, 0, 0, 0],
        [1, 5, 0, 0, -1, 0, 0],
        [1, 5, 0, 0, 9, 10, 0],
        [1, 5, 0, 0, 9, 2, -1],
        [1, 5, 0, 0, 0, 0, 0, 3, 9],
        [1, 9, 0, 0, 0, 0, 0, 3, 5, 3, 6],
    ],
)
def test_damaged_times(damaged: list[int]) -> None:
    table = timed(60, admission=MinFrequency(3))
    for _ in range(2):
        table.lookup(torch.arange(3), train=True)
    table.update(torch.arange(3), torch.ones(3, 4))
    before = told(table)
    with pytest.raises(ValueError, match="the times of the table's steps are damaged"):
        table.set_state(TableState(77, 78, tuple(damaged)))
    assert told(table) == before


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": -1},
        {"steps": 2**32},
        {"optimizer_steps": -1},
        {"optimizer_steps": 2**63 - 1},
    ],
)
def test_numbers_of_steps_out_of_range_change_nothing(wrong: dict[str, int]) -> None:
    table = timed(60, max_rows=2, eviction=LRU(), cold_store=DictStoreOptions())
    for step in range(3):
        table.set_time(START + step)
        table.lookup(torch.tensor([step]), train=True)
    before = told(table)
    times = (1, (before[2] or ())[1], 0, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="steps must be within 0 and"):
        table.set_state(replace(TableState(77, 78, times), **wrong))
    assert told(table) == before
    assert table.ids().tolist() == [0, 1, 2]


def told(
    table: Table,
) -> tuple[int, int, tuple[int, ...] | None, list[list[int]] | None]:
    """Returns the state of a table, without the system's time."""
    state = table.state()
    of_events, now, *rest = state.times or ()
    sightings = (
        None if state.sightings is None else [each.tolist() for each in state.sightings]
    )
    return (
        state.steps,
        state.optimizer_steps,
        (of_events, now if of_events else 0, *rest),
        sightings,
    )
