"""Programs that count what a step with rows on the device copies and launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.device import streams
from torchrec_recstore import TableOptions
from torchrec_recstore.kernels import PooledGroup
from torchrec_recstore.kernels.device_copies import CopyTarget
from torchrec_recstore.kernels.device_interface import ArenaLayout
from torchrec_recstore.optim import RowWiseAdagrad
from torchrec_recstore.store import Table

Found = dict[str, Any]
DIM = 64
EXPONENT = 1.05


@dataclass(frozen=True)
class Size:
    """The size of a training whose ids have Zipf's distribution."""

    tables: int
    batch: int
    ids: int
    device_rows: int
    warm_up_steps: int
    steps: int


SMALL = Size(
    tables=3, batch=200, ids=4_000, device_rows=600, warm_up_steps=40, steps=10
)
FULL = Size(
    tables=1,
    batch=8_192,
    ids=1_000_000,
    device_rows=100_000,
    warm_up_steps=700,
    steps=30,
)
"""One of the 26 tables of the size in the issue, with a tenth of its rows."""
FULL_TABLES = 26


class Zipf:
    """Draws ids with Zipf's distribution: id i has a weight of 1 / (i + 1) ** 1.05."""

    def __init__(self, ids: int) -> None:
        weights = torch.arange(1, ids + 1, dtype=torch.float64) ** -EXPONENT
        self._sums = weights.cumsum(0)
        self._random = torch.Generator().manual_seed(11)

    def draw(self, count: int) -> Tensor:
        numbers = torch.rand(count, generator=self._random, dtype=torch.float64)
        return torch.searchsorted(self._sums, numbers * self._sums[-1])


class Training:
    """A group with rows on a device, and batches with an id in each bag."""

    def __init__(self, size: Size, device: torch.device) -> None:
        self.size = size
        self.tables = [
            Table(
                DIM,
                optimizer=RowWiseAdagrad(lr=0.1),
                options=TableOptions(),
                name=f"t{number}",
            )
            for number in range(size.tables)
        ]
        self.group = PooledGroup(self.tables, range(size.tables), "sum")
        self.group.put_on_device(device, [size.device_rows] * size.tables)
        self.zipf = Zipf(size.ids)
        self.to = CopyTarget(device, torch.float32)
        self.offsets = torch.arange(size.tables * size.batch + 1)
        self.grad = torch.randn(size.batch, size.tables * DIM).to(device)

    def batch(self) -> Tensor:
        return self.zipf.draw(self.size.tables * self.size.batch)

    def step(self, ids: Tensor) -> None:
        out = self.group(ids, self.offsets, train=True, to=self.to)
        out.backward(self.grad)


def counted_steps(size: Size, device: torch.device) -> Found:
    """Counts the copies, bytes and kernels of the steps after a warm-up.

    If the device has room for all ids, the warm-up begins with each of them.
    """
    training = Training(size, device)
    if size.device_rows == size.ids:
        for first in range(0, size.ids, size.batch):
            ids = torch.arange(first, first + size.batch)
            training.step(ids.repeat(size.tables))
    for _ in range(size.warm_up_steps):
        training.step(training.batch())
    steps = []
    for _ in range(size.steps):
        ids = training.batch()
        with streams.counted() as counts:
            training.step(ids)
        steps.append(counts)
    rows = training.group.device_rows
    assert rows is not None
    assert rows.passes >= size.warm_up_steps + size.steps
    stride = ArenaLayout.of(training.tables[0]).stride
    return {
        "steps": steps,
        "positions": size.tables * size.batch,
        "row_bytes": 4 * stride,
    }


def a_part(device: torch.device) -> Found:
    return counted_steps(SMALL, device)


def all_rows(device: torch.device) -> Found:
    size = replace(SMALL, device_rows=SMALL.ids, warm_up_steps=1)
    return counted_steps(size, device)


SCENARIOS: dict[str, Callable[[torch.device], Any]] = {
    "a_part": a_part,
    "all_rows": all_rows,
}
