"""An id gets its row in its count-th step: lookups before that step, and the sightings
that count.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from torchrec_recstore.kernels import PooledGroup, SequenceGroup
from torchrec_recstore.optim import SGD, RowWiseAdagrad
from torchrec_recstore.options import LRU, Expiry, MinFrequency, TableOptions
from torchrec_recstore.store import Table

IDS = torch.tensor([5, -9, 2**62])


def admitting(count: int, counter_bytes: int = 2**16, **options: object) -> Table:
    made = TableOptions(admission=MinFrequency(count, counter_bytes), **options)  # type: ignore[arg-type]
    return Table(4, optimizer=SGD(lr=1.0), options=made)


def initial_rows(ids: Tensor) -> Tensor:
    return Table(4, options=TableOptions(missing="init")).lookup(ids)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 255])
def test_the_count_th_step_makes_the_row(count: int) -> None:
    table = admitting(count)
    for step in range(1, count + 1):
        assert len(table) == 0
        # one sighting, although each id occurs five times
        rows = table.lookup(IDS.repeat(5), train=True)
        assert torch.equal(rows, initial_rows(IDS.repeat(5)))
        assert not torch.equal(table.lookup(IDS), rows[:3]) or step == count
    assert torch.equal(table.ids(), IDS.sort().values)
    stats = table.stats()
    assert (stats.lookups, stats.hits, stats.misses) == (3 * count, 0, 3 * count)
    assert (stats.inserts, stats.refused, stats.rows) == (3, 3 * (count - 1), 3)
    rows = table.read_rows(IDS)
    assert rows["frequency"].tolist() == [1] * 3
    assert rows["last_step"].tolist() == [count] * 3
    table.lookup(IDS, train=True)
    assert table.stats().hits == 3


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_a_refused_id_takes_part_as_its_initial_row(pooling: str) -> None:
    table = admitting(2)
    known, refused = torch.arange(4), torch.arange(100, 104)
    table.insert(known, torch.arange(16.0).view(4, 4))
    group = PooledGroup([table], [0], pooling)  # type: ignore[arg-type]
    ids = torch.cat([known, refused])[[0, 4, 1, 5, 5, 2, 6, 7]]
    rows = torch.cat([table.lookup(known), initial_rows(refused)])[
        [0, 4, 1, 5, 5, 2, 6, 7]
    ]
    bags = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])
    weights = torch.rand(8, requires_grad=True)
    output = group(ids, torch.tensor([0, 3, 6, 8]), weights, train=True)
    expected_weights = weights.detach().clone().requires_grad_()
    scale = 1 / torch.tensor([3.0, 3.0, 2.0]) if pooling == "mean" else torch.ones(3)
    expected = (
        torch.zeros(3, 4).index_add(0, bags, rows * expected_weights[:, None])
        * scale[:, None]
    )
    torch.testing.assert_close(output, expected)
    grad = torch.randn(3, 4)
    output.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(weights.grad, expected_weights.grad)
    # The known rows are updated with their gradients. The refused ids have no rows.
    changes = (grad * scale[:, None])[bags] * weights.detach()[:, None]
    assert torch.equal(table.ids(), known)
    torch.testing.assert_close(
        table.lookup(known[:3]), rows[[0, 2, 5]] - changes[[0, 2, 5]]
    )
    assert torch.equal(table.lookup(refused, train=True), initial_rows(refused))
    assert table.contains(refused).all()


def test_sequences_read_initial_rows_and_drop_their_gradients() -> None:
    table = admitting(2)
    group = SequenceGroup([table])
    for step in range(2):
        output = group(IDS, [3], train=True)
        assert torch.equal(output.view(3, 4), initial_rows(IDS))
        output.backward(torch.ones(12))
        assert len(table) == 3 * step
    assert torch.equal(table.lookup(IDS), initial_rows(IDS) - 1.0)


def test_accumulated_gradients_of_refused_ids_are_dropped() -> None:
    table = admitting(2)
    group = PooledGroup([table], [0], "sum", accumulation_steps=2)
    for _ in range(2):  # the first step refuses the ids, the second step admits them
        group(IDS, torch.arange(4), train=True).backward(torch.ones(3, 4))
    assert torch.equal(table.lookup(IDS), initial_rows(IDS) - 1.0)


def test_an_update_of_a_refused_id_is_none() -> None:
    table = admitting(3)
    table.insert(IDS[:1], torch.zeros(1, 4))
    table.update(IDS, torch.ones(3, 4))
    assert table.ids().tolist() == [5]
    assert table.lookup(IDS[:1]).tolist() == [[-1.0] * 4]
    assert table.stats().updates == 1
    for _ in range(5):  # an update does not count as a sighting
        table.update(IDS, torch.ones(3, 4))
    table.lookup(IDS, train=True)
    assert len(table) == 1
    table.lookup(IDS, train=True)
    table.lookup(IDS, train=True)
    assert len(table) == 3


@pytest.mark.parametrize("counter_bytes", [2**17, 2**20])
@pytest.mark.parametrize(
    "bound", [{}, {"max_rows": 600, "eviction": LRU()}], ids=["unbounded", "max_rows"]
)
def test_an_update_makes_no_row_of_an_id_that_its_step_refused(
    counter_bytes: int, bound: dict[str, object]
) -> None:
    table = admitting(2, counter_bytes, **bound)
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        ids = torch.randint(-(2**62), 2**62, (2500,), generator=generator)
        ids[:500] %= 1000
        table.lookup(ids, train=True)
        before = table.stats()
        table.update(ids, torch.ones(len(ids), 4))
        stats = table.stats()
        assert (stats.rows, stats.inserts, stats.refused) == (
            before.rows,
            before.inserts,
            before.refused,
        )
        assert stats.lookups == stats.hits + stats.misses
        assert stats.misses == stats.refused + stats.inserts
    assert stats.refused > 10_000
    assert stats.hits > 100


def test_an_id_whose_row_has_left_is_admitted_by_its_next_sighting_and_not_by_an_update() -> (
    None
):
    table = admitting(2)
    for _ in range(2):
        table.lookup(IDS, train=True)
    table.remove(IDS)
    table.update(IDS[:2], torch.ones(2, 4))
    assert len(table) == 0
    table.lookup(IDS[:2], train=True)
    table.update(IDS[:2], torch.ones(2, 4))
    assert torch.equal(table.ids(), IDS[:2].sort().values)
    assert torch.equal(table.lookup(IDS[:2]), initial_rows(IDS[:2]) - 1.0)


def test_what_is_written_is_admitted() -> None:
    table, other = admitting(200), admitting(200)
    table.insert(IDS, torch.ones(3, 4))
    other.write_rows(IDS, table.read_rows(IDS))
    assert torch.equal(other.lookup(IDS, train=True), torch.ones(3, 4))
    assert other.stats().refused == table.stats().refused == 0


def test_evaluation_is_no_sighting() -> None:
    table = admitting(2)
    group = PooledGroup([table], [0], "sum")
    for _ in range(10):
        table.lookup(IDS)
        group(IDS, torch.tensor([0, 3]), train=False)
        table.contains(IDS)
    table.lookup(IDS, train=True)
    assert len(table) == 0


def test_all_features_of_a_table_count_once_a_step() -> None:
    table = admitting(3)
    group = PooledGroup([table], [0, 0, 0], "sum")
    for step in range(3):
        assert len(table) == 0, step
        group(torch.tensor([7, 7, 7]), torch.arange(4), train=True)
    assert table.ids().tolist() == [7]
    assert (table.stats().refused, table.stats().lookups) == (2, 3)


def test_a_bound_counts_admitted_ids_alone() -> None:
    table = admitting(2, max_rows=10, eviction=LRU())
    many = torch.arange(1000, 1100)
    table.lookup(torch.arange(10), train=True)
    table.lookup(torch.arange(10), train=True)
    table.lookup(many, train=True)  # the first sighting creates no rows
    assert table.ids().tolist() == list(range(10))
    before = table.stats()
    for _ in range(2):  # a call that fails does not count as a sighting
        with pytest.raises(ValueError, match="needs 11 rows at once, max_rows is 10"):
            table.lookup(torch.cat([torch.arange(2000, 2100), many[:11]]), train=True)
        assert table.stats() == before
    table.lookup(torch.arange(2000, 2100), train=True)
    assert table.ids().tolist() == list(range(10))
    table.lookup(many[:7], train=True)
    assert set(many[:7].tolist()) <= set(table.ids().tolist())
    assert table.stats().evicted == 7


def test_rows_that_have_left_need_not_be_seen_so_often_again() -> None:
    """The counter remembers their sightings for one or two generations."""
    table = admitting(3, expiry=Expiry(1))
    for _ in range(3):
        table.lookup(IDS, train=True)
    for _ in range(3):
        table.lookup(IDS[:0], train=True)
    assert len(table) == 0
    table.lookup(IDS, train=True)
    assert len(table) == 3


@pytest.mark.parametrize("columns", [range(2), range(2, 4)])
def test_columns_and_threads_admit_the_same_ids(columns: range) -> None:
    generator = torch.Generator().manual_seed(1)
    # a counter so small that it makes errors
    options = TableOptions(admission=MinFrequency(2, 2**10))
    tables = [Table(4, options=options), Table(4, options=options, columns=columns)]
    for _ in range(50):
        ids = torch.randint(0, 4000, (200,), generator=generator)
        for threads, table in enumerate(tables, start=1):
            torch.set_num_threads(threads)
            table.lookup(ids, train=True)
        assert torch.equal(tables[0].ids(), tables[1].ids())
    assert tables[0].stats().refused == tables[1].stats().refused > 1000


def generation(counter_bytes: int) -> int:
    """Returns the number of ids of a generation of the counter: six for each of its two
    times 64 bytes.
    """
    return counter_bytes // 128 * 6


@pytest.mark.parametrize("counter_bytes", [2**10, 2**13, 2**16])
def test_no_recent_sighting_is_missed(counter_bytes: int) -> None:
    """The sightings of an id count until a generation of other ids has been seen."""
    table = admitting(3, counter_bytes)
    window = generation(counter_bytes)
    probe = 0
    for trial in range(40):
        probe -= 1
        others = torch.arange(trial * 10 * window, trial * 10 * window + window - 2)
        table.lookup(torch.tensor([probe]), train=True)
        table.lookup(others[: window // 2], train=True)
        table.lookup(torch.tensor([probe]), train=True)
        table.lookup(others[window // 2 :], train=True)
        table.lookup(torch.tensor([probe]), train=True)
        assert table.contains(torch.tensor([probe])).item(), trial


def test_sightings_of_long_ago_are_forgotten() -> None:
    table = admitting(2, 2**10)
    table.lookup(IDS, train=True)
    window = generation(2**10)
    for start in range(0, 3 * window, 16):
        table.lookup(torch.arange(start + 1000, start + 1016), train=True)
    table.lookup(IDS, train=True)
    assert not table.contains(IDS).any()


@pytest.mark.parametrize("count", [2, 3])
def test_no_id_is_taken_for_another(count: int) -> None:
    """Each id is seen ``count - 1`` times, in a small counter and beside many others:
    none gets a row.
    """
    table = admitting(count, 2**13)
    rng = torch.Generator().manual_seed(0)
    for _ in range(100):
        ids = torch.randint(
            -(2**63), 2**63 - 1, (generation(2**13) // 2,), generator=rng
        )
        for _ in range(count - 1):
            table.lookup(ids, train=True)
    assert len(table) == 0
    assert table.stats().refused == 100 * len(ids) * (count - 1)


def test_a_larger_counter_remembers_longer() -> None:
    known = []
    for counter_bytes in (2**12, 2**16):
        table = admitting(2, counter_bytes)
        for _ in range(2):
            table.lookup(torch.arange(2048), train=True)
        known.append(len(table))
    assert known[0] <= 2 * generation(2**12) < known[1] == 2048


def test_the_state_has_the_sightings_of_both_generations() -> None:
    counter_bytes = 2**12
    table, copy = admitting(3, counter_bytes), admitting(3, 2**20)
    for step in range(6):
        table.lookup(torch.arange(step * 50, step * 50 + 100), train=True)
    state = table.state()
    assert state.sightings is not None
    assert set(state.sightings.generations.tolist()) == {0, 1}
    copy.set_state(state)
    assert torch.equal(
        torch.cat(copy.state().sightings).sort().values,
        torch.cat(state.sightings).sort().values,
    )
    for each in (table, copy):
        each.lookup(torch.arange(400), train=True)
    assert torch.equal(table.ids(), copy.ids())
    assert len(table) > 100


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_the_counter_takes_the_memory_that_it_says() -> None:
    counter_bytes = 2**26
    plain = Table(4)
    table = Table(4, options=TableOptions(admission=MinFrequency(2, counter_bytes)))
    assert table.stats().bytes - plain.stats().bytes == counter_bytes
    one_shot = Table(4, options=TableOptions(admission=MinFrequency(1, counter_bytes)))
    assert one_shot.stats().bytes == plain.stats().bytes  # it has no counter
    table.lookup(torch.arange(10**7, 10**7 + 50_000), train=True)
    before = resident_bytes()
    for start in range(0, 3_000_000, 50_000):
        table.lookup(torch.arange(start, start + 50_000), train=True)
    rows = table.stats().rows
    assert rows == 0
    assert resident_bytes() - before < 1.1 * counter_bytes + 200 * rows
    table.close()
    assert before - resident_bytes() > -0.3 * counter_bytes


@pytest.mark.parametrize("optimizer", [SGD(0.1), RowWiseAdagrad(0.1)], ids=repr)
def test_admitted_rows_train_as_any(optimizer: SGD | RowWiseAdagrad) -> None:
    """The rows are those of a table without admission that sees only the admitted ids."""
    table = Table(
        4, optimizer=optimizer, options=TableOptions(admission=MinFrequency(3, 2**20))
    )
    plain = Table(4, optimizer=optimizer)
    seen: dict[int, int] = {}
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        ids = (torch.rand(50, generator=generator) ** 3 * 500).long()
        grads = torch.randn(50, 4, generator=generator)
        for id_ in ids.unique().tolist():
            seen[id_] = seen.get(id_, 0) + 1
        here = torch.tensor([seen[id_] >= 3 for id_ in ids.tolist()])
        table.lookup(ids, train=True)
        table.update(ids, grads)
        plain.lookup(ids[here], train=True)
        plain.update(ids[here], grads[here])
    assert torch.equal(table.ids(), plain.ids())
    assert 20 < len(table) < len(seen)
    for name, value in plain.read_rows(plain.ids()).items():
        assert torch.equal(table.read_rows(plain.ids())[name], value), name
