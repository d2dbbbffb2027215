"""Eviction by the user's scores, and by occurrences: the options, the calls, cold
stores, copies and snapshots.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.encoding import decode, encode
from torchrec_recstore.kernels import PooledGroup, SequenceGroup
from torchrec_recstore.optim import SGD
from torchrec_recstore.options import (
    LFU,
    LRU,
    MAX_SCORE,
    Scored,
    SSDStore,
    TableOptions,
)
from torchrec_recstore.store import ColdStoreError, Table
from torchrec_recstore.store.cold_tier import ColdTier
from torchrec_recstore.table_fields import encoded_score

from .dict_store import DictStore, DictStoreOptions

TEN = torch.arange(10)


def scored(max_rows: int = 10, default: float = math.inf, **options: Any) -> Table:
    bounds = TableOptions(max_rows=max_rows, eviction=Scored(default), **options)
    return Table(4, optimizer=SGD(lr=0.5), options=bounds, name="scored")


def floats(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def codes(table: Table, ids: Tensor) -> list[int]:
    frequencies: list[int] = table.read_rows(ids)["frequency"].tolist()
    return frequencies


def test_the_lowest_scores_leave_and_new_rows_stay() -> None:
    table = scored()
    table.lookup(TEN, train=True)
    scores = floats(5, -3, 0, 2, -math.pi, 1e-30, 7, -0.0, 1e30, -1e30)
    assert table.set_scores(TEN, scores) == 10
    order = [9, 4, 1, 2, 7, 5, 3, 0, 6, 8]
    for number in range(3):
        # a new row has no score, so that it is not the lowest
        table.lookup(torch.tensor([100 + number]), train=True)
        assert table.ids().tolist() == sorted(
            [*order[number + 1 :], *range(100, 101 + number)]
        )
    # 2 and 7 have the same score, 0 and -0: the one that was used last stays.
    table.lookup(torch.tensor([2]), train=True)
    table.lookup(torch.tensor([103]), train=True)
    assert not table.contains(torch.tensor([7]))
    assert table.contains(torch.tensor([2]))
    table.set_scores(torch.tensor([101]), floats(-100))
    table.lookup(torch.tensor([104]), train=True)
    assert not table.contains(torch.tensor([101]))


def test_rows_without_scores_leave_last_in_the_order_of_their_use() -> None:
    table = scored(3)
    for number in range(6):
        table.lookup(torch.tensor([number]), train=True)
    assert table.ids().tolist() == [3, 4, 5]
    table.set_scores(torch.tensor([5]), floats(1e9))
    table.lookup(torch.tensor([6]), train=True)
    assert table.ids().tolist() == [3, 4, 6]


def test_the_default_score_of_new_rows() -> None:
    table = scored(3, default=0.5)
    table.lookup(TEN[:3], train=True)
    table.set_scores(TEN[:2], floats(0.75, 0.25))
    table.lookup(torch.tensor([3]), train=True)
    assert table.ids().tolist() == [0, 2, 3]
    table.lookup(torch.tensor([4]), train=True)
    assert table.ids().tolist() == [0, 3, 4]


def test_what_a_call_of_set_scores_does() -> None:
    table = scored()
    table.lookup(TEN[:5], train=True)
    before = table.read_rows(TEN[:5])
    assert table.set_scores(torch.tensor([3, 99, 3, 1, -7]), floats(1, 2, 3, 4, 5)) == 2
    after = table.read_rows(TEN[:5])
    assert after["frequency"].tolist() == [
        0,
        encoded_score(4),
        0,
        encoded_score(3),
        0,
    ]
    assert all(
        torch.equal(after[key], before[key]) for key in before if key != "frequency"
    )
    table.lookup(torch.tensor([99]), train=True)
    assert codes(table, torch.tensor([99])) == [0], (
        "a score for an id without a row is not kept"
    )
    assert table.set_scores(TEN[:0], floats()) == 0
    strided = torch.arange(20)[::4]
    assert table.set_scores(strided, torch.arange(10, dtype=torch.float32)[::2]) == 2
    assert codes(table, TEN[[0, 4]]) == [encoded_score(0), encoded_score(2)]
    table.lookup(TEN[:5], train=True)
    table.update(TEN[:5], torch.ones(5, 4))
    assert codes(table, TEN[[0, 4]]) == [
        encoded_score(0),
        encoded_score(2),
    ], "steps change no score"


@pytest.mark.parametrize(
    ("ids", "scores", "kind", "message"),
    [
        (TEN.int(), floats(*range(10)), TypeError, "ids must be an int64 tensor"),
        (TEN, TEN, TypeError, "scores must be a float32 tensor, got"),
        (TEN, TEN.double(), TypeError, "scores must be a float32 tensor, got"),
        (
            TEN,
            floats(1),
            ValueError,
            r"scores must have the shape of ids, \(10,\), got \(1,\)",
        ),
        (TEN[:2], floats(1, math.nan), ValueError, "scores must be finite, got nan"),
        (TEN[:2], floats(1, math.inf), ValueError, "scores must be finite, got inf"),
    ],
)
def test_wrong_scores_are_refused(
    ids: Tensor, scores: Tensor, kind: type[Exception], message: str
) -> None:
    table = scored()
    table.lookup(TEN, train=True)
    with pytest.raises(kind, match=message):
        table.set_scores(ids, scores)
    assert codes(table, TEN) == [0] * 10
    plain = Table(4, options=TableOptions(max_rows=10, eviction=LRU()), name="plain")
    with pytest.raises(
        ValueError,
        match=r"table 'plain' does not evict by scores: its eviction is LRU\(\)",
    ):
        plain.set_scores(TEN, torch.ones(10))


@settings(deadline=None, max_examples=50)
@given(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(width=32, allow_nan=False),
)
def test_encoded_scores_ascend(one: float, other: float) -> None:
    """The Python code and the native code encode a score as the same number."""
    assert (encoded_score(one) < encoded_score(other)) == (one < other)
    table = scored(1)
    table.lookup(TEN[:1], train=True)
    table.set_scores(TEN[:1], floats(one))
    assert codes(table, TEN[:1]) == [encoded_score(one)]


def test_options_and_their_copies() -> None:
    for eviction in (
        Scored(),
        Scored(-1.5),
        Scored(MAX_SCORE),
        LFU(count="occurrences"),
        LFU(3, "occurrences"),
        LFU(),
    ):
        options = TableOptions(max_rows=3, eviction=eviction)
        assert decode(encode(options, {}), {}) == options
        assert hash(options) == hash(TableOptions(max_rows=3, eviction=eviction))
    assert repr(LFU()) == "LFU()"
    assert repr(LFU(3, "occurrences")) == "LFU(half_life_steps=3, count='occurrences')"
    assert (repr(Scored()), repr(Scored(0.5))) == ("Scored()", "Scored(default=0.5)")
    assert "count" not in encode(LFU(), {}), "earlier versions can read it"
    for wrong in (math.nan, -math.inf, 1e39, -1e39):
        with pytest.raises(
            ValueError,
            match=r"Scored\.default must be a float32 number or infinity, got",
        ):
            Scored(wrong)
    for kind in ("0.5", True, None):
        with pytest.raises(TypeError, match=r"Scored\.default must be a number"):
            Scored(kind)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"LFU\.count must be 'steps' or 'occurrences', got 'rows'"
    ):
        LFU(count="rows")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"TableOptions\.eviction needs max_rows"):
        TableOptions(eviction=Scored())
    with pytest.raises(
        ValueError, match=r"eviction=Scored\(\) cannot be used with a shared cold store"
    ):
        TableOptions(
            max_rows=3, eviction=Scored(), cold_store=SSDStore("/tmp/x", shared="rows")
        )


class ScoredOracle:
    """The scores and last steps of all rows, in memory or not."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[float | None, int]] = {}
        self.step = 0

    def lookup(self, ids: list[int]) -> None:
        self.step += 1
        for id_ in ids:
            self.rows[id_] = (self.rows.get(id_, (None, 0))[0], self.step)

    def set_scores(self, ids: list[int], scores: list[float]) -> int:
        for id_, score in zip(ids, scores, strict=True):
            if id_ in self.rows:
                self.rows[id_] = (score, self.rows[id_][1])
        return len(set(ids) & self.rows.keys())

    def check(self, table: Table) -> None:
        ids = table.ids()
        assert ids.tolist() == sorted(self.rows)
        rows = table.read_rows(ids)
        expected = [self.rows[id_] for id_ in ids.tolist()]
        assert rows["last_step"].tolist() == [step for _, step in expected]
        assert rows["frequency"].tolist() == [
            0 if score is None else encoded_score(score) for score, _ in expected
        ]


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_scores_of_cold_rows(data: st.DataObject) -> None:
    """No row is lost, cold rows keep their scores and get new ones, and a delta has the
    rows whose scores changed.
    """
    table = scored(12, cold_store=DictStoreOptions())
    oracle = ScoredOracle()
    some_ids = st.lists(st.integers(0, 40), max_size=10)
    mark = table.mark()
    changed: set[int] = set()
    for _ in range(data.draw(st.integers(1, 12))):
        ids = data.draw(some_ids)
        what = data.draw(st.sampled_from(["lookup", "score", "remove", "delta"]))
        if what == "lookup":
            table.lookup(torch.tensor(ids, dtype=torch.int64), train=True)
            oracle.lookup(ids)
            changed |= set(ids)
        elif what == "score":
            scores = data.draw(
                st.lists(
                    st.floats(-4, 4, width=16), min_size=len(ids), max_size=len(ids)
                )
            )
            number = table.set_scores(
                torch.tensor(ids, dtype=torch.int64), floats(*scores)
            )
            assert number == oracle.set_scores(ids, scores)
            changed |= set(ids) & oracle.rows.keys()
        elif what == "remove":
            table.remove(torch.tensor(ids, dtype=torch.int64))
            for id_ in ids:
                oracle.rows.pop(id_, None)
            changed -= set(ids)
        else:
            with table.snapshot(since=mark) as delta:
                mark = delta.mark
                part = delta.read(len(delta))
            assert set(part.ids.tolist()) == changed
            expected = [oracle.rows[id_][0] for id_ in part.ids.tolist()]
            assert part.rows["frequency"].tolist() == [
                0 if x is None else encoded_score(x) for x in expected
            ]
            changed = set()
        oracle.check(table)
        assert table.stats().rows <= 12


