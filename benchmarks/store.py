"""Measures ``Table.lookup`` in batches of 500 ids with rows of 512 bytes, as the RecStore system publishes it.

    python benchmarks/store.py [--rows 1000000]

Prints one JSON row: the ids per second with one thread and with all threads. RecStore publishes 51.96M ids/s on 16
threads for its fastest index, which is 3.25M per thread, on another machine.
"""

from __future__ import annotations

import argparse

import torch
from measure import clock, emit, spread

from torchrec_recstore.store import Table

DIM = 128
BATCH = 500


def rate(table: Table, batches: list[torch.Tensor], steps: int) -> dict[str, float]:
    """Returns the million ids per second over ``steps`` passes through the batches."""
    seconds = []
    for _ in range(steps):
        start = clock()
        for ids in batches:
            table.lookup(ids)
        seconds.append((clock() - start) / (len(batches) * BATCH))
    timing = spread(seconds, scale=1.0e9)
    return {"median": round(1e3 / timing["median"], 2), "p10": round(1e3 / timing["p90"], 2)}


def main() -> None:
    """Runs the measurement and prints the JSON row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    rows = parser.parse_args().rows
    table = Table(DIM)
    for part in torch.randperm(rows).split(100_000):
        table.lookup(part, train=True)
    uniform = list(torch.randint(0, rows, (1000 * BATCH,)).split(BATCH))
    hot = list(torch.randint(0, 10_000, (1000 * BATCH,)).split(BATCH))
    row: dict[str, object] = {"benchmark": "store", "rows": rows, "batch": BATCH, "row_bytes": DIM * 4}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    row["million_ids_per_second_one_thread"] = rate(table, uniform, 20)
    row["million_ids_per_second_one_thread_10k_hot_rows"] = rate(table, hot, 20)
    torch.set_num_threads(threads)
    emit(row)


if __name__ == "__main__":
    main()
