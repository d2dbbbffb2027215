"""Times of the events that are far away from the clock: they are refused, unless ten in
a row agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.dict_store import DictStoreOptions
from torchrec_recstore import RecStoreWarning
from torchrec_recstore.options import LRU, Expiry, RocksDBStore, TableOptions
from torchrec_recstore.store import Table
from torchrec_recstore.store.table_state import StatsByTable, combined

NONE = torch.empty(0, dtype=torch.int64)
START = 1_700_000_000.0
DAY, MONTH = 86_400.0, 30 * 86_400.0
SECONDS, BOUND = 60.0, 30.0
pytestmark = pytest.mark.filterwarnings(
    "ignore::torchrec_recstore.utils.RecStoreWarning"
)


def timed(
    seconds: float = SECONDS, max_jump_s: float | None = None, **more: Any
) -> Table:
    return Table(
        4,
        options=TableOptions(
            expiry=Expiry(seconds=seconds, max_jump_s=max_jump_s), **more
        ),
        name="t",
    )


def cold(tmp_path: Path, **more: Any) -> Table:
    return timed(
        max_rows=40, eviction=LRU(), cold_store=RocksDBStore(str(tmp_path)), **more
    )


class Clock:
    """What the clock of a table must do, and the time by which its rows age, which
    never goes back.
    """

    def __init__(self, bound: float) -> None:
        self.bound = bound
        self.events = self.aged = float("nan")
        self.refused = 0
        self.run: list[float] = []

    def set(self, *times: float) -> None:
        if self.events != self.events:
            self.events = self.aged = max(times)
            return
        near = [each for each in times if abs(each - self.events) <= self.bound]
        before = self.events
        if near:
            self.run.clear()
            self.aged += max(0.0, max(near) - self.events)
            self.events = max(self.events, *near)
        else:
            nearest = max(times, key=lambda each: (-abs(each - self.events), each))
            if self.run and abs(nearest - self.run[-1]) > self.bound:
                self.run.clear()
            self.run.append(nearest)
            if len(self.run) == 10:
                self.run.clear()
                self.events, self.aged = nearest, max(self.aged, nearest)
                return
        self.refused += any(abs(each - before) > self.bound for each in times)


class Rows:
    """The rows that must be in a table, and that may be."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds
        self.touched: dict[int, float] = {}
        self.longest_gap = 0.0
        self.last = float("nan")

    def step(self, ids: Sequence[int]) -> None:
        now = self.clock.aged
        self.longest_gap = (
            max(self.longest_gap, now - self.last) if self.last == self.last else 0.0
        )
        self.last = now
        self.touched.update(dict.fromkeys(ids, now))

    def check(self, table: Table) -> None:
        found, now = set(table.ids().tolist()), self.clock.aged
        limit = 1.25 * self.seconds + 2 * self.longest_gap
        assert {
            i for i, then in self.touched.items() if now - then <= self.seconds
        } <= found
        assert found <= {i for i, then in self.touched.items() if now - then <= limit}
        self.touched = {i: then for i, then in self.touched.items() if i in found}
        assert len(table) == len(found)
        assert table.stats().refused_times == self.clock.refused


def run(table: Table, times: Sequence[float], rows_per_step: int = 5) -> Rows:
    """Makes a step with new rows at each of the times, and checks the rows after each."""
    clock = Clock(BOUND)
    rows = Rows(clock, SECONDS)
    for step, time in enumerate(times):
        ids = torch.arange(step * rows_per_step, (step + 1) * rows_per_step)
        clock.set(time)
        table.set_time(time)
        table.lookup(ids, train=True)
        rows.step(ids.tolist())
        rows.check(table)
    return rows


@pytest.mark.parametrize("ahead", [MONTH, -MONTH])
@pytest.mark.parametrize("tiered", [False, True])
def test_a_sample_of_a_wrong_time_changes_nothing(
    tmp_path: Path, ahead: float, tiered: bool
) -> None:
    table = cold(tmp_path) if tiered else timed()
    rows = run(table, [START + 2 * step + ahead * (step == 40) for step in range(150)])
    assert len(table) <= 5 * 46
    assert table.stats().expired == 750 - len(table)
    assert rows.clock.refused == table.stats().refused_times == 1
    table.close()


