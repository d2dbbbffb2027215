"""Growth: new ids only from 0 to ``--rows`` rows, then a mix of new and known ones.

    python benchmarks/growth.py [--rows 10000000] [--batch 100000]

One JSON row: median and slowest step, rows a second, and rows a second without the machine's first touch of memory,
measured by filling a second table whose memory was given back to malloc's kernel and touched before.
"""

from __future__ import annotations

import argparse

import torch
from measure import clock, emit, spread

from torchrec_recstore.optim import RowWiseAdagrad
from torchrec_recstore.store import Table

DIM = 64


def grow(table: Table, rows: int, batch: int, first: int = 0) -> list[float]:
    """Seconds of each step that looks ``batch`` new ids up."""
    seconds = []
    for begin in range(first, first + rows, batch):
        ids = torch.randperm(batch) + begin
        start = clock()
        table.lookup(ids, train=True)
        seconds.append(clock() - start)
    return seconds


def first_touch_seconds(size: int) -> float:
    """Seconds that the machine takes to hand out ``size`` bytes in huge pages, touched by as many threads."""
    import mmap

    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(mmap.MADV_HUGEPAGE)
    pages = torch.frombuffer(block, dtype=torch.uint8)[::4096]
    start = clock()
    pages.fill_(1)
    return clock() - start


def main() -> None:
    """Measures and prints the row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--batch", type=int, default=100_000)
    arguments = parser.parse_args()
    table = Table(DIM, optimizer=RowWiseAdagrad())
    table.lookup(torch.arange(-arguments.batch, 0), train=True)  # wakes the threads and makes the first buffers
    steps = grow(table, arguments.rows, arguments.batch)
    size = table.stats().bytes
    touch = first_touch_seconds(size)
    mixed = []
    for i in range(20):
        new = arguments.rows + i * arguments.batch // 10 + torch.arange(arguments.batch // 10)
        ids = torch.cat([torch.randint(0, arguments.rows, (arguments.batch - len(new),)), new])
        ids = ids[torch.randperm(len(ids))]
        start = clock()
        table.lookup(ids, train=True)
        mixed.append(clock() - start)
    total, timing = sum(steps), spread(steps)
    emit(
        {
            "benchmark": "growth",
            "rows": arguments.rows,
            "batch": arguments.batch,
            "step_ms": timing,
            "slowest_step_ms": round(max(steps) * 1e3, 2),
            "slowest_over_median": round(max(steps) * 1e3 / timing["median"], 2),
            "new_rows_per_second": round(arguments.rows / total),
            "first_touch_seconds": round(touch, 3),
            "new_rows_per_second_without_first_touch": round(arguments.rows / max(total - touch, 1e-9)),
            "mixed_step_ms": spread(mixed),
        }
    )


if __name__ == "__main__":
    main()
