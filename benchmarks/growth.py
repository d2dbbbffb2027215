"""Growth: new ids only from 0 to ``--rows`` rows, then a mix of new and known ones.

    python benchmarks/growth.py [--rows 10000000] [--batch 100000]

One JSON row: median and slowest step, rows a second, and rows a second without the machine's first touch of memory: all
rows but one are then removed, which keeps the memory, and as many other new ids are looked up again.
"""

from __future__ import annotations

import argparse
import mmap

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


def touch(pieces: int, bytes_each: int) -> list[float]:
    """Seconds that the machine takes to hand out fresh memory in huge pages, piece by piece, with no table in it."""
    memory = mmap.mmap(-1, pieces * bytes_each)
    memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    seconds = []
    for piece in tensor.split(bytes_each):
        start = clock()
        piece.fill_(1)
        seconds.append(clock() - start)
    return seconds


def main() -> None:
    """Measures and prints the row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--batch", type=int, default=100_000)
    arguments = parser.parse_args()
    table = Table(DIM, optimizer=RowWiseAdagrad())
    table.lookup(torch.arange(-arguments.batch, 0), train=True)  # wakes the threads and makes the first buffers
    steps = grow(table, arguments.rows, arguments.batch)
    mixed = []
    for i in range(20):
        new = arguments.rows + i * arguments.batch // 10 + torch.arange(arguments.batch // 10)
        ids = torch.cat([torch.randint(0, arguments.rows, (arguments.batch - len(new),)), new])
        ids = ids[torch.randperm(len(ids))]
        start = clock()
        table.lookup(ids, train=True)
        mixed.append(clock() - start)
    table.remove(table.ids()[1:])
    again = grow(table, arguments.rows, arguments.batch, first=2**40)
    timing = spread(steps)
    bare = touch(len(steps), arguments.batch * (DIM * 4 + 32))
    emit(
        {
            "benchmark": "growth",
            "rows": arguments.rows,
            "batch": arguments.batch,
            "step_ms": timing,
            "slowest_step_ms": round(max(steps) * 1e3, 2),
            "slowest_over_median": round(max(steps) * 1e3 / timing["median"], 2),
            "slowest_over_median_without_first_touch": round(max(again) * 1e3 / spread(again)["median"], 2),
            "bare_touch_ms": spread(bare),
            "bare_touch_slowest_over_median": round(max(bare) * 1e3 / spread(bare)["median"], 2),
            "new_rows_per_second": round(arguments.rows / sum(steps)),
            "new_rows_per_second_without_first_touch": round(arguments.rows / sum(again)),
            "mixed_step_ms": spread(mixed),
        }
    )


if __name__ == "__main__":
    main()