@pytest.mark.parametrize("tiered", [False, True])
def test_several_wrong_times_do_not_empty_the_table(
    tmp_path: Path, tiered: bool
) -> None:
    """Each is later than the one before, and would expire everything."""
    table = cold(tmp_path) if tiered else timed()
    wrong = {40: MONTH, 41: 2 * MONTH, 50: 3 * MONTH}
    run(table, [START + 2 * step + wrong.get(step, 0.0) for step in range(100)])
    assert len(table) >= 5 * 30
    assert table.stats().refused_times == 3
    table.close()


@pytest.mark.parametrize("tiered", [False, True])
@pytest.mark.parametrize("gap", [7 * DAY, 45.0])
def test_the_clock_follows_a_pause(tmp_path: Path, tiered: bool, gap: float) -> None:
    table = cold(tmp_path) if tiered else timed()
    run(table, [START + 2 * step + gap * (step >= 40) for step in range(150)])
    assert table.stats().refused_times == 9
    assert table.stats().expired == 750 - len(table) > 500
    table.close()


@pytest.mark.parametrize("tiered", [False, True])
@pytest.mark.parametrize("ahead", [MONTH, -MONTH])
def test_the_clock_recovers_from_a_wrong_first_time(
    tmp_path: Path, tiered: bool, ahead: float
) -> None:
    table = cold(tmp_path) if tiered else timed()
    run(table, [START + ahead, *(START + 2 * step for step in range(150))])
    assert table.stats().refused_times == 9
    assert table.stats().expired > 500
    table.close()


def test_a_replay_of_old_events_loses_no_young_rows() -> None:
    """The clock goes back to the old events, and forward again after them.

    The rows from before are not old then.
    """
    table = timed()
    times = [START + 2 * step for step in range(40)]
    times += [START - DAY + step for step in range(25)]
    times += [START + 80 + 2 * step for step in range(40)]
    rows = run(table, times)
    assert rows.clock.events == times[-1]
    assert table.stats().refused_times == 18


@settings(max_examples=20, deadline=None)
@given(
    bound=st.sampled_from([BOUND, 5.0]),
    parts=st.lists(
        st.tuples(
            st.sampled_from(
                [-MONTH, -2 * BOUND, -20.0, 0.0, 0.0, 0.0, 20.0, 2 * BOUND, MONTH]
            ),
            st.sampled_from([0.0, 0.5, 2.0, 9.0]),
            st.integers(1, 14),
        ),
        max_size=12,
    ),
    restores=st.booleans(),
    bounded=st.booleans(),
)
def test_random_times_against_a_model(
    bound: float, parts: list[tuple[float, float, int]], restores: bool, bounded: bool
) -> None:
    more = (
        {"max_rows": 30, "eviction": LRU(), "cold_store": DictStoreOptions()}
        if bounded
        else {}
    )
    table = timed(max_jump_s=bound, **more)
    clock = Clock(bound)
    rows = Rows(clock, SECONDS)
    now, step = START, 0
    for away, pace, count in parts:
        for _ in range(count):
            now, step = now + pace, step + 1
            ids = [step, 7 * step % 60]
            clock.set(now + away)
            table.set_time(now + away)
            table.lookup(torch.tensor(ids), train=True)
            rows.step(ids)
            rows.check(table)
        if restores:
            table = restored(table)
    table.close()


def restored(table: Table) -> Table:
    """Returns a table with the rows, the clocks and the times of another one, as a load
    makes it.
    """
    fresh = table.empty_copy()
    fresh.set_state(table.state())
    ids = table.ids()
    fresh.write(table.part(ids))
    table.close()
    return fresh


