"""A frozen table is read, filled and emptied, but neither grows nor learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torchrec_recstore.kernels import PooledGroup, SequenceGroup
from torchrec_recstore.optim import SGD, Adam
from torchrec_recstore.options import LRU, MinFrequency, SSDStore, TableOptions
from torchrec_recstore.store import Table

IDS = torch.tensor([3, -7, 2**40])
ROWS = torch.arange(12.0).view(3, 4)


def frozen(**options: object) -> Table:
    return Table(
        4, optimizer=Adam(lr=0.5), options=TableOptions(frozen=True, **options)
    )  # type: ignore[arg-type]


def test_a_training_lookup_reads() -> None:
    table = frozen(missing="init")
    expected = Table(4, options=TableOptions(missing="init")).lookup(IDS)
    assert torch.equal(table.lookup(IDS, train=True), expected)
    assert len(table) == 0
    table.insert(IDS, ROWS)
    before = table.read_rows(IDS)
    assert torch.equal(table.lookup(IDS, train=True), ROWS)
    for key, value in table.read_rows(IDS).items():
        assert torch.equal(value, before[key])
    stats = table.stats()
    assert (stats.steps, stats.lookups, stats.inserts) == (0, 0, 3)
    assert table.remove(IDS[:1]) == 1
    assert torch.equal(table.lookup(IDS[:1], train=True), expected[:1])


def test_it_has_no_states() -> None:
    table = frozen()
    assert table.optimizer == SGD(lr=0.5)
    table.insert(IDS, ROWS)
    assert table.read_rows(IDS).keys() == {"weight", "last_step", "frequency"}
    with table.empty_copy() as other:
        other.write(table.part(IDS))
        assert torch.equal(other.lookup(IDS), ROWS)


def test_an_update_is_refused() -> None:
    table = frozen()
    table.insert(IDS, ROWS)
    with pytest.raises(
        ValueError,
        match=r"table 'table' is frozen by its options, and is not updated: insert\(",
    ):
        table.update(IDS, ROWS)
    assert torch.equal(table.lookup(IDS), ROWS)


def test_bounds_cold_rows_and_admission(tmp_path: Path) -> None:
    options = {"max_rows": 2, "admission": MinFrequency(3)}
    table = frozen(**options, cold_store=SSDStore(str(tmp_path)))
    table.insert_all(IDS, ROWS)
    before = table.stats()
    for _ in range(5):
        assert torch.equal(table.lookup(IDS, train=True), ROWS)
        assert not table.lookup(IDS + 1, train=True).any()
    assert table.stats() == before
    assert before.cold_rows >= 1
    bounded = frozen(**options, eviction=LRU())
    bounded.insert_all(IDS, ROWS)
    assert len(bounded) <= 2


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("kind", ["pooled", "sequence"])
def test_groups(tmp_path: Path, kind: str, cold: bool) -> None:
    options = {"max_rows": 2, "cold_store": SSDStore(str(tmp_path))} if cold else {}
    table = frozen(**options)
    table.insert_all(IDS, ROWS)
    before = table.stats()
    if kind == "pooled":
        pooled = PooledGroup([table], [0], "sum")
        pooled.prefetch(torch.cat([IDS, IDS + 1]), [6])
        out = pooled.forward(IDS, torch.tensor([0, 1, 3]), train=True)
        assert torch.equal(out, torch.stack([ROWS[0], ROWS[1] + ROWS[2]]))
    else:
        sequence = SequenceGroup([table])
        sequence.prefetch(torch.cat([IDS, IDS + 1]), [6])
        out = sequence.forward(IDS, [3], train=True)
        assert torch.equal(out.view(3, 4), ROWS)
    out.sum().backward()
    assert torch.equal(table.lookup(IDS), ROWS)
    assert table.stats() == before


def test_the_gradient_of_weights() -> None:
    table = frozen()
    table.insert(IDS, ROWS)
    weights = torch.ones(3, requires_grad=True)
    PooledGroup([table], [0], "sum").forward(
        IDS, torch.tensor([0, 3]), weights, train=True
    ).sum().backward()
    assert weights.grad is not None
    assert torch.equal(weights.grad, ROWS.sum(1))


def test_a_group_of_both_kinds_is_refused() -> None:
    for kind in (SequenceGroup, lambda tables: PooledGroup(tables, [0, 1], "sum")):
        with pytest.raises(
            ValueError, match="table 'table' is frozen, and table 'other' is not"
        ):
            kind([frozen(), Table(4, name="other")])


def test_another_type_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"TableOptions\.frozen must be a bool, got str"
    ):
        TableOptions(frozen="yes")  # type: ignore[arg-type]
