"""Programs whose rows are on the device, compared with the same programs on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from torchrec_recstore import LFU, LRU, Expiry, TableOptions
from torchrec_recstore.kernels import PooledGroup
from torchrec_recstore.kernels.device_copies import CopyTarget
from torchrec_recstore.optim import SGD, Adam, Optimizer, RowWiseAdagrad
from torchrec_recstore.store import Table

Found = dict[str, Any]
BAGS = 6
IDS = 120
DIMS = (5, 16, 5)
FEATURES = (0, 1, 2, 0)
SLOTS = (24, 12, 14)


def make_group(
    device: torch.device,
    options: TableOptions,
    optimizer: Optimizer,
    pooling: Literal["sum", "mean"],
) -> PooledGroup:
    tables = [
        Table(dim, optimizer=optimizer, options=options, name=f"t{number}")
        for number, dim in enumerate(DIMS)
    ]
    group = PooledGroup(tables, FEATURES, pooling)
    if device.type != "cpu":
        group.put_on_device(device, SLOTS)
    return group


def batch(random: torch.Generator, weighted: bool) -> tuple[Tensor, Tensor, Any]:
    lengths = torch.randint(0, 4, (len(FEATURES) * BAGS,), generator=random)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    count = int(offsets[-1])
    ids = (torch.rand(count, generator=random) ** 3 * IDS).long()
    weights = torch.rand(count, generator=random) if weighted else None
    return ids, offsets, weights


def host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu")


def train(
    device: torch.device,
    *,
    options: TableOptions,
    optimizer: Optimizer,
    pooling: Literal["sum", "mean"] = "sum",
    weighted: bool = False,
    steps: int = 60,
) -> Found:
    """Trains, and writes, reads, removes and saves rows between the steps.

    Up to two forwards are pending.
    """
    random = torch.Generator().manual_seed(5)
    group = make_group(device, options, optimizer, pooling)
    to = None if device.type == "cpu" else CopyTarget(device, torch.float32)
    found: list[Any] = []
    pending: list[tuple[Tensor, Tensor]] = []
    for step in range(steps):
        ids, offsets, weights = batch(random, weighted)
        out = group(ids, offsets, weights, train=True, to=to)
        found.append(host(out))
        grad = torch.randn(out.shape, generator=random)
        pending.append((out, grad if to is None else grad.to(device)))
        if step % 5 != 1:
            for place in torch.randperm(len(pending), generator=random).tolist():
                pending[place][0].backward(pending[place][1])
            pending.clear()
        found.extend(between(group, step, random, to))
    if group.device_rows is not None:
        # Some passes are on the device, and some do not fit there.
        assert 0.3 * steps < group.device_rows.passes < steps, group.device_rows.passes
    return {"found": found, "rows": [part(table) for table in group.tables]}


def between(
    group: PooledGroup, step: int, random: torch.Generator, to: CopyTarget | None
) -> list[Any]:
    """Uses the tables between two steps."""
    found: list[Any] = []
    ids = torch.randint(0, IDS, (4,), generator=random)
    table = group.tables[step % len(DIMS)]
    dim = DIMS[step % len(DIMS)]
    if step % 7 == 2:
        table.insert(ids, torch.randn(4, dim, generator=random))
    if step % 7 == 3:
        found.append(table.lookup(ids))
    if step % 7 == 4:
        found.append(table.remove(ids))
    if step % 7 == 5:
        table.update(ids, torch.randn(4, dim, generator=random))
    if step % 7 == 6:
        evaluated = batch(random, False)
        with torch.no_grad():
            found.append(host(group(*evaluated, train=False, to=to)))
    if step % 11 == 3:
        found.append(part(table))
    return found


def part(table: Table) -> list[Any]:
    """Everything of a table."""
    ids = table.ids()
    rows = table.read_rows(ids)
    return [
        ids,
        *(rows[name] for name in sorted(rows)),
        replace(table.stats(), bytes=0),
    ]


def unlimited(device: torch.device) -> Found:
    return train(device, options=TableOptions(), optimizer=RowWiseAdagrad(lr=0.1))


def bounded(device: torch.device) -> Found:
    options = TableOptions(max_rows=70, eviction=LRU(), expiry=Expiry(steps=20))
    return train(device, options=options, optimizer=Adam(lr=0.1), pooling="mean")


def weighted(device: torch.device) -> Found:
    options = TableOptions(max_rows=70, eviction=LFU(half_life_steps=10))
    return train(
        device, options=options, optimizer=SGD(lr=0.1, momentum=0.9), weighted=True
    )


SCENARIOS: dict[str, Callable[[torch.device], Found]] = {
    "unlimited": unlimited,
    "bounded": bounded,
    "weighted": weighted,
}