def test_a_run_that_is_restored_between_refused_times_goes_on_as_if_undisturbed() -> (
    None
):
    undisturbed = timed()
    killed = timed()
    for step in range(100):
        time = START + 2 * step + 7 * DAY * (step >= 40) - MONTH * (step >= 70)
        for table in (undisturbed, killed):
            table.set_time(time)
            table.lookup(torch.arange(step, step + 5), train=True)
        if step in (20, 44, 48, 75):
            killed = restored(killed)
        assert undisturbed.state().times == killed.state().times
        assert torch.equal(undisturbed.ids(), killed.ids()), step
    assert killed.stats().refused_times == 18


def test_accepted_times_and_times_that_differ_end_a_run() -> None:
    table = timed()
    table.set_time(START)
    for _ in range(5):
        for _ in range(9):
            table.set_time(START + MONTH)
        # slightly out of order: it moves nothing, and ends the run
        table.set_time(START - BOUND)
    for step in range(30):
        table.set_time(START + MONTH + 2 * BOUND * step)
    for step in range(30):
        table.set_time(START + MONTH * (-1) ** step)
    assert table.stats().refused_times == 45 + 60
    table.lookup(NONE, train=True)
    assert (table.state().times or ())[1] == START * 1e6


def test_warnings_name_the_table_and_both_times(
    recwarn: pytest.WarningsRecorder,
) -> None:
    table = timed()
    table.set_time(START)
    for step in range(120):
        table.set_time(START + 3 * MONTH if step % 5 == 0 else START - 2 * MONTH)
    told = [warning for warning in recwarn if warning.category is RecStoreWarning]
    assert [str(warning.message) for warning in told] == [
        f"table 't': set_time has refused the time {START + away} ({count} refused so"
        f" far): it is more than 30 s away from the clock's time {START}, by which rows"
        " expire. The clock follows when ten calls in a row agree. If your events can"
        " be so far apart, set Expiry(max_jump_s=...); otherwise leave out the times"
        " that are wrong"
        for count, away in ((1, 3 * MONTH), (10, -2 * MONTH), (100, -2 * MONTH))
    ]
    assert {warning.filename for warning in told} == {__file__}


def test_statistics_count_refused_times() -> None:
    table = timed()
    assert "refused times" not in str(StatsByTable(t=table.stats()))
    for time in (START, START + MONTH, START - MONTH):
        table.set_time(time)
    assert combined([table.stats(), table.stats()]).refused_times == 2
    assert "refused times" in str(StatsByTable(t=table.stats()))


def test_times_that_are_just_near_enough() -> None:
    table = timed(max_jump_s=5)
    for time in (0.0, 5.0, 10.0, 5.0, 15.0, 9.9, 20.1):
        table.set_time(START + time)
    assert table.stats().refused_times == 2
    assert Expiry(seconds=60).max_jump_microseconds == 30_000_000
    assert Expiry(seconds=1e-6).max_jump_microseconds == 1
    assert Expiry(5).max_jump_microseconds == 0


def test_the_latest_possible_times() -> None:
    table = timed(seconds=1, max_jump_s=2.0**41)
    end = 2.0**42 - 1
    for _ in range(12):
        for time in (0.0, end / 2, end):
            table.set_time(time)
        for _ in range(10):
            table.set_time(0.0)
        table.lookup(NONE, train=True)
    assert (table.state().times or ())[1] == 2**63 - 1


def test_bad_bounds() -> None:
    assert (
        repr(Expiry(seconds=3.5, max_jump_s=1)) == "Expiry(seconds=3.5, max_jump_s=1)"
    )
    for wrong in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"Expiry\.max_jump_s must be"):
            Expiry(seconds=1.0, max_jump_s=wrong)
    for kind in (True, "60"):
        with pytest.raises(TypeError, match=r"Expiry\.max_jump_s must be a number"):
            Expiry(seconds=1.0, max_jump_s=kind)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Expiry\.max_jump_s needs seconds"):
        Expiry(steps=5, max_jump_s=10.0)
