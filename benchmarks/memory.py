"""Compares the resident memory of a table with its payload.

    python benchmarks/memory.py [--rows 2000000,7000000]

The payload is the weights and the optimizer state. Prints one JSON row for each number
of rows: the increase of the process's resident memory, divided by the payload.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from measure import emit

from torchrec_recstore.optim import RowWiseAdagrad
from torchrec_recstore.store import Table

DIM = 64
PAYLOAD = DIM * 4 + 4  # fp32 weights and one number of row-wise Adagrad


def resident_bytes() -> int:
    """Returns the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def measure(rows: int) -> None:
    """Fills a table with this many rows and prints the JSON row."""
    table = Table(DIM, optimizer=RowWiseAdagrad())
    warm_up_table = Table(DIM, optimizer=RowWiseAdagrad())
    step = 20_000
    ids = torch.empty(step, dtype=torch.int64)
    # The steps of another table allocate the buffers of the process, which then count
    # before and after.
    torch.arange(step, out=ids)
    for _ in range(101):
        warm_up_table.lookup(ids, train=True)
    first_bytes = resident_bytes()
    for begin in range(0, rows, step):
        torch.arange(begin, begin + step, out=ids)
        table.lookup(ids, train=True)
    row_bytes = (resident_bytes() - first_bytes) / rows
    stated_row_bytes = table.stats().bytes / rows
    emit(
        {
            "benchmark": "memory",
            "rows": rows,
            "resident_bytes_per_row": round(row_bytes, 1),
            "stated_bytes_per_row": round(stated_row_bytes, 1),
            "payload_bytes_per_row": PAYLOAD,
            "resident_over_payload": round(row_bytes / PAYLOAD, 3),
        }
    )


def main() -> None:
    """Runs the measurements."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", default="2000000,7000000")
    for rows in parser.parse_args().rows.split(","):
        measure(int(rows))


if __name__ == "__main__":
    main()
