"""Whole rows are read from one table and written to another."""

from __future__ import annotations

import pytest
import torch

from torchrec_recstore.optim import SGD, Adagrad, Optimizer, RowWiseAdagrad
from torchrec_recstore.store import Table

IDS = torch.tensor([5, -(2**63), 2**63 - 1, -1, 0])


def trained(optimizer: Optimizer, dim: int = 5) -> Table:
    table = Table(dim, optimizer=optimizer)
    for step in range(3):
        table.lookup(IDS[step:], train=True)
        table.update(
            IDS[step:],
            torch.randn(5 - step, dim, generator=torch.Generator().manual_seed(step)),
        )
    return table


@pytest.mark.parametrize("optimizer", [SGD(0.1), Adagrad(0.1), RowWiseAdagrad(0.1)])
def test_a_copy_goes_on_as_the_original(optimizer: Optimizer) -> None:
    table, copy = trained(optimizer), Table(5, optimizer=optimizer)
    rows = table.read_rows(IDS)
    assert torch.equal(rows["weight"], table.lookup(IDS))
    # write_rows replaces existing rows, with all of their state
    copy.insert(IDS[:2], torch.ones(2, 5))
    copy.write_rows(IDS, rows)
    for name, value in copy.read_rows(IDS).items():
        assert torch.equal(value, rows[name]), name
    grads = torch.randn(5, 5, generator=torch.Generator().manual_seed(9))
    for each in (table, copy):
        each.update(IDS, grads)
    assert torch.equal(table.lookup(IDS), copy.lookup(IDS))


def test_bookkeeping_counts_steps() -> None:
    rows = trained(SGD(0.1)).read_rows(IDS)
    assert rows["frequency"].tolist() == [1, 2, 3, 3, 3]
    assert rows["last_step"].tolist() == [1, 2, 3, 3, 3]


def test_of_duplicates_the_last_wins() -> None:
    table = Table(2, optimizer=SGD(0.1))
    numbers = torch.tensor([1, 2])
    table.write_rows(
        torch.tensor([7, 7]),
        {
            "weight": torch.tensor([[1.0, 1.0], [2.0, 3.0]]),
            "last_step": numbers,
            "frequency": numbers,
        },
    )
    assert table.lookup(torch.tensor([7])).tolist() == [[2.0, 3.0]]
    assert table.read_rows(torch.tensor([7]))["last_step"].tolist() == [2]


def test_what_does_not_fit_is_refused() -> None:
    table = trained(RowWiseAdagrad(0.1))
    rows = table.read_rows(IDS)
    with pytest.raises(ValueError, match="id 77 has no row"):
        table.read_rows(torch.tensor([5, 77]))
    for change, message in [
        ({"weight": torch.zeros(5, 4)}, "weight must have the shape"),
        ({"sum": torch.zeros(4)}, "sum must have the shape"),
        ({"last_step": torch.full((5,), -1)}, "must be within"),
        ({"stranger": torch.zeros(5)}, "rows must have the keys"),
    ]:
        with pytest.raises(ValueError, match=message):
            table.write_rows(IDS, {**rows, **change})
    with pytest.raises(
        TypeError, match="rows must be a mapping as read_rows returns it, got Tensor"
    ):
        table.write_rows(IDS, rows["weight"])  # type: ignore[arg-type]
    assert torch.equal(table.read_rows(IDS)["weight"], rows["weight"])


@pytest.mark.parametrize("rows", [1_000, 20_000])
def test_among_duplicates_of_an_insert_the_last_one_counts_for_all_threads(
    rows: int,
) -> None:
    """Many rows are written by several threads."""
    ids = torch.randint(
        0, rows // 3, (rows,), generator=torch.Generator().manual_seed(0)
    )
    weights = torch.arange(rows, dtype=torch.float32).unsqueeze(1).expand(rows, 4)
    last = {id_: float(place) for place, id_ in enumerate(ids.tolist())}
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            table = Table(4, optimizer=SGD(0.1))
            table.insert(ids, weights.contiguous())
            distinct = ids.unique()
            written = table.lookup(distinct)
            assert written[:, 0].tolist() == [last[id_] for id_ in distinct.tolist()]
            assert torch.equal(written[:, 0], written[:, 3])
    finally:
        torch.set_num_threads(threads)
