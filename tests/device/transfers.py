"""Programs that count what a step with rows on the device copies and launches, and that
let copies be late or fail.

The tests of the programs are in test_transfers.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.device import simulated, streams
from tests.device.device_rows import bits, part
from torchrec_recstore import LFU, TableOptions
from torchrec_recstore.kernels import PooledGroup, device_moves
from torchrec_recstore.kernels.device_copies import CopyTarget
from torchrec_recstore.kernels.device_interface import ArenaLayout
from torchrec_recstore.kernels.device_transfers import DeviceTransfers
from torchrec_recstore.optim import RowWiseAdagrad
from torchrec_recstore.store import Table
from torchrec_recstore.utils import RecStoreWarning

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

    def __init__(
        self,
        size: Size,
        device: torch.device,
        options: TableOptions = TableOptions(),  # noqa: B008  (it is frozen)
    ) -> None:
        self.size = size
        self.tables = [
            Table(
                DIM,
                optimizer=RowWiseAdagrad(lr=0.1),
                options=options,
                name=f"t{number}",
            )
            for number in range(size.tables)
        ]
        self.group = PooledGroup(self.tables, range(size.tables), "sum")
        self.to = None
        if device.type != "cpu":
            self.group.put_on_device(device, [size.device_rows] * size.tables)
            self.to = CopyTarget(device, torch.float32)
        self.zipf = Zipf(size.ids)
        self.offsets = torch.arange(size.tables * size.batch + 1)
        random = torch.Generator().manual_seed(12)
        grad = torch.randn(size.batch, size.tables * DIM, generator=random)
        self.grad = grad.to(device)
        self.counts = [size.batch] * size.tables

    def batch(self) -> Tensor:
        return self.zipf.draw(self.size.tables * self.size.batch)

    def forward(self, ids: Tensor) -> Tensor:
        return self.group(ids, self.offsets, train=True, to=self.to)

    def step(self, ids: Tensor) -> None:
        self.forward(ids).backward(self.grad)

    def rows(self) -> list[Any]:
        """Returns everything of the tables."""
        return [part(table) for table in self.tables]


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


CPU = torch.device("cpu")
TINY = Size(tables=3, batch=40, ids=400, device_rows=100, warm_up_steps=8, steps=6)


def step_with_failure(device: torch.device, copies_before: int) -> Found:
    """Trains, and lets a copy of one step fail. Between its forward and its backward,
    rows of the batch are written.
    """
    training = Training(TINY, device)
    for _ in range(TINY.warm_up_steps):
        training.step(training.batch())
    ids = training.batch()
    with streams.failing(copies_before) as failure:
        out = training.forward(ids)
    failed_in_forward = failure.has_happened
    written = ids[:3].unique()
    training.tables[0].insert(written, torch.ones(len(written), DIM))
    with streams.resumed(failure):
        out.backward(training.grad)
    found = [bits(out)]
    for _ in range(3):
        training.step(training.batch())
    return {
        "found": found,
        "rows": training.rows(),
        "failed": failure.has_happened,
        "failed_in_forward": failed_in_forward,
    }


def failures(device: torch.device) -> Found:
    """Lets each copy of a step fail, one after the other."""
    plain = step_with_failure(CPU, 0)
    results = []
    for copies_before in range(100):
        result = step_with_failure(device, copies_before)
        results.append(result)
        if not result["failed"]:
            break
    return {"plain": plain, "results": results}


def failed_settle(device: torch.device) -> Found:
    """Lets each copy fail that brings rows to the host."""
    training = Training(TINY, device)
    plain = Training(TINY, CPU)
    for _ in range(TINY.warm_up_steps):
        ids = training.batch()
        training.step(ids)
        plain.step(ids)
    errors = []
    for copies_before in range(2):
        with streams.failing(copies_before):
            try:
                training.tables[0].lookup(ids[:9])
            except MemoryError as error:
                errors.append(str(error))
    return {"errors": errors, "rows": training.rows(), "plain": plain.rows()}


def in_parts(device: torch.device) -> Found:
    """Brings all rows to the host in parts of 20 rows."""
    training = Training(TINY, device)
    plain = Training(TINY, CPU)
    for _ in range(TINY.warm_up_steps):
        ids = training.batch()
        training.step(ids)
        plain.step(ids)
    floats = device_moves.PART_FLOATS
    layout = ArenaLayout.of(training.tables[0])
    device_moves.PART_FLOATS = 20 * layout.stride
    try:
        with streams.counted() as counts:
            rows = training.rows()
    finally:
        device_moves.PART_FLOATS = floats
    part_bytes = 4 * 20 * layout.stride
    return {
        "down": counts.down,
        "most": part_bytes,
        "rows": rows,
        "plain": plain.rows(),
    }


def without_memory(device: torch.device) -> Found:
    """Trains, and has no memory for updates on the device in some of the steps."""
    training = Training(TINY, device)
    plain = Training(TINY, CPU)
    for step in range(TINY.warm_up_steps):
        ids = training.batch()
        with simulated.failing_kernel("new_sums" if step % 3 == 1 else None):
            training.step(ids)
        plain.step(ids)
    return {"rows": training.rows(), "plain": plain.rows()}


def floats_after_closing(device: torch.device) -> list[int]:
    """The floats of the arena after each table has been closed."""
    training = Training(TINY, device)
    training.step(training.batch())
    on_device = training.group.device_rows
    assert on_device is not None
    floats = []
    for table in training.tables:
        table.close()
        floats.append(sum(arena.rows.numel() for arena in on_device._arenas.all))
    return floats


def lost(device: torch.device) -> dict[str, list[str]]:
    """What is said after a kernel that changes rows has failed."""
    return {kernel: said_after(device, kernel) for kernel in ("scatter", "update")}


def room_warnings(device: torch.device) -> list[list[str]]:
    """What is warned of in two steps with too few rows on the device for a batch, and
    with too few for batches whose backward is to come.
    """
    messages = []
    for rows in (15, 100):
        training = Training(replace(TINY, device_rows=rows), device)
        outputs = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(5):
                ids = torch.arange(TINY.batch).repeat(TINY.tables) + 40 * step
                outputs.append(training.forward(ids))
        for output in reversed(outputs):
            output.backward(training.grad)
        messages.append(
            [str(w.message) for w in caught if w.category is RecStoreWarning]
        )
    return messages


def no_memory_for_an_arena(device: torch.device) -> str:
    """What is said if the device has no memory for the rows of tables."""
    training = Training(TINY, CPU)
    with patch.object(DeviceTransfers, "new_arena", side_effect=_out_of_memory):
        try:
            training.group.put_on_device(device, [100] * TINY.tables)
        except MemoryError as error:
            return str(error)
    return "nothing"


def _out_of_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("tried to allocate more than there is")


def closed_while_rows_land(device: torch.device) -> Found:
    """Closes a table while rows of its group are on their way to the host."""
    training = Training(TINY, device)
    plain = Training(TINY, CPU)
    on_device = training.group.device_rows
    assert on_device is not None
    for step in range(TINY.warm_up_steps + TINY.steps):
        is_landing = on_device._moves._landing is not None
        if is_landing and step >= TINY.warm_up_steps:
            break
        training.step(training.batch())
        plain.step(plain.batch())
    training.tables[0].close()
    return {
        "is_landing": is_landing,
        "rows": [part(table) for table in training.tables[1:]],
        "plain": plain.rows()[1:],
    }


def not_compiled(device: torch.device) -> dict[str, Found]:
    """What a step says if a kernel that changes rows cannot be compiled, and the rows
    after the steps that follow.
    """
    results = {}
    for kernel in ("scatter", "update"):
        training = Training(TINY, device)
        plain = Training(TINY, CPU)
        first = training.batch()
        with simulated.failing_kernel(f"compiling {kernel}"):
            try:
                training.step(first)
                message = "nothing"
            except RuntimeError as error:
                message = str(error)
        # The lookup has counted the ids, whether or not it has returned.
        plain.forward(plain.batch())
        for _ in range(TINY.steps):
            training.step(training.batch())
            plain.step(plain.batch())
        results[kernel] = {
            "message": message,
            "rows": training.rows(),
            "plain": plain.rows(),
        }
    return results


def said_after(device: torch.device, kernel: str) -> list[str]:
    training = Training(TINY, device)
    for _ in range(TINY.warm_up_steps):
        training.step(training.batch())
    ids = torch.arange(3)
    calls: list[Callable[[], Any]] = [
        lambda: training.step(training.batch()),
        lambda: training.step(training.batch()),
        lambda: training.tables[0].lookup(ids),
        lambda: training.tables[1].read_rows(ids),
        lambda: training.group.prefetch(training.batch(), training.counts),
    ]
    messages = []
    for number, call in enumerate(calls):
        with simulated.failing_kernel(kernel if number == 0 else None):
            try:
                call()
                messages.append("nothing")
            except Exception as error:
                messages.append(f"{type(error).__name__}: {error}")
    streams.forget()
    return messages


BOUNDED = TableOptions(max_rows=150, eviction=LFU())


def prefetched(
    device: torch.device, options: TableOptions, seed: int | None, steps: int = 40
) -> Found:
    """Trains as a pipeline does: the rows of the next batch are prefetched between the
    forward and the backward of a batch, by a thread.
    """
    training = Training(TINY, device, options)
    found = []
    counted = []
    delays = nullcontext() if seed is None else streams.delays(seed)
    with ThreadPoolExecutor(1) as thread, delays:
        ids = training.batch()
        for step in range(steps):
            with streams.counted() as of_forward:
                out = training.forward(ids)
            ids = training.batch()
            with streams.counted() as of_prefetch:
                thread.submit(training.group.prefetch, ids, training.counts).result()
            removes = step % 5 == 4
            if removes:
                training.tables[1].remove(ids[TINY.batch : TINY.batch + 2])
            out.backward(training.grad)
            found.append(bits(out))
            counted.append((of_forward, of_prefetch, removes))
    return {"found": found, "rows": training.rows(), "counted": counted}


def prefetches(device: torch.device) -> Found:
    results = {}
    for name, options in {"unlimited": TableOptions(), "bounded": BOUNDED}.items():
        plain = prefetched(CPU, options, None)
        on_device = [prefetched(device, options, seed) for seed in (None, 0, 1)]
        results[name] = (plain, on_device)
    return results


def delayed(device: torch.device) -> Found:
    """Trains with two pending passes, while every copy is late at random."""
    plain = two_pending(CPU, None)
    return {"plain": plain, "delayed": [two_pending(device, s) for s in range(3)]}


def two_pending(device: torch.device, seed: int | None) -> Found:
    training = Training(TINY, device, BOUNDED)
    found = []
    with nullcontext() if seed is None else streams.delays(seed):
        for step in range(20):
            outputs = [training.forward(training.batch()) for _ in range(2)]
            if step % 3 == 0:
                outputs.reverse()
            for out in outputs:
                out.backward(training.grad)
                found.append(bits(out))
            if step % 4 == 1:
                found.append(bits(training.tables[2].lookup(torch.arange(20))))
    return {"found": found, "rows": training.rows()}


SCENARIOS: dict[str, Callable[[torch.device], Any]] = {
    "a_part": a_part,
    "all_rows": all_rows,
    "delayed": delayed,
    "failed_settle": failed_settle,
    "floats_after_closing": floats_after_closing,
    "in_parts": in_parts,
    "without_memory": without_memory,
    "failures": failures,
    "lost": lost,
    "closed_while_rows_land": closed_while_rows_land,
    "not_compiled": not_compiled,
    "room_warnings": room_warnings,
    "no_memory_for_an_arena": no_memory_for_an_arena,
    "prefetches": prefetches,
}
