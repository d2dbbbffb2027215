"""Measures the growth of a table: only new ids from 0 to ``--rows`` rows, then a mix of
new and known ids.

    python benchmarks/growth.py [--rows 10000000] [--batch 100000]

Prints one JSON row with the median and the slowest step, the rows per second, and the
rows per second without the first touch of memory. For the last figure, fewer than half
of the rows are removed, so that the table keeps their memory, and the same number of
other new ids is looked up. The index does not grow then.
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
    """Looks up ``batch`` new ids in each step and returns the time of each step in
    seconds.
    """
    seconds = []
    for begin in range(first, first + rows, batch):
        ids = torch.randperm(batch) + begin
        start = clock()
        table.lookup(ids, train=True)
        seconds.append(clock() - start)
    return seconds


def touch(pieces: int, bytes_each: int) -> list[float]:
    """Touches fresh memory in huge pages, without a table.

    Returns:
        The time of each piece in seconds.
    """
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
    """Runs the measurement and prints the JSON row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--batch", type=int, default=100_000)
    arguments = parser.parse_args()
    table = Table(DIM, optimizer=RowWiseAdagrad())
    # starts the threads and allocates buffers
    table.lookup(torch.arange(-arguments.batch, 0), train=True)
    steps = grow(table, arguments.rows, arguments.batch)
    mixed = []
    new_ids = arguments.batch // 10
    for i in range(20):
        first_new = arguments.rows + i * arguments.batch // 10
        new = first_new + torch.arange(new_ids)
        old = torch.randint(0, arguments.rows, (arguments.batch - new_ids,))
        ids = torch.cat([old, new])
        ids = ids[torch.randperm(len(ids))]
        start = clock()
        table.lookup(ids, train=True)
        mixed.append(clock() - start)
    again_rows = arguments.rows * 9 // 20 // arguments.batch * arguments.batch
    ids = table.ids()
    table.remove(ids[torch.randperm(len(ids))[:again_rows]])
    again = grow(table, again_rows, arguments.batch, first=2**40)
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
            "slowest_over_median_without_first_touch": round(
                max(again) * 1e3 / spread(again)["median"], 2
            ),
            "bare_touch_ms": spread(bare),
            "bare_touch_slowest_over_median": round(
                max(bare) * 1e3 / spread(bare)["median"], 2
            ),
            "new_rows_per_second": round(arguments.rows / sum(steps)),
            "new_rows_per_second_without_first_touch": round(again_rows / sum(again)),
            "mixed_step_ms": spread(mixed),
        }
    )


if __name__ == "__main__":
    main()
