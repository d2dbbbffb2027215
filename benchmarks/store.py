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
from measure import clock, emit, interleave, ratios, spread, step_seconds

from torchrec_recstore.store import Table

DIM = 128
BATCH = 500


def rates(
    table: Table,
    dense: torch.Tensor,
    ids: torch.Tensor,
    steps: int,
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
    lookup_rates = [1 / seconds for seconds in step_seconds(timings["table"])]
    per_second = spread(lookup_rates, scale=1e-6)
    speedups = spread(ratios(timings["dense"], timings["table"]), scale=1)
    return {
        "million_ids_per_second": {
            "median": round(per_second["median"], 2),
            "p10": round(per_second["p10"], 2),
        },
        "over_index_select": {key: round(value, 3) for key, value in speedups.items()},
    }


def main() -> None:
    """Runs the measurement and prints the JSON row."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
    hot_rows_of_suffix = {"": rows, "_10k_hot_rows": 10_000}
    for suffix, num_hot in hot_rows_of_suffix.items():
        # The hot rows are anywhere in the table, and so they are in the dense tensor.
        hot_ids = torch.randperm(rows)[:num_hot]
        places = torch.randint(0, num_hot, (1000 * BATCH,))
        measured = rates(
            table,
            dense,
            hot_ids[places],
            20,
        )
        per_second = measured["million_ids_per_second"]
        row[f"million_ids_per_second_one_thread{suffix}"] = per_second
        row[f"over_index_select{suffix}"] = measured["over_index_select"]
    torch.set_num_threads(threads)
    emit(row)


if __name__ == "__main__":
    main()
