"""A table never holds more than max_rows rows: refused calls, evicted rows, and the
rows of pending forwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from torchrec_recstore.kernels import PooledGroup, SequenceGroup
from torchrec_recstore.optim import SGD, RowWiseAdagrad
from torchrec_recstore.options import (
    LFU,
    LRU,
    Expiry,
    MinFrequency,
    TableOptions,
    UniformInit,
)
from torchrec_recstore.store import Table

from .policies import Model, zipf_steps

MAX_ROWS = 64
TEN = torch.arange(10)


def state_of(table: Table) -> tuple[Any, ...]:
    """Returns everything that a call may change."""
    rows = table.read_rows(table.ids())
    return (
        table.ids().tolist(),
        {name: value.tolist() for name, value in rows.items()},
        table.stats(),
    )


def grads(ids: Tensor, columns: int = 4) -> Tensor:
    return torch.ones(len(ids), columns)


def write(table: Table, ids: Tensor) -> None:
    rows = Table(4).read_rows(torch.empty(0, dtype=torch.int64))
    one = {
        name: torch.zeros((len(ids), *value.shape[1:]), dtype=value.dtype)
        for name, value in rows.items()
    }
    table.write_rows(ids, one)


GROWING: dict[str, Callable[[Table, Tensor], object]] = {
    "lookup": lambda table, ids: table.lookup(ids, train=True),
    "update": lambda table, ids: table.update(ids, grads(ids)),
    "insert": lambda table, ids: table.insert(ids, grads(ids)),
    "write_rows": write,
    "pooled": lambda table, ids: PooledGroup([table], [0], "sum")(
        ids, torch.tensor([0, len(ids)]), train=True
    ),
    "sequence": lambda table, ids: SequenceGroup([table])(ids, [len(ids)], train=True),
}


@pytest.mark.parametrize("call", GROWING)
def test_without_eviction_a_table_refuses_to_grow(call: str) -> None:
    table = Table(4, options=TableOptions(max_rows=10), name="small")
    GROWING[call](table, TEN[:7])
    before = state_of(table)
    with pytest.raises(ValueError, match=r"'small' needs 12 rows, max_rows is 10"):
        GROWING[call](table, torch.tensor([3, 100, 101, 102, 103, 104, 104]))
    assert state_of(table) == before
    GROWING[call](table, torch.tensor([3, 100, 101, 102, 3]))
    assert len(table) == 10
    GROWING[call](table, table.ids())
    table.remove(TEN[:2])
    GROWING[call](table, torch.tensor([200, 201]))
    assert len(table) == 10


@pytest.mark.parametrize("eviction", [LRU(), LFU(3)], ids=repr)
@pytest.mark.parametrize("call", GROWING)
def test_a_working_set_that_does_not_fit_changes_nothing(
    call: str, eviction: LRU | LFU
) -> None:
    table = Table(4, options=TableOptions(max_rows=10, eviction=eviction), name="small")
    table.lookup(TEN, train=True)
    before = state_of(table)
    eleven = torch.tensor([1, 2, *range(100, 109), 105, 2])  # 1 and 2 have rows
    with pytest.raises(
        ValueError, match=r"'small' needs 11 rows at once, max_rows is 10"
    ):
        GROWING[call](table, eleven)
    assert state_of(table) == before
    GROWING[call](table, eleven[1:])
    assert set(table.ids().tolist()) == set(eleven[1:].tolist())
    assert table.stats().evicted == 9


@pytest.mark.parametrize("eviction", [LRU(), LFU()], ids=repr)
def test_rows_of_pending_forwards_stay(eviction: LRU | LFU) -> None:
    table = Table(
        4,
        optimizer=SGD(lr=0.5),
        options=TableOptions(max_rows=30, eviction=eviction),
        name="small",
    )
    group = PooledGroup([table], [0], "sum")
    outputs = [
        group(TEN + 10 * i, torch.tensor([0, 4, 10]), train=True) for i in range(2)
    ]
    pinned = table.lookup(torch.arange(20))
    for start in range(100, 200, 10):
        table.lookup(torch.arange(start, start + 10), train=True)
        assert table.contains(torch.arange(20)).all()
    assert (len(table), table.stats().evicted) == (30, 90)

    before = state_of(table)
    needed = r"'small' needs 31 rows at once, max_rows is 30"
    with pytest.raises(ValueError, match=needed):
        table.lookup(torch.arange(200, 211), train=True)
    with pytest.raises(ValueError, match=needed):
        # 3 is pinned anyway
        group(
            torch.tensor([3, 3, *range(200, 211)]), torch.tensor([0, 5, 13]), train=True
        )
    assert state_of(table) == before
    # its graph is freed at once
    group(torch.tensor([3, *range(200, 210)]), torch.tensor([0, 5, 11]), train=True)

    for output in outputs:
        output.sum().backward()
    assert torch.equal(table.lookup(torch.arange(20)), pinned - 0.5)
    # The outputs still exist, but their rows may be evicted.
    table.lookup(torch.arange(300, 330), train=True)
    assert table.ids().tolist() == list(range(300, 330))


def test_a_forward_whose_graph_is_dropped_keeps_nothing() -> None:
    table = Table(4, options=TableOptions(max_rows=10, eviction=LRU()))
    for group in (
        PooledGroup([table], [0], "sum"),
        PooledGroup([table], [0], "sum", accumulation_steps=2),
    ):
        output = group(TEN, torch.tensor([0, 10]), train=True)
        with pytest.raises(ValueError, match="needs 11 rows at once"):
            table.lookup(torch.tensor([50]), train=True)
        del output
        table.lookup(torch.tensor([50]), train=True)


def test_accumulated_forwards_keep_their_rows_until_the_update() -> None:
    table = Table(
        4, optimizer=SGD(lr=1.0), options=TableOptions(max_rows=20, eviction=LRU())
    )
    group = PooledGroup([table], [0], "sum", accumulation_steps=2)
    first = table.lookup(TEN, train=True)
    group(TEN, torch.tensor([0, 10]), train=True).sum().backward()
    table.lookup(torch.arange(100, 110), train=True)
    with pytest.raises(ValueError, match="needs 21 rows at once"):
        table.lookup(torch.arange(200, 211), train=True)
    group(TEN[:5], torch.tensor([0, 5]), train=True).sum().backward()
    twice = torch.cat([torch.full((5, 4), 2.0), torch.ones(5, 4)])
    assert torch.equal(table.lookup(TEN), first - twice)
    table.lookup(torch.arange(200, 220), train=True)
    assert not table.contains(TEN).any()


def test_slots_of_removed_rows_wait_for_pending_forwards() -> None:
    table = Table(
        4, optimizer=SGD(lr=1.0), options=TableOptions(max_rows=10, eviction=LRU())
    )
    group = PooledGroup([table], [0], "sum")
    output = group(TEN[:5], torch.tensor([0, 5]), train=True)
    table.remove(TEN[:5])
    table.lookup(torch.arange(100, 105), train=True)
    fresh = table.lookup(torch.arange(100, 105))
    output.sum().backward()
    assert torch.equal(table.lookup(torch.arange(100, 105)), fresh)
    assert len(table) == 5


def test_rows_that_were_removed_under_a_pending_forward_take_no_room() -> None:
    table = Table(4, options=TableOptions(max_rows=10, eviction=LRU()))
    output = PooledGroup([table], [0], "sum")(TEN[:5], torch.tensor([0, 5]), train=True)
    table.remove(TEN[:5])
    for start in (100, 200):
        table.lookup(torch.arange(start, start + 10), train=True)
    assert table.ids().tolist() == list(range(200, 210))
    output.sum().backward()


def test_backwards_in_any_order_leave_the_last_step() -> None:
    table = Table(4, options=TableOptions(max_rows=10, eviction=LRU()))
    group = PooledGroup([table], [0], "sum")
    outputs = [
        group(TEN[: 3 + i], torch.tensor([0, 3 + i]), train=True) for i in range(3)
    ]
    for output in reversed(outputs):
        output.sum().backward()
    rows = table.read_rows(TEN[:5])
    assert rows["frequency"].tolist() == [3, 3, 3, 2, 1]
    assert rows["last_step"].tolist() == [3] * 5


def test_tables_of_other_bounds_do_not_exchange_rows() -> None:
    table, whole = Table(4, options=TableOptions(max_rows=5, eviction=LRU())), Table(4)
    whole.lookup(TEN, train=True)
    before = state_of(table), state_of(whole)
    with pytest.raises(ValueError, match="table"):
        table.exchange_rows(whole)
    assert (state_of(table), state_of(whole)) == before


def test_a_group_evicts_in_each_table_or_in_none() -> None:
    options = TableOptions(max_rows=10, eviction=LRU())
    tables = [
        Table(4, options=options, name="fits"),
        Table(4, options=replace(options, max_rows=5), name="does_not"),
    ]
    group = PooledGroup(tables, [0, 1, 0], "sum")
    for table in tables:
        table.lookup(TEN[:5], train=True)
    before = [state_of(table) for table in tables]
    ids = torch.cat(
        [torch.arange(100, 105), torch.arange(100, 106), torch.arange(105, 110)]
    )
    with pytest.raises(
        ValueError, match="'does_not' needs 6 rows at once, max_rows is 5"
    ):
        group(ids, torch.tensor([0, 5, 11, 16]), train=True)
    assert [state_of(table) for table in tables] == before
    # The ids of both features of the first table count.
    with pytest.raises(
        ValueError, match="'fits' needs 11 rows at once, max_rows is 10"
    ):
        group(torch.arange(100, 112), torch.tensor([0, 6, 7, 12]), train=True)
    assert [state_of(table) for table in tables] == before
    group(torch.arange(100, 112), torch.tensor([0, 5, 7, 12]), train=True)
    assert [len(table) for table in tables] == [10, 5]
    assert (
        tables[1].ids().tolist() == [2, 3, 4, 105, 106]
        or len(set(tables[1].ids().tolist()) & {105, 106}) == 2
    )


@pytest.mark.parametrize("threads", [1, 2])
def test_a_batch_reads_what_it_would_read_without_a_bound(threads: int) -> None:
    """One call frees slots and reuses them."""
    torch.set_num_threads(threads)
    options = TableOptions(max_rows=3000, eviction=LRU())
    table, whole = Table(16, options=options), Table(16)
    groups = [PooledGroup([each], [0, 0], "mean") for each in (table, whole)]
    for step in range(8):
        ids = torch.randint(
            0, 40_000, (2800,), generator=torch.Generator().manual_seed(step)
        )
        offsets = torch.arange(0, 2801, 2)
        # all rows are initial rows
        assert torch.equal(*(group(ids, offsets, train=True) for group in groups))
        assert len(table) <= 3000
    assert table.stats().evicted > 10_000


def test_evaluation_and_refused_calls_leave_no_trace() -> None:
    options = TableOptions(
        max_rows=20, eviction=LFU(2), expiry=Expiry(5), admission=MinFrequency(2)
    )
    table = Table(4, options=options)
    group = PooledGroup([table], [0], "sum")
    for _ in range(3):
        table.lookup(TEN, train=True)
    before = state_of(table)
    for _ in range(30):
        table.lookup(torch.arange(50))
        group(torch.arange(50), torch.tensor([0, 50]), train=False)
        with torch.no_grad():
            group(torch.arange(50), torch.tensor([0, 50]), train=True)
        SequenceGroup([table])(torch.arange(50), [50], train=False)
        table.contains(torch.arange(50))
    assert state_of(table) == before


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_memory_stays_that_of_max_rows() -> None:
    max_rows, batch = 50_000, 5000
    table, whole = (
        Table(64, options=TableOptions(max_rows=max_rows, eviction=LRU())),
        Table(64),
    )
    whole.lookup(torch.arange(max_rows), train=True)
    stated = []
    for start in range(0, 6 * max_rows, batch):
        table.lookup(torch.arange(start, start + batch), train=True)
        if start == 2 * max_rows:
            before = resident_bytes()
        stated.append(table.stats().bytes)
    assert max(stated) < 1.1 * whole.stats().bytes
    assert resident_bytes() - before < 0.1 * whole.stats().bytes


def test_a_snapshot_is_of_its_moment_whatever_leaves() -> None:
    table = Table(4, options=TableOptions(max_rows=200, eviction=LRU()))
    for start in range(0, 300, 50):
        table.lookup(torch.arange(start, start + 50), train=True)
        table.update(table.ids(), grads(table.ids()))
    ids, rows = table.ids(), table.read_rows(table.ids())
    with table.snapshot() as snapshot:
        for start in range(1000, 2000, 50):
            table.lookup(torch.arange(start, start + 50), train=True)
            assert len(table) <= 200
        part = snapshot.read(len(snapshot))
        found, values = part.ids, part.rows
    assert torch.equal(found, ids)
    for name, value in rows.items():
        assert torch.equal(values[name], value), name


@pytest.mark.parametrize("reason", ["evicted", "expired"])
def test_marks_know_who_has_left(reason: str) -> None:
    options = {
        "evicted": TableOptions(max_rows=200, eviction=LRU()),
        "expired": TableOptions(expiry=Expiry(1)),
    }[reason]
    table = Table(4, options=options)
    table.lookup(torch.arange(200), train=True)
    table.update(TEN, grads(TEN))
    mark = table.mark()
    stay = torch.arange(20, 200)
    for start in (300, 307, 314):
        table.lookup(torch.cat([stay, torch.arange(start, start + 7)]), train=True)
    assert not table.contains(TEN).any()
    table.lookup(torch.cat([stay, TEN[:3]]), train=True)
    with table.snapshot(since=mark) as snapshot:
        part = snapshot.read(len(snapshot))
        ids, rows = part.ids, part.rows
        assert snapshot.left is not None
        left = set(snapshot.left.tolist())
    assert set(TEN[:3].tolist()) <= set(ids.tolist()) <= set(table.ids().tolist())
    assert set(TEN[3:].tolist()) <= left
    assert not left & set(table.ids().tolist())
    for name, value in table.read_rows(ids).items():
        assert torch.equal(rows[name], value), name


LR, DIM = 0.1, 5
EDGES = [0, -1, 2**63 - 1, -(2**63), 2**32]
UNIVERSE = [*EDGES, *range(100, 190)]
SMALL = 40


def many_ids(seed: int, n: int) -> list[int]:
    return [
        UNIVERSE[i] for i in np.random.default_rng(seed).integers(0, len(UNIVERSE), n)
    ]


ids_strategy = st.one_of(
    st.lists(st.sampled_from(UNIVERSE), max_size=10),
    st.builds(many_ids, st.integers(0, 2**32), st.integers(0, 120)),
)


class BoundedMachine(RuleBasedStateMachine):
    happened: ClassVar[Counter[str]] = Counter()

    @initialize(
        eviction=st.sampled_from([LRU(), LFU(), LFU(2)]),
        admission=st.sampled_from(
            [None, MinFrequency(2, 2**16), MinFrequency(3, 2**16)]
        ),
        expiry=st.sampled_from([None, Expiry(1), Expiry(4)]),
        missing=st.sampled_from(["zeros", "init"]),
    )
    def make(self, eviction: Any, admission: Any, expiry: Any, missing: Any) -> None:
        init = UniformInit(-1.0, 1.0)
        self.options = TableOptions(
            init,
            seed=3,
            max_rows=SMALL,
            eviction=eviction,
            admission=admission,
            expiry=expiry,
            missing=missing,
        )
        self.table = Table(DIM, optimizer=SGD(LR), options=self.options)
        self.group = PooledGroup([self.table], [0], "sum")
        self.model = Model(
            self.options,
            Table(DIM, options=TableOptions(init, seed=3, missing="init")),
            UNIVERSE,
        )

    def refused(self, needed: list[int], call: Callable[[], object]) -> bool:
        """Returns whether too many ids need a row.

        If so, the call must fail and change nothing.
        """
        if self.model.fits(needed):
            return False
        before = state_of(self.table)
        with pytest.raises(
            ValueError, match=f"needs {len(needed)} rows at once, max_rows is {SMALL}"
        ):
            call()
        assert state_of(self.table) == before
        self.happened["working set"] += 1
        return True

    def let_expire(self) -> None:
        """Removes the rows that the table has let expire, after a check that they are
        old enough.
        """
        if self.options.expiry is None:
            return
        steps = self.options.expiry.steps
        gone = [
            id_
            for id_ in self.model.weights
            if not self.table.contains(torch.tensor([id_])).item()
        ]
        ages = (
            self.table.steps
            - self.model.policy.bookkeeping(np.array(gone, dtype=np.int64))[0]
        )
        assert (ages > steps).all()
        self.model.remove(gone)
        left = self.model.policy.bookkeeping(self.model.policy.ids())[0]
        assert (self.table.steps - left <= steps + steps // 2).all()

    @rule(
        ids=ids_strategy,
        seed=st.integers(0, 1000),
        backward=st.booleans(),
        pooled=st.booleans(),
    )
    def step(self, ids: list[int], seed: int, backward: bool, pooled: bool) -> None:
        given = torch.tensor(ids, dtype=torch.int64)
        needed = self.model.admitted(sorted(set(ids)), sighting=True)
        offsets = torch.arange(len(ids) + 1)
        call = (
            (lambda: self.group(given, offsets, train=True))
            if pooled
            else (lambda: self.table.lookup(given, train=True))
        )
        if self.refused(needed, call):
            return
        out = call()
        expected = self.model.lookup(ids)
        assert all(
            torch.equal(row, other) for row, other in zip(out, expected, strict=True)
        )
        grads = torch.randn(
            len(ids), DIM, generator=torch.Generator().manual_seed(seed)
        )
        if pooled and backward:
            out.backward(grads)
            self.model.update(ids, grads, LR)
        del out
        self.let_expire()

    @rule(ids=st.lists(st.sampled_from(UNIVERSE), max_size=3), steps=st.integers(1, 5))
    def time_passes(self, ids: list[int], steps: int) -> None:
        for _ in range(steps):
            self.table.lookup(torch.tensor(ids, dtype=torch.int64), train=True)
            self.model.lookup(ids)
            self.let_expire()

    @rule(ids=ids_strategy, seed=st.integers(0, 1000))
    def update(self, ids: list[int], seed: int) -> None:
        given = torch.tensor(ids, dtype=torch.int64)
        grads = torch.randn(
            len(ids), DIM, generator=torch.Generator().manual_seed(seed)
        )
        needed = self.model.admitted(sorted(set(ids)), sighting=False)
        if not self.refused(needed, lambda: self.table.update(given, grads)):
            self.table.update(given, grads)
            self.model.write(needed)
            self.model.update(ids, grads, LR)

    @rule(ids=ids_strategy, seed=st.integers(0, 1000))
    def insert(self, ids: list[int], seed: int) -> None:
        given = torch.tensor(ids, dtype=torch.int64)
        weights = torch.randn(
            len(ids), DIM, generator=torch.Generator().manual_seed(seed)
        )
        if not self.refused(
            sorted(set(ids)), lambda: self.table.insert(given, weights)
        ):
            self.table.insert(given, weights)
            self.model.write(ids)
            self.model.weights.update(zip(ids, weights, strict=True))

    @rule(ids=ids_strategy)
    def remove(self, ids: list[int]) -> None:
        assert self.table.remove(torch.tensor(ids, dtype=torch.int64)) == len(
            set(ids) & set(self.model.weights)
        )
        self.model.remove(ids)

    @rule(ids=ids_strategy)
    def evaluate(self, ids: list[int]) -> None:
        given = torch.tensor(ids, dtype=torch.int64)
        before = self.table.stats()
        for id_, row in zip(ids, self.table.lookup(given), strict=True):
            absent = (
                self.model.initial_row(id_)
                if self.options.missing == "init"
                else torch.zeros(DIM)
            )
            assert torch.equal(row, self.model.weights.get(id_, absent))
        assert self.table.stats() == before

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "table"):
            return
        ids = self.table.ids()
        assert len(ids) <= SMALL
        assert ids.tolist() == sorted(self.model.weights)
        rows = self.table.read_rows(ids)
        for id_, row in zip(ids.tolist(), rows["weight"], strict=True):
            assert torch.equal(row, self.model.weights[id_])
        last_step, frequency = self.model.policy.bookkeeping(ids.numpy())
        assert rows["last_step"].tolist() == last_step.tolist()
        assert rows["frequency"].tolist() == frequency.tolist()
        stats, model = self.table.stats(), self.model
        assert (stats.rows, stats.lookups, stats.hits) == (
            len(ids),
            model.lookups,
            model.hits,
        )
        assert (stats.misses, stats.refused) == (
            model.lookups - model.hits,
            model.refused,
        )
        assert (stats.inserts, stats.evicted) == (model.inserts, model.policy.evicted)
        assert stats.steps == model.policy.steps

    def teardown(self) -> None:
        stats = self.table.stats()
        self.happened.update(
            evicted=stats.evicted,
            refused=stats.refused,
            expired=stats.expired,
            hits=stats.hits,
        )


def test_any_calls_against_the_model() -> None:
    machine = BoundedMachine.TestCase
    machine.settings = settings(
        max_examples=40, stateful_step_count=25, deadline=None, derandomize=True
    )
    machine("runTest").runTest()
    happened = BoundedMachine.happened
    assert all(
        happened[kind] >= 10
        for kind in ("evicted", "refused", "expired", "hits", "working set")
    ), happened


@pytest.mark.parametrize("optimizer", [SGD(0.1), RowWiseAdagrad(0.1)], ids=repr)
def test_training_through_groups_replays(optimizer: Any) -> None:
    """A bounded table trains as an unbounded table from which the same rows are removed
    at the same time.
    """
    options = TableOptions(max_rows=MAX_ROWS, eviction=LRU())
    table, whole = (
        Table(8, optimizer=optimizer, options=options),
        Table(8, optimizer=optimizer),
    )
    groups = [PooledGroup([each], [0], "sum") for each in (table, whole)]
    for number, ids in enumerate(zipf_steps(1.0, 1000, steps=60, batch=40)):
        outputs = [groups[0](ids, torch.arange(0, 41, 4), train=True)]
        whole.remove(whole.ids()[~torch.isin(whole.ids(), table.ids())])
        outputs.append(groups[1](ids, torch.arange(0, 41, 4), train=True))
        assert torch.equal(*outputs), number
        for out in outputs:
            out.square().sum().backward()
    ids = table.ids()
    assert torch.equal(ids, whole.ids())
    for name, value in table.read_rows(ids).items():
        assert torch.equal(value, whole.read_rows(ids)[name]), name
    assert table.stats().evicted > 500
