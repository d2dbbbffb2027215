"""Measures the host's part of a training step whose rows are on a device.

    python benchmarks/device_host.py [--rows 300000] [--device-rows 30000] [--steps 40]

The device is torch's ``meta`` device, whose kernels and copies do nothing. What remains
is the work of the host: to resolve ids, to plan, to stage rows, and to queue copies and
kernels. The rows that come back from the device are zeros. Ids have Zipf's
distribution, 26 tables, dim 64, a batch of 8,192.

Prints one JSON row with the milliseconds of forward and backward of both sides: ``host``
pools and updates on the host, ``device`` leaves both to the device. ``resolve`` is the
forward of ``host`` without its pooling. The steps are interleaved in one process.

The row also says how long the host's part of ``device`` would take with ``--cores``
such cores. ``device_one_thread`` is measured after the others. What all threads do not
make faster is taken to be serial, and the rest to be divided by all cores (Amdahl's
law). Memory that is slower than so many cores, and tables of which some take longer
than others, are not in this model.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from kernel import pass_spreads, zipf
from measure import clock, emit, interleave
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.kernels import PooledGroup
from torchrec_recstore.kernels.device_copies import CopyTarget, streams_by_type
from torchrec_recstore.kernels.device_interface import kernels_by_type
from torchrec_recstore.optim import RowWiseAdagrad
from torchrec_recstore.store import Table

TABLES = 26
DIM = 64
BATCH = 8192
META = torch.device("meta")


class Pinned(Tensor):
    """Memory of the host to which copies of the device do nothing."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
        """Copies nothing from the device."""
        return self if source.is_meta else super().copy_(source, non_blocking)


class NoEvent:
    """An event that has happened."""

    def record(self, stream: object = None) -> None:
        """Does nothing."""

    def synchronize(self) -> None:
        """Does nothing."""


class NoStream(nullcontext[None]):
    """A stream on which nothing runs."""

    def wait_event(self, event: NoEvent) -> None:
        """Does nothing."""


class NoStreams:
    """The streams of a device that does nothing."""

    def __init__(self, device: torch.device) -> None:
        self.side_stream = NoStream()
        self.up_stream = NoStream()
        self.down_stream = NoStream()
        self._blocks: dict[int, Iterator[Tensor]] = {}

    def current(self) -> NoStream:
        """Returns a stream."""
        return self.up_stream

    def entered(self, stream: NoStream) -> NoStream:
        """Returns a context that does nothing."""
        return stream

    def event(self) -> NoEvent:
        """Returns an event."""
        return NoEvent()

    def keep(self, tensor: Tensor, stream: NoStream) -> None:
        """Does nothing."""

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns a tensor in one of eight blocks, in turn.

        A step has fewer tensors at once. Torch's allocator of pinned memory, too, gives
        freed blocks out again, with sizes that are powers of two
        (``CachingHostAllocatorImpl``, torch 2.13): their pages are not new ones.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        block_bytes = 1 << max(num_bytes - 1, 0).bit_length()
        if block_bytes not in self._blocks:
            blocks = []
            for _ in range(8):
                blocks.append(torch.zeros(block_bytes, dtype=torch.uint8))
            self._blocks[block_bytes] = itertools.cycle(blocks)
        block = next(self._blocks[block_bytes])
        tensor = block[:num_bytes].view(dtype).view(tuple(shape))
        return tensor.as_subclass(Pinned)


class NoKernels:
    """The kernels of a device that does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None

    def sort(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the slots as they are."""
        return slots, slots


def make_group(rows: int) -> PooledGroup:
    """Returns a group whose tables have ``rows`` rows each."""
    ids = torch.arange(1, rows + 1)
    tables = []
    for number in range(TABLES):
        table = Table(
            DIM,
            optimizer=RowWiseAdagrad(0.01),
            name=f"t{number}",
        )
        for part in ids.split(1 << 18):
            table.lookup(part, train=True)
        tables.append(table)
    return PooledGroup(tables, range(TABLES), "sum")


def modelled_ms(one_thread_ms: float, all_threads_ms: float, cores: int) -> float:
    """Returns the milliseconds of a step with ``cores`` cores, by Amdahl's law.

    There are at least two threads.
    """
    threads = torch.get_num_threads()
    parallel_ms = (one_thread_ms - all_threads_ms) / (1 - 1 / threads)
    serial_ms = one_thread_ms - parallel_ms
    return serial_ms + parallel_ms / cores


def run(
    rows: int,
    device_rows: int,
    steps: int,
    warm_up: int,
    cores: int,
) -> None:
    """Measures and prints the JSON row."""
    streams_by_type["meta"] = NoStreams  # type: ignore[assignment]
    kernels_by_type["meta"] = NoKernels  # type: ignore[assignment]
    generator = torch.Generator().manual_seed(0)
    host = make_group(rows)
    device = make_group(rows)
    device.put_on_device(META, [device_rows] * TABLES)
    to = CopyTarget(META, torch.float32)
    offsets = torch.arange(TABLES * BATCH + 1)
    grad = torch.randn((BATCH, TABLES * DIM), generator=generator) * 0.01
    batches: dict[int, Tensor] = {}

    def ids_of(step: int) -> Tensor:
        if step not in batches:
            batches.clear()
            count = TABLES * BATCH
            batches[step] = zipf(count, generator, population=rows)
        return batches[step]

    def trained(group: PooledGroup, step: int) -> tuple[float, float]:
        ids = ids_of(step)
        target = to if group is device else None
        out_grad = grad.to(META) if group is device else grad
        begin = clock()
        out = group(ids, offsets, train=True, to=target)
        middle = clock()
        out.backward(out_grad)
        return middle - begin, clock() - middle

    def resolved(step: int) -> tuple[float, float]:
        ids = ids_of(step)
        begin = clock()
        context = ops.group_begin(host.handle, ids, offsets, None)
        seconds = clock() - begin
        del context  # the pass ends
        return seconds, 0.0

    sides = {
        "host": lambda step: trained(host, step),
        "device": lambda step: trained(device, step),
        "resolve": resolved,
    }
    timings = interleave(sides, steps, warm_up=warm_up)
    # The same sides, so that the caches are as cold as before.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    timings_of_one = interleave(sides, steps, warm_up=5)
    torch.set_num_threads(threads)
    timings["device_one_thread"] = timings_of_one["device"]
    assert device.device_rows is not None
    row: dict[str, object] = {
        "benchmark": "device_host",
        "rows": rows,
        "device_rows": device_rows,
        "passes_on_device": device.device_rows.passes,
    }
    totals_ms = {}
    for side, side_timings in timings.items():
        spreads = pass_spreads(side_timings)
        row[side] = spreads
        totals_ms[side] = spreads["total_ms"]["median"]
    if threads > 1:
        row["cores"] = cores
        row["modelled_ms"] = round(
            modelled_ms(totals_ms["device_one_thread"], totals_ms["device"], cores), 2
        )
    emit(row)


def main() -> None:
    """Runs the benchmark with the arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--device-rows", type=int, default=30_000)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm-up", type=int, default=200)
    parser.add_argument("--cores", type=int, default=16)
    arguments = parser.parse_args()
    run(
        arguments.rows,
        arguments.device_rows,
        arguments.steps,
        arguments.warm_up,
        arguments.cores,
    )


if __name__ == "__main__":
    main()
