"""Gradients that are NaN or infinite: passed on, skipped row by row, or refused before
a row changes.
"""

from __future__ import annotations

import math

import pytest
import torch

from torchrec_recstore import SGD, Adam, RowWiseAdagrad, TableOptions
from torchrec_recstore.encoding import decode, encode
from torchrec_recstore.kernels import PooledGroup
from torchrec_recstore.optim import Optimizer
from torchrec_recstore.options import ConstantInit
from torchrec_recstore.store import Table

IDS = torch.arange(6)
OPTIMIZERS = [SGD(lr=0.5), RowWiseAdagrad(lr=0.5), Adam(lr=0.5, max_gradient_norm=1.0)]


def made(
    nonfinite: str, optimizer: Optimizer = OPTIMIZERS[1], **arguments: object
) -> Table:
    """Returns a table whose rows have had one update."""
    options = TableOptions(initializer=ConstantInit(1.0), nonfinite=nonfinite)  # type: ignore[arg-type]
    table = Table(8, optimizer=optimizer, options=options, **arguments)  # type: ignore[arg-type]
    table.update(IDS, torch.ones(len(IDS), 8))
    return table


def state_of(table: Table) -> list[torch.Tensor]:
    """Returns everything that an update changes, by row."""
    return list(table.read_rows(IDS).values())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
@pytest.mark.parametrize("column", [0, 7])
def test_skip(
    bad: float, optimizer: Optimizer, dtype: torch.dtype, column: int
) -> None:
    """A row with a bad gradient stays as it is, whichever of its gradients is bad;
    other rows are as without it.
    """
    skips, without = (
        made("skip", optimizer, dtype=dtype),
        made("pass", optimizer, dtype=dtype),
    )
    before = state_of(skips)
    grads = torch.randn(8, 8)
    ids = torch.tensor([0, 1, 2, 3, 4, 1, 5, 2])
    grads[[5, 4], column] = bad  # the second gradient of id 1, and that of id 4
    skips.update(ids, grads)
    good = ~((ids == 1) | (ids == 4))
    without.update(ids[good], grads[good])
    for now, was, expected in zip(
        state_of(skips), before, state_of(without), strict=True
    ):
        kept = torch.tensor([1, 4])
        assert torch.equal(now[kept], was[kept])
        if dtype is torch.float32:  # narrow rows draw random numbers by the position
            assert torch.equal(
                now,
                torch.where(
                    torch.isin(IDS, kept).view(-1, *[1] * (now.dim() - 1)),
                    was,
                    expected,
                ),
            )
        assert now.isfinite().all()
    assert (skips.stats().nonfinite, skips.stats().updates) == (2, 6 + 4)
    assert without.stats().nonfinite == 0


def test_pass() -> None:
    """By default a bad gradient makes its row NaN, as in TorchRec's tables."""
    table = made("pass")
    table.update(IDS[:1], torch.full((1, 8), math.nan))
    assert table.lookup(IDS[:1]).isnan().all()
    assert table.lookup(IDS[1:]).isfinite().all()


def test_skip_of_a_sum_that_overflows() -> None:
    table = made("skip")
    before = state_of(table)
    table.update(IDS[[2, 2]], torch.full((2, 8), 3e38))
    assert all(
        torch.equal(now, was) for now, was in zip(state_of(table), before, strict=True)
    )
    assert table.stats().nonfinite == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_raise(bad: float) -> None:
    table = made("raise")
    before = state_of(table)
    grads = torch.ones(1000, 8)
    grads[999, 7] = bad
    with pytest.raises(
        ValueError,
        match=(
            "table 'table': a gradient is NaN or infinite, and nonfinite='raise':"
            " no row"
        ),
    ):
        table.update(torch.arange(1000), grads)
    assert all(
        torch.equal(now, was) for now, was in zip(state_of(table), before, strict=True)
    )
    assert (len(table), table.stats().nonfinite) == (len(IDS), 0)
    table.update(IDS, torch.ones(len(IDS), 8))


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_backward_of_bags(accumulation_steps: int) -> None:
    """The bags of one table are bad and those of the other good: the group updates the
    other, or nothing.
    """
    for nonfinite in ("skip", "raise"):
        guarded, other = made(nonfinite, name="guarded"), made("pass", name="other")
        group = PooledGroup(
            [guarded, other], [0, 1], "mean", accumulation_steps=accumulation_steps
        )
        before = state_of(guarded)[0], state_of(other)[0]
        grads = torch.ones(2, 16)
        grads[1, 3] = math.nan  # of the bag of the ids 2 and 3 in the first table

        def step(group: PooledGroup = group, grads: torch.Tensor = grads) -> None:
            for _ in range(accumulation_steps):
                group(
                    IDS[[0, 1, 2, 3, 0, 1]], torch.tensor([0, 2, 4, 5, 6]), train=True
                ).backward(grads)

        if nonfinite == "raise":
            with pytest.raises(
                ValueError, match="table 'guarded': a gradient is NaN or infinite"
            ):
                step()
            assert torch.equal(guarded.lookup(IDS), before[0])
            assert torch.equal(other.lookup(IDS), before[1])
            continue
        step()
        changed = (guarded.lookup(IDS) != before[0]).any(1)
        assert changed.tolist() == [True, True, False, False, False, False]
        assert (other.lookup(IDS) != before[1]).any(1).tolist() == [
            True,
            True,
            False,
            False,
            False,
            False,
        ]
        assert guarded.stats().nonfinite == 2
        # A row that is not updated has been looked up all the same, so that it is not
        # evicted for that.
        assert guarded.read_rows(IDS)["frequency"].tolist() == [
            accumulation_steps
        ] * 4 + [0, 0]


def test_refused_values() -> None:
    with pytest.raises(
        ValueError,
        match=(
            r"TableOptions\.nonfinite must be 'pass' or 'skip' or 'raise', got 'drop'"
        ),
    ):
        TableOptions(nonfinite="drop")  # type: ignore[arg-type]


def test_files_name_it_only_if_it_is_set() -> None:
    """Earlier versions refuse a field that they do not know, so they read the files of
    tables that do not use it.
    """
    assert "nonfinite" not in encode(TableOptions(), {})
    written = encode(TableOptions(nonfinite="skip"), {})
    assert written["nonfinite"] == "skip"
    assert decode(written, {}) == TableOptions(nonfinite="skip")
