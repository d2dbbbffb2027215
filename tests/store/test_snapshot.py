"""A snapshot has the rows as they were when it was taken.

Marks record which rows are changed and removed later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchrec_recstore import SGD, Adam, RowWiseAdagrad
from torchrec_recstore.kernels import PooledGroup
from torchrec_recstore.optim import Optimizer
from torchrec_recstore.store import Part, Snapshot, Table

Rows = tuple[Tensor, dict[str, Tensor]]


def rows_of(table: Table) -> Rows:
    return table.ids(), table.read_rows(table.ids())


def read_all(snapshot: Snapshot, size: int = 7, polite: bool = False) -> Rows:
    parts = [snapshot.read(0)]
    while len(snapshot):
        parts.append(snapshot.read(min(size, len(snapshot)), polite=polite))
    whole = Part.concatenated(parts)
    return whole.ids, whole.rows


def same(one: Rows, other: Rows) -> bool:
    return torch.equal(one[0], other[0]) and all(
        torch.equal(one[1][key], other[1][key]) for key in one[1] | other[1]
    )


def trained(
    optimizer: Optimizer, ids: Tensor, dtype: torch.dtype = torch.float32
) -> Table:
    table = Table(4, dtype, optimizer)
    table.lookup(ids, train=True)
    table.update(ids, torch.randn(len(ids), 4))
    return table


CHANGES: dict[str, Callable[[Table], object]] = {
    "update": lambda t: t.update(torch.arange(0, 300, 3), torch.ones(100, 4)),
    "insert": lambda t: t.insert(torch.arange(150, 250), torch.ones(100, 4)),
    "write_rows": lambda t: t.write_rows(
        torch.arange(50), t.read_rows(torch.arange(50, 100))
    ),
    "remove": lambda t: t.remove(torch.arange(0, 200, 2)),
    "remove all": lambda t: t.remove(t.ids()),
    "new rows": lambda t: t.lookup(torch.arange(1000, 60_000), train=True),
    "remove and come back": lambda t: (
        t.remove(torch.arange(99)),
        t.lookup(torch.arange(99), train=True),
    ),
}


@pytest.mark.parametrize(
    ("number", "optimizer"),
    enumerate([SGD(0.1), RowWiseAdagrad(0.1), Adam(0.1)]),
    ids=["SGD", "RowWiseAdagrad", "Adam"],
)
@pytest.mark.parametrize("change", CHANGES)
def test_changes_do_not_show_in_a_snapshot(
    change: str, number: int, optimizer: Optimizer
) -> None:
    """Each change, each optimizer and each row type occurs with each other one."""
    dtypes = [torch.float32, torch.bfloat16, torch.int8]
    dtype = dtypes[(number + list(CHANGES).index(change)) % 3]
    table = trained(optimizer, torch.arange(-100, 200), dtype)
    before = rows_of(table)
    with table.snapshot() as snapshot:
        first = snapshot.read(70)
        CHANGES[change](table)
        rest = read_all(snapshot)
    whole = Part.concatenated([first, Part(rest[0], table.columns, rest[1])])
    assert same((whole.ids, whole.rows), before)
    assert same(read_all(table.snapshot()), rows_of(table))


def test_a_training_lookup_is_a_change_and_an_evaluation_is_none() -> None:
    table = Table(2)
    table.lookup(torch.arange(10), train=True)
    for ids, train, changed in (
        ([3, 1, 3, 99], True, [1, 3, 99]),
        ([4, 5, 98], False, []),
        ([], True, []),
    ):
        mark = table.mark()
        table.lookup(torch.tensor(ids, dtype=torch.int64), train=train)
        with table.snapshot(mark) as snapshot:
            assert read_all(snapshot)[0].tolist() == changed


def test_a_forward_that_is_pending_when_it_begins_changes_nothing_in_it() -> None:
    table = trained(RowWiseAdagrad(0.1), torch.arange(300))
    group = PooledGroup([table], [0], "sum")
    out = group(torch.arange(100, 400), torch.arange(301), train=True)
    before = rows_of(table)
    with table.snapshot() as snapshot:
        out.sum().backward()
        assert same(read_all(snapshot), before)
    assert not same(rows_of(table), before)


def test_it_is_of_one_moment_while_another_thread_trains() -> None:
    # Every update adds the same value to all rows, so that a row of another time would
    # differ from the others.
    table = Table(8, optimizer=SGD(1.0))
    ids = torch.randperm(50_000) - 25_000
    table.insert(ids, torch.zeros(len(ids), 8))
    stop = threading.Event()
    steps = 0

    def train() -> None:
        nonlocal steps
        while not stop.is_set():
            table.update(ids, -torch.ones(len(ids), 8))
            new = torch.arange(len(ids)) + 10**6 + steps * len(ids)
            table.insert(new[:500], torch.full((500, 8), -1.0))
            table.remove(new[:400])
            steps += 1

    thread = threading.Thread(target=train)
    thread.start()
    try:
        for _ in range(5):
            begun = steps
            with table.snapshot() as snapshot:
                old = [read_all(snapshot, 5000, polite=True)]
            assert torch.equal(old[0][0][old[0][0] < 10**6], ids.sort().values)
            weights = old[0][1]["weight"]
            assert (weights[old[0][0] < 10**6] == weights[0, 0]).all()
            assert steps >= begun
    finally:
        stop.set()
        thread.join()
    assert steps > 3


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["touch", "remove", "insert", "mark", "locate"]),
            st.lists(st.integers(0, 40)),
        ),
        max_size=40,
    )
)
@settings(max_examples=150, deadline=None)
def test_marks_against_a_model(script: list[tuple[str, list[int]]]) -> None:
    table = Table(2, optimizer=SGD(1.0))
    # Few of the rows change.
    table.insert(torch.arange(1000, 2000), torch.ones(1000, 2))
    present: set[int] = set()
    marks: list[tuple[int, set[int], set[int]]] = [(table.mark(), set(), set())]
    for action, numbers in script:
        ids = torch.tensor(numbers, dtype=torch.int64)
        if action == "mark":
            marks.append((table.mark(), set(), set()))
        elif action == "locate":
            table.locate_rows()
        elif action == "remove":
            table.remove(ids)
            for _, changed, left in marks:
                left |= present & set(numbers)
                changed -= set(numbers)
            present -= set(numbers)
        else:
            if action == "touch":
                table.update(ids, torch.ones(len(ids), 2))
            else:
                table.insert(ids, torch.ones(len(ids), 2))
            present |= set(numbers)
            for _, changed, _ in marks:
                changed |= set(numbers)
    for mark, changed, left in marks:
        with table.snapshot(mark) as snapshot:
            ids, rows = read_all(snapshot, 3)
            gone = snapshot.left
        assert ids.tolist() == sorted(changed)
        assert same((ids, rows), (ids, table.read_rows(ids)))
        assert gone is not None
        assert gone.tolist() == sorted(left - present)


def test_old_marks_are_forgotten_and_recent_ones_are_not() -> None:
    table = Table(2, optimizer=SGD(1.0))
    table.insert(torch.arange(10), torch.zeros(10, 2))
    marks = []
    for i in range(600):
        marks.append(table.mark())
        table.update(torch.tensor([i % 10]), torch.ones(1, 2))
    with pytest.raises(
        ValueError, match="the changes since this mark are no longer known"
    ):
        table.snapshot(marks[0])
    with pytest.raises(
        ValueError, match="the changes since this mark are no longer known"
    ):
        table.snapshot(marks[-1] + 1)
    for back in (1, 5, 127):
        with table.snapshot(marks[-back]) as snapshot:
            assert read_all(snapshot)[0].tolist() == sorted(
                {(600 - k) % 10 for k in range(1, back + 1)}
            )


def test_ids_that_left_are_not_listed_where_more_left_than_stay() -> None:
    table = Table(1, optimizer=SGD(1.0))
    table.insert(torch.arange(200_000), torch.zeros(200_000, 1))
    mark = table.mark()
    table.remove(torch.arange(90_000))
    with table.snapshot(mark) as snapshot:
        left = snapshot.left
    assert left is not None
    assert len(left) == 90_000
    table.remove(torch.arange(90_000, 190_000))
    with table.snapshot(mark) as snapshot:
        assert snapshot.left is None
    table.remove(torch.tensor([195_000]))
    with table.snapshot(snapshot.mark) as later:
        assert later.left is not None
        assert later.left.tolist() == [195_000]


def test_one_snapshot_at_a_time() -> None:
    table = trained(SGD(0.1), torch.arange(10))
    with table.snapshot() as snapshot:
        with pytest.raises(ValueError, match="being saved already"):
            table.snapshot()
        with pytest.raises(ValueError, match="10 rows left"):
            snapshot.read(11)
        with pytest.raises(ValueError, match="is being saved"):
            table.exchange_rows(Table(4, optimizer=SGD(0.1)))
    with pytest.raises(ValueError, match="handle"):
        snapshot.read(1)
    table.snapshot().close()


def test_exchanged_rows_come_with_their_clocks() -> None:
    table, other = (
        trained(Adam(0.1), torch.arange(100)),
        trained(Adam(0.1), torch.arange(50, 60)),
    )
    other.set_state(replace(other.state(), steps=77))
    rows, others = rows_of(table), rows_of(other)
    table.exchange_rows(other)
    assert same(rows_of(table), others)
    assert same(rows_of(other), rows)
    assert (table.steps, other.steps) == (77, 1)
    for stranger in (
        Table(4, optimizer=SGD(0.1)),
        Table(5, optimizer=Adam(0.1)),
        Table(4, torch.float16, Adam(0.1)),
    ):
        with pytest.raises(ValueError, match="different shapes"):
            table.exchange_rows(stranger)
    with pytest.raises(ValueError, match="itself"):
        table.exchange_rows(table)


def test_one_changed_row_of_a_wide_table_is_kept() -> None:
    table = Table(1 << 20, optimizer=SGD(1.0))
    table.insert(torch.arange(2), torch.zeros(2, 1 << 20))
    with table.snapshot() as snapshot:
        table.update(torch.tensor([1]), torch.ones(1, 1 << 20))
        assert float(read_all(snapshot)[1]["weight"].abs().max()) == 0.0


def test_marks_do_not_outlive_an_exchange() -> None:
    table, other = (
        trained(SGD(0.1), torch.arange(100)),
        trained(SGD(0.1), torch.arange(5)),
    )
    marks = [table.mark(), other.mark(), other.mark()]
    table.exchange_rows(other)
    for each in (table, other):
        # changes are recorded, although all marks are forgotten
        each.update(torch.arange(200), torch.ones(200, 4))
    for mark in marks:
        with pytest.raises(ValueError, match="no longer known"):
            table.snapshot(mark)
    with table.snapshot(table.mark()) as snapshot:
        assert len(snapshot) == 0
    table.update(torch.tensor([3]), torch.ones(1, 4))
    with table.snapshot(snapshot.mark) as changed:
        assert read_all(changed)[0].tolist() == [3]


def test_a_backward_after_an_exchange_updates_nothing() -> None:
    table, other = (
        trained(SGD(1.0), torch.arange(100)),
        trained(SGD(1.0), torch.arange(5)),
    )
    weights = torch.ones(150, requires_grad=True)
    out = PooledGroup([table], [0], "sum")(
        torch.arange(150), torch.arange(151), weights, train=True
    )
    expected = rows_of(other)
    table.exchange_rows(other)
    steps = table.optimizer_steps
    out.sum().backward()
    assert same(rows_of(table), expected)
    assert table.optimizer_steps == steps
    assert weights.grad is not None
    assert table.stats().hits >= 0
    table.update(torch.arange(5), torch.ones(5, 4))
    assert not same(rows_of(table), expected)
