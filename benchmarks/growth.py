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


def grow(
    table: Table,
    rows: int,
    batch: int,
    first: int = 0,
) -> list[float]:
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


def mixed_steps(table: Table, rows: int, batch: int) -> list[float]:
    """Returns the seconds of steps with one tenth of new ids."""
    seconds = []
    num_new = batch // 10
    for i in range(20):
        first_new = rows + i * batch // 10
        new_ids = first_new + torch.arange(num_new)
        old_ids = torch.randint(0, rows, (batch - num_new,))
        ids = torch.cat([old_ids, new_ids])
        order = torch.randperm(len(ids))
        ids = ids[order]
        start = clock()
        table.lookup(ids, train=True)
        seconds.append(clock() - start)
    return seconds


def slowest_over_median(seconds: list[float]) -> float:
    """Returns the longest step divided by the median one."""
    slowest_ms = max(seconds) * 1e3
    median_ms = spread(seconds)["median"]
    return round(slowest_ms / median_ms, 2)


def main() -> None:
    """Runs the measurement and prints the JSON row."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--batch", type=int, default=100_000)
    arguments = parser.parse_args()
    rows = arguments.rows
    batch = arguments.batch
    table = Table(DIM, optimizer=RowWiseAdagrad())
    # starts the threads and allocates buffers
    table.lookup(torch.arange(-batch, 0), train=True)
    steps = grow(table, rows, batch)
    mixed = mixed_steps(table, rows, batch)

    regrown_rows = rows * 9 // 20 // batch * batch
    ids = table.ids()
    removed_places = torch.randperm(len(ids))[:regrown_rows]
    table.remove(ids[removed_places])
    regrown = grow(
        table,
        regrown_rows,
        batch,
        first=2**40,
    )

    bare = touch(len(steps), batch * (DIM * 4 + 32))
    emit(
        {
            "benchmark": "growth",
            "rows": rows,
            "batch": batch,
            "step_ms": spread(steps),
            "slowest_step_ms": round(max(steps) * 1e3, 2),
            "slowest_over_median": slowest_over_median(steps),
            "slowest_over_median_without_first_touch": slowest_over_median(regrown),
            "bare_touch_ms": spread(bare),
            "bare_touch_slowest_over_median": slowest_over_median(bare),
            "new_rows_per_second": round(rows / sum(steps)),
            "new_rows_per_second_without_first_touch": round(
                regrown_rows / sum(regrown)
            ),
            "mixed_step_ms": spread(mixed),
        }
    )


if __name__ == "__main__":
    main()