def test_cold_rows_stay_cold_and_failures_can_be_repeated() -> None:
    table = scored(cold_store=DictStoreOptions())
    table.lookup(TEN, train=True)
    table.lookup(TEN + 10, train=True)
    before = table.stats()
    assert before.cold_rows == 10
    DictStore.failing = True
    try:
        with pytest.raises(ColdStoreError):
            table.set_scores(torch.arange(20), torch.arange(20).float())
    finally:
        DictStore.failing = False
    assert table.set_scores(torch.arange(20), torch.arange(20).float()) == 20
    after = table.stats()
    assert (after.rows, after.cold_rows, after.evicted) == (
        before.rows,
        before.cold_rows,
        before.evicted,
    )
    assert codes(table, torch.arange(20)) == [
        encoded_score(float(i)) for i in range(20)
    ]
    table.lookup(torch.tensor([3]), train=True)
    assert isinstance(table.tier, ColdTier)
    assert set(ops.table_ids(table.handle).tolist()) == {
        3,
        *range(11, 20),
    }, "10 had the lowest score in memory"


def test_scores_are_copied_with_the_rows(tmp_path: Path) -> None:
    table = scored(20)
    table.lookup(TEN, train=True)
    table.set_scores(TEN[:5], torch.arange(5).float())
    copy = table.empty_copy()
    for part in table.parts():
        copy.write(part)
    assert codes(copy, TEN) == codes(table, TEN)
    with table.snapshot() as snapshot:
        table.set_scores(TEN, torch.full((10,), 9.0))
        assert snapshot.read(10).rows["frequency"].tolist() == codes(copy, TEN)
    table.exchange_rows(copy)
    assert codes(copy, TEN) == [encoded_score(9.0)] * 10


