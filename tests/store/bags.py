"""Trains pooled bags of a table beside torch's autograd."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from torchrec_recstore.kernels import PooledGroup
from torchrec_recstore.store import Table


def train_beside_torch(
    table: Table, pooling: str, weighted: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Runs five steps and compares the outputs and the gradients of the weights with
    torch's.

    Args:
        table: A table with ``SGD(0.1)``.
        pooling: ``"sum"`` or ``"mean"``.
        weighted: Whether the batches have per-sample weights.

    Yields:
        After each step, the rows of the ids 0 to 9 as torch computes them from the rows
        before the step, and as the table reads them: (10, dim) float32 each.
    """
    generator = torch.Generator().manual_seed(1)
    rows = table.lookup(torch.arange(10), train=True).float()
    group = PooledGroup([table], [0], pooling)  # type: ignore[arg-type]
    for _ in range(5):
        ids, offsets = (
            torch.randint(0, 10, (12,), generator=generator),
            torch.tensor([0, 3, 3, 8, 12]),
        )
        weights = torch.rand(12, generator=generator) if weighted else torch.ones(12)
        ours, theirs = (
            weights.clone().requires_grad_(weighted),
            weights.clone().requires_grad_(),
        )
        leaf = rows.clone().requires_grad_()
        out = group(ids, offsets, ours if weighted else None, train=True)
        bags = [leaf[ids[a:b]] * theirs[a:b, None] for a, b in pairwise(offsets)]
        expected = torch.stack(
            [
                bag.sum(0) / (len(bag) if pooling == "mean" and len(bag) else 1)
                for bag in bags
            ]
        )
        torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)
        grad = torch.randn(4, table.dim, generator=generator)
        out.backward(grad)
        expected.backward(grad)
        if weighted:
            torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-5)
        assert leaf.grad is not None
        exact = rows - 0.1 * leaf.grad
        rows = table.lookup(torch.arange(10)).float()
        yield exact, rows
