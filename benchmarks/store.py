"""Measures ``Table.lookup`` in batches of 500 ids with rows of 512 bytes, as the
RecStore system publishes it.

    python benchmarks/store.py [--rows 1000000]

Prints one JSON row: the ids per second with one thread, and the speed over
``torch.index_select(..., out=...)`` of the same rows in a dense tensor, which neither
searches an index nor allocates. The two are interleaved. RecStore publishes 51.96M
ids/s on 16 threads for its fastest index, which is 3.25M per thread, on another
machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from measure import clock, emit, interleave, spread

from torchrec_recstore.store import Table

DIM = 128
BATCH = 500


def rates(
    table: Table, dense: torch.Tensor, ids: torch.Tensor, steps: int
) -> dict[str, dict[str, float]]:
    """Measures ``steps`` passes through the batches of each side.

    Args:
        table: The table.
        dense: (rows, columns) float32. The tensor for ``torch.index_select``.
        ids: (N,) int64. The ids of all batches.
        steps: The number of passes.

    Returns:
        Two spreads: ``million_ids_per_second`` of the table, and ``over_index_select``,
        its speed over the dense tensor's.
    """
    batches = ids.split(BATCH)
    out = torch.empty(BATCH, dense.shape[1])

    def timed(call: Callable[[torch.Tensor], object]) -> Callable[[int], tuple[float]]:
        def side(_: int) -> tuple[float]:
            start = clock()
            for batch in batches:
                call(batch)
            return ((clock() - start) / len(ids),)

        return side

    sides = {
        "table": timed(table.lookup),
        "dense": timed(lambda batch: torch.index_select(dense, 0, batch, out=out)),
    }
    timings = interleave(sides, steps, warm_up=1)
    pairs = zip(timings["dense"], timings["table"], strict=True)
    per_second = spread([1 / t[0] for t in timings["table"]], scale=1e-6)
    over = spread([a[0] / b[0] for a, b in pairs], scale=1)
    return {
        "million_ids_per_second": {
            key: round(per_second[key], 2) for key in ("median", "p10")
        },
        "over_index_select": {key: round(value, 3) for key, value in over.items()},
    }


def main() -> None:
    """Runs the measurement and prints the JSON row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    rows = parser.parse_args().rows
    table = Table(DIM)
    for part in torch.randperm(rows).split(100_000):
        table.lookup(part, train=True)
    dense = torch.randn(rows, DIM)
    row: dict[str, object] = {
        "benchmark": "store",
        "rows": rows,
        "batch": BATCH,
        "row_bytes": DIM * 4,
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for suffix, of in (("", rows), ("_10k_hot_rows", 10_000)):
        # The hot rows are anywhere in the table, and so they are in the dense tensor.
        ids = torch.randperm(rows)[:of][torch.randint(0, of, (1000 * BATCH,))]
        measured = rates(table, dense, ids, 20)
        row[f"million_ids_per_second_one_thread{suffix}"] = measured[
            "million_ids_per_second"
        ]
        row[f"over_index_select{suffix}"] = measured["over_index_select"]
    torch.set_num_threads(threads)
    emit(row)


if __name__ == "__main__":
    main()
