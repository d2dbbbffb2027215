"""Which rows leave: against the store's own rule id for id, against the exact policies
by their hit rates.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from torchrec_recstore.kernels import PooledGroup
from torchrec_recstore.optim import Adam, Optimizer, RowWiseAdagrad, state_names
from torchrec_recstore.options import LFU, LRU, Expiry, Scored, TableOptions
from torchrec_recstore.store import Table

from .policies import Residents, fmix64, universe_of, zipf_steps

OCCURRENCES = [LFU(count="occurrences"), LFU(half_life_steps=7, count="occurrences")]
POLICIES = [LRU(), LFU(), LFU(half_life_steps=7), LFU(half_life_steps=1), *OCCURRENCES]
HALVED = [LFU(half_life_steps=40), LFU(half_life_steps=40, count="occurrences")]
SCORED = [Scored(), Scored(default=0.5)]
ROOT = Path(__file__).parents[2]
SAMPLE = ROOT.parent / "shared" / "criteo" / "criteo_kaggle_sample.tsv.gz"


def bounded(
    max_rows: int, eviction: LRU | LFU | Scored, columns: range = range(2)
) -> Table:
    return Table(
        4, options=TableOptions(max_rows=max_rows, eviction=eviction), columns=columns
    )


def assert_bookkeeping(table: Table, oracle: Residents) -> None:
    rows = table.read_rows(table.ids())
    last_step, frequency = oracle.bookkeeping(table.ids().numpy())
    assert rows["last_step"].tolist() == last_step.tolist()
    assert rows["frequency"].tolist() == frequency.tolist()


# the table with 40 rows evicts one row at a time
@pytest.mark.parametrize("max_rows", [40, 640])
@pytest.mark.parametrize("eviction", POLICIES, ids=repr)
def test_the_least_rows_leave_ties_and_all(eviction: LRU | LFU, max_rows: int) -> None:
    batches = zipf_steps(1.0, 8 * max_rows, steps=120, batch=max_rows // 2)
    table = bounded(max_rows, eviction)
    oracle = Residents(universe_of(batches), max_rows, eviction)
    hits = 0
    for step, ids in enumerate(batches):
        table.lookup(ids, train=True)
        hits += oracle.lookup(ids.numpy())
        assert table.ids().tolist() == oracle.ids().tolist(), f"after step {step + 1}"
    assert_bookkeeping(table, oracle)
    stats = table.stats()
    assert (stats.hits, stats.evicted, stats.rows) == (
        hits,
        oracle.evicted,
        len(oracle.ids()),
    )
    assert stats.lookups == sum(len(ids.unique()) for ids in batches)
    assert stats.misses == stats.inserts == stats.evicted + stats.rows


@pytest.mark.parametrize(
    "eviction",
    [
        LRU(),
        HALVED[0],
        SCORED[0],
        *(
            pytest.param(eviction, marks=pytest.mark.slow)
            for eviction in (LFU(), HALVED[1], OCCURRENCES[0], SCORED[1])
        ),
    ],
    ids=repr,
)
@pytest.mark.parametrize(
    "seed",
    [
        0,
        pytest.param(1, marks=pytest.mark.slow),
        pytest.param(2, marks=pytest.mark.slow),
    ],
)
def test_the_least_rows_leave_whatever_happens_between(
    eviction: LRU | LFU | Scored, seed: int
) -> None:
    """The table looks for the next rows ahead.

    Meanwhile rows are used, written, removed, and wait for backwards.
    """
    random = np.random.default_rng(seed)
    max_rows, universe = 4_000, fmix64(np.arange(20_000)).astype(np.int64)
    table, oracle = bounded(max_rows, eviction), Residents(universe, max_rows, eviction)
    group = PooledGroup([table], [0], "sum")
    waiting: list[tuple[Tensor, Tensor]] = []
    for step in range(400):
        torch.set_num_threads(int(random.integers(1, 3)))
        popular = int(20_000 * random.random()) + 1
        ids = torch.from_numpy(
            random.choice(universe[:popular], random.integers(1, 300))
        )
        pinned = torch.cat([each for each, _ in waiting]).numpy() if waiting else None
        what = random.integers(0, 40)
        if what == 0:
            gone = random.choice(universe, random.choice([10, 10, 10, 15_000]))
            table.remove(torch.from_numpy(gone))
            oracle.remove(gone)
            waiting = [
                (each[torch.from_numpy(~np.isin(each.numpy(), gone))], out)
                for each, out in waiting
            ]
        elif what < 4:
            table.insert(ids, torch.ones(len(ids), 2))
            oracle.write(ids.numpy(), pinned)
        elif what < 20 and isinstance(eviction, Scored):
            scores = torch.from_numpy(
                random.integers(-8, 9, len(ids)).astype(np.float32) / 8
            )
            assert table.set_scores(ids, scores) == oracle.set_scores(
                ids.numpy(), scores.numpy()
            )
        elif what == 4:  # older, and seldom used
            some = ids[torch.from_numpy(np.isin(ids.numpy(), oracle.ids()))].unique()
            rows = table.read_rows(some)
            rows["last_step"] //= 2
            rows["frequency"] //= 2
            table.write_rows(some, rows)
            oracle.set_bookkeeping(
                some.numpy(), rows["last_step"].numpy(), rows["frequency"].numpy()
            )
        else:
            out = group(ids, torch.arange(0, len(ids) + 1), train=True)
            oracle.lookup(ids.numpy(), pinned)
            waiting.append((ids, out))
        # A halving between the lookup and the backward, which counts the step, is not
        # in the oracle.
        while len(waiting) > (0 if eviction in HALVED else random.integers(0, 4)):
            _, out = waiting.pop(int(random.integers(0, len(waiting))))
            out.backward(torch.zeros_like(out))
        if step % 10 == 0:
            assert table.ids().tolist() == oracle.ids().tolist(), f"after step {step}"
    for _, out in waiting:
        out.backward(torch.zeros_like(out))
    assert table.ids().tolist() == oracle.ids().tolist()
    assert oracle.evicted > 2 * max_rows


@pytest.mark.parametrize("eviction", POLICIES, ids=repr)
def test_residents_depend_neither_on_threads_nor_slots_nor_columns(
    eviction: LRU | LFU,
) -> None:
    batches = zipf_steps(1.0, 200_000, steps=12, batch=20_000)
    tables = [
        bounded(30_000, eviction, columns)
        for columns in (range(2), range(2, 4), range(4))
    ]
    # so that the rows get other slots
    tables[1].lookup(torch.arange(10**6, 10**6 + 5000), train=True)
    tables[1].remove(torch.arange(10**6, 10**6 + 5000, 2))
    tables[1].remove(table_ids := tables[1].ids())
    assert len(table_ids) == 2500
    tables[1].set_state(replace(tables[1].state(), steps=0))
    for ids in batches:
        for threads, table in zip((1, 2, 3), tables, strict=True):
            torch.set_num_threads(threads)
            table.lookup(ids[torch.randperm(len(ids))], train=True)
        assert torch.equal(tables[0].ids(), tables[1].ids())
        assert torch.equal(tables[0].ids(), tables[2].ids())
    ids = tables[0].ids()
    halves = torch.cat([tables[0].lookup(ids), tables[1].lookup(ids)], dim=1)
    assert torch.equal(halves, tables[2].lookup(ids))
    assert tables[0].stats().evicted == tables[2].stats().evicted > 0


@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_large_table_by_its_group(threads: int) -> None:
    """The table is so large that several tasks search for the rows to evict."""
    torch.set_num_threads(threads)
    max_rows = 150_000
    for eviction in (LRU(), LFU(half_life_steps=5)):
        batches = zipf_steps(0.9, 600_000, steps=10, batch=60_000)
        table = bounded(max_rows, eviction)
        group = PooledGroup([table], [0], "sum")
        oracle = Residents(universe_of(batches), max_rows, eviction)
        for ids in batches:
            out = group(ids, torch.arange(0, len(ids) + 1, 2), train=True)
            out.backward(torch.zeros_like(out))
            oracle.lookup(ids.numpy())
        assert oracle.evicted > max_rows // 4
        assert torch.equal(table.ids(), torch.from_numpy(oracle.ids()))
        assert_bookkeeping(table, oracle)


def test_halving_forgets_what_was_frequent_once() -> None:
    old, new = torch.arange(10), torch.arange(10, 20)
    residents = {}
    for half_life in (None, 8):
        table = bounded(20, LFU(half_life))
        for _ in range(16):
            table.lookup(old, train=True)
        for _ in range(9):
            table.lookup(new, train=True)
        assert table.read_rows(new)["frequency"].unique().tolist() == (
            [9] if half_life is None else [5]
        )
        table.lookup(torch.arange(20, 30), train=True)
        residents[half_life] = table.ids().tolist()
    # At step 25, the old rows' frequency of 16 has been halved at steps 8, 16 and 24,
    # the new rows' only at 24.
    assert residents[None] == [*range(10), *range(20, 30)]
    assert residents[8] == [*range(10, 20), *range(20, 30)]


@pytest.mark.parametrize("eviction", POLICIES, ids=repr)
def test_as_many_leave_as_needed(eviction: LRU | LFU) -> None:
    table = bounded(320, eviction)
    table.lookup(torch.arange(320), train=True)
    table.lookup(torch.tensor([1000]), train=True)
    assert (len(table), table.stats().evicted) == (320, 1)
    table.lookup(torch.arange(2000, 2300), train=True)
    assert (len(table), table.stats().evicted) == (320, 301)


@pytest.mark.parametrize("optimizer", [RowWiseAdagrad(lr=0.1), Adam(lr=0.1)], ids=repr)
def test_an_evicted_row_comes_back_as_new(optimizer: Optimizer) -> None:
    table = Table(
        2, optimizer=optimizer, options=TableOptions(max_rows=4, eviction=LRU())
    )
    first = table.lookup(torch.arange(4), train=True)
    table.update(torch.arange(4), torch.ones(4, 2))
    assert not torch.equal(table.lookup(torch.arange(4)), first)
    table.lookup(torch.arange(10, 14), train=True)
    assert not table.contains(torch.arange(4)).any()
    assert torch.equal(table.lookup(torch.arange(4), train=True), first)
    rows = table.read_rows(torch.arange(4))  # in the slots of the evicted rows
    assert all(not rows[state].any() for state in state_names(optimizer))
    assert rows["frequency"].tolist() == [1] * 4
    assert rows["last_step"].tolist() == [3] * 4


def hit_rates(
    batches: list[Tensor], max_rows: int, eviction: LRU | LFU
) -> tuple[float, float]:
    """Returns the hit rates of the table and of the exact policy, over all but the
    first tenth of the steps.
    """
    table = bounded(max_rows, eviction)
    exact = Residents(universe_of(batches), max_rows, eviction)
    warm = len(batches) // 10
    exact_hits = lookups = 0
    for step, ids in enumerate(batches):
        if step == warm:
            before = table.stats()
        table.lookup(ids, train=True)
        hits = exact.lookup(ids.numpy())
        if step >= warm:
            exact_hits += hits
            lookups += len(ids.unique())
    after = table.stats()
    assert after.lookups - before.lookups == lookups
    return (after.hits - before.hits) / lookups, exact_hits / lookups


@pytest.mark.parametrize("eviction", [LRU(), LFU(), LFU(half_life_steps=20)], ids=repr)
@pytest.mark.parametrize(
    ("share", "exponent"),
    [
        pytest.param(
            share, exponent, marks=[] if exponent == quick else pytest.mark.slow
        )
        for share, quick in ((0.02, 0.9), (0.1, 1.05), (0.3, 1.2))
        for exponent in (0.9, 1.05, 1.2)
    ],
)
def test_hit_rates_on_zipf_streams(
    exponent: float, share: float, eviction: LRU | LFU
) -> None:
    population = 50_000
    batches = zipf_steps(exponent, population, steps=150, batch=1000)
    store, exact = hit_rates(batches, int(share * population), eviction)
    assert 0.05 < exact < 0.99
    assert abs(store - exact) < 0.02


@pytest.mark.skipif(
    not SAMPLE.exists(), reason="the Criteo sample is not on this machine"
)
@pytest.mark.parametrize("eviction", [LRU(), LFU(), LFU(half_life_steps=20)], ids=repr)
def test_hit_rates_on_the_criteo_sample(
    eviction: LRU | LFU, criteo_steps: list[Tensor]
) -> None:
    distinct = len(universe_of(criteo_steps))
    for share in (0.1, 0.25):
        store, exact = hit_rates(criteo_steps, int(share * distinct), eviction)
        assert 0.2 < exact < 0.99
        assert abs(store - exact) < 0.02, share


@pytest.fixture(scope="module")
def criteo_steps() -> list[Tensor]:
    """The ids of all 26 features of 256 samples per step.

    The number of the feature is a part of the id.
    """
    with pytest.MonkeyPatch.context() as patch:
        for folder in ("examples", "examples/dlrm"):
            patch.syspath_prepend(ROOT / folder)
        from criteo import CriteoFile
    file = CriteoFile(SAMPLE)
    file.scan()
    apart = torch.arange(26, dtype=torch.int64)[None] << 40
    ids = torch.cat(
        [torch.as_tensor(np.asarray(rows.ids)) for rows in file.rows(0, 10_000)]
    )
    return [(part + apart).flatten() for part in ids.split(256)]


def test_a_frequency_of_16_goes_before_one_of_17() -> None:
    """The age of the rows does not matter, because only larger frequencies share a
    class.
    """
    table = Table(2, options=TableOptions(max_rows=2, eviction=LFU()))
    for id_ in (17, 16):
        for _ in range(id_):
            table.lookup(torch.tensor([id_]), train=True)
    table.lookup(torch.tensor([1]), train=True)
    assert table.ids().tolist() == [1, 17]


def test_no_row_leaves_for_rows_that_there_is_no_memory_for() -> None:
    dim = 2**20
    row_bytes = 3 * 4 * dim  # the weights and the two states of the optimizer
    n = 2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // row_bytes
    table = Table(
        dim, optimizer=Adam(), options=TableOptions(max_rows=n + 1, eviction=LRU())
    )
    table.insert(torch.tensor([1, 2]), torch.ones(2, dim))
    group = PooledGroup([table], [0], "sum")
    with pytest.raises(MemoryError):
        group(torch.arange(10, n + 10), torch.tensor([0, n]), train=True)
    assert table.ids().tolist() == [1, 2]
    assert table.stats().evicted == 0


def test_the_last_step_of_the_clock() -> None:
    table = Table(2, options=TableOptions(expiry=Expiry(8)))
    table.set_state(replace(table.state(), steps=2**32 - 4))
    for _ in range(2):
        table.lookup(torch.tensor([1]), train=True)
    with pytest.raises(ValueError, match=r"2\*\*32 - 2 steps"):
        table.lookup(torch.tensor([1]), train=True)
    assert table.ids().tolist() == [1]