@pytest.mark.parametrize("threads", [1, 3])
def test_occurrences_of_all_features_count_whatever_ends_the_step(threads: int) -> None:
    """The features of a table, a lookup of the table itself, and sequences count the
    same, on any number of threads.
    """
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(1)
    ids = (torch.rand(6000, generator=generator) ** 4 * 50).long()
    expected = torch.bincount(ids, minlength=50)
    with_row = expected.nonzero().squeeze(1)
    options = TableOptions(max_rows=100, eviction=LFU(count="occurrences"))

    def frequencies(table: Table) -> list[int]:
        counted: list[int] = table.read_rows(with_row)["frequency"].tolist()
        return counted

    of_step = Table(4, options=options)
    of_step.lookup(ids, train=True)
    tables = [of_step]
    for features in (1, 2, 3):
        for ends in ("backward", "freed"):
            table = Table(4, options=options)
            group = PooledGroup([table], [0] * features, "sum")
            out = group(
                ids,
                torch.arange(0, 6001, 4 // features if features < 3 else 1),
                train=True,
            )
            if ends == "backward":
                out.backward(torch.ones_like(out))
            del out
            tables.append(table)
    sequence = Table(4, options=options)
    out = SequenceGroup([sequence])(ids, [6000], train=True)
    out.backward(torch.ones_like(out))
    tables.append(sequence)
    for table in tables:
        assert frequencies(table) == expected[with_row].tolist()
        table.lookup(ids)  # an evaluation counts nothing
        assert frequencies(table) == expected[with_row].tolist()


def test_by_steps_nothing_has_changed() -> None:
    table = Table(4, options=TableOptions(max_rows=9, eviction=LFU()))
    for _ in range(3):
        table.lookup(torch.tensor([5, 5, 5, 6]), train=True)
    assert table.read_rows(torch.tensor([5, 6]))["frequency"].tolist() == [3, 3]
