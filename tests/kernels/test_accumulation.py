"""Gradients are summed over several backward passes, and rows are updated once."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from torchrec_recstore.kernels import PooledGroup
from torchrec_recstore.optim import SGD, Adagrad, Adam, Optimizer
from torchrec_recstore.store import Table

Batch = tuple[Tensor, Tensor, Tensor, Tensor]


def batches(steps: int, columns: int) -> list[Batch]:
    """Returns batches of ids, offsets of two features with three bags each, weights,
    and gradients.
    """
    generator = torch.Generator().manual_seed(3)
    offsets = torch.tensor([0, 2, 2, 5, 6, 9, 10])
    return [
        (
            torch.randint(-3, 4, (10,), generator=generator),
            offsets,
            torch.rand(10, generator=generator),
            torch.randn(3, columns, generator=generator),
        )
        for _ in range(steps)
    ]


def group(
    optimizer: Optimizer, pooling: Literal["sum", "mean"], accumulation_steps: int
) -> PooledGroup:
    tables = [Table(5, optimizer=optimizer, name=name) for name in "ab"]
    return PooledGroup(tables, [0, 1], pooling, accumulation_steps=accumulation_steps)


def rows(of: PooledGroup) -> list[Tensor]:
    return [table.lookup(torch.arange(-3, 4)) for table in of.tables]


def train(of: PooledGroup, batch: Batch) -> Tensor:
    ids, offsets, weights, grad = batch
    weights = weights.clone().requires_grad_()
    of(ids, offsets, weights, train=True).backward(grad)
    assert weights.grad is not None
    return weights.grad


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize(
    "optimizer", [SGD(0.1), Adagrad(0.1), Adam(0.1, max_gradient=0.5)], ids=repr
)
def test_one_update_on_the_sum(
    optimizer: Optimizer, pooling: Literal["sum", "mean"]
) -> None:
    """The rows are those of one pass over a batch with all bags."""
    summed, at_once = group(optimizer, pooling, 3), group(optimizer, pooling, 1)
    for _ in range(2):
        parts = batches(3, 10)
        for part in parts:
            train(summed, part)
        by_feature = [(ids[:5], ids[5:]) for ids, _, _, _ in parts]
        lengths = torch.tensor([2, 0, 3] * 3 + [1, 3, 1] * 3)
        whole = (
            torch.cat(
                [pair[0] for pair in by_feature] + [pair[1] for pair in by_feature]
            ),
            torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
            torch.cat(
                [part[2][:5] for part in parts] + [part[2][5:] for part in parts]
            ),
            torch.cat([part[3] for part in parts]),
        )
        train(at_once, whole)
        for one, other in zip(rows(summed), rows(at_once), strict=True):
            assert torch.equal(one, other)


def test_rows_and_learning_rate_wait_for_the_last_pass() -> None:
    of = group(SGD(0.1), "sum", 2)
    rate = [1.0]
    of.learning_rate = lambda: rate[0]
    first, second = batches(2, 10)
    of(*first[:3], train=True)  # no backward: does not count
    train(of, second)
    before = rows(of)
    assert all(table.stats().updates == 0 for table in of.tables)
    weight_grads = train(of, first)
    assert all(table.stats().updates == len(table) for table in of.tables)
    assert not torch.equal(rows(of)[0], before[0])
    reference = group(SGD(0.1), "sum", 1)
    torch.testing.assert_close(train(reference, first), weight_grads)
    rate[0] = 0.0
    still = rows(of)
    for part in (first, second):
        train(of, part)
    assert all(
        torch.equal(one, other) for one, other in zip(rows(of), still, strict=True)
    )


def test_gradients_may_change_after_their_backward() -> None:
    groups = [group(SGD(0.1), "sum", 2) for _ in range(2)]
    for spoiled, of in enumerate(groups):
        for ids, offsets, weights, grad in batches(2, 10):
            of(ids, offsets, weights, train=True).backward(grad)
            if spoiled:
                grad.zero_()
    assert all(
        torch.equal(one, other)
        for one, other in zip(rows(groups[0]), rows(groups[1]), strict=True)
    )


def test_a_step_count_below_one_is_an_error() -> None:
    with pytest.raises(ValueError, match="accumulation_steps"):
        group(SGD(0.1), "sum", 0)


def empty(bags: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the ids, the offsets and the gradient of a batch of two features without
    ids.
    """
    return (
        torch.empty(0, dtype=torch.int64),
        torch.zeros(2 * bags + 1, dtype=torch.int64),
        torch.ones(bags, columns),
    )


@pytest.mark.parametrize("optimizer", [SGD(0.1), Adam(0.1, max_gradient=0.5)], ids=repr)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("bags", [0, 3])
def test_a_pass_without_ids_changes_nothing(
    bags: int, place: int, weighted: bool, optimizer: Optimizer
) -> None:
    """The rows are those of the same passes without the empty one, whether or not that
    has weights.
    """
    whole, with_weights, without = (
        group(optimizer, "sum", steps) for steps in (2, 3, 3)
    )
    for _ in range(2):
        for number in range(3):
            if number == place:
                ids, offsets, grad = empty(bags, 10)
                weights = torch.empty(0, requires_grad=True)
                with_weights(ids, offsets, weights, train=True).backward(grad)
                assert weights.grad is not None
                assert weights.grad.shape == (0,)
                without(ids, offsets, train=True).backward(grad)
            else:
                ids, offsets, full_weights, grad = batches(3, 10)[number]
                for of in (whole, with_weights, without):
                    of(
                        ids, offsets, full_weights if weighted else None, train=True
                    ).backward(grad)
        expected = rows(whole)
        for of in (with_weights, without):
            assert all(
                torch.equal(one, other)
                for one, other in zip(rows(of), expected, strict=True)
            )


def test_updates_of_passes_without_ids() -> None:
    of = group(SGD(0.1), "mean", 2)
    before = rows(of)
    for _ in range(2):
        ids, offsets, grad = empty(3, 10)
        of(ids, offsets, torch.empty(0), train=True).backward(grad)
        of(ids, offsets, train=True).backward(grad)
    assert all(
        torch.equal(one, other) for one, other in zip(rows(of), before, strict=True)
    )
    assert [table.optimizer_steps for table in of.tables] == [2, 2]


def test_passes_with_and_without_weights_are_refused() -> None:
    of = group(SGD(0.1), "sum", 2)
    (ids, offsets, weights, grad), _ = batches(2, 10)
    of(ids, offsets, weights, train=True).backward(grad)
    out = of(ids, offsets, train=True)
    with pytest.raises(
        ValueError, match=r"tables a, b: either all contexts .* must have weights"
    ):
        out.backward(grad)
