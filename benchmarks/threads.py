r"""Measures how the steps of RecStore's pooled group become faster with threads.

    python benchmarks/threads.py [--threads 1,2,4,8,16] [--batches 8192,65536] \
        [--dim 64] [--steps 20]

It needs torch alone. Prints a JSON row for each batch size and number of threads, and
then a table. ``forward`` and ``backward`` are those of 26 tables whose rows are there,
with row-wise Adagrad. ``new rows`` is the forward of a batch whose ids are all new, in
tables that are empty at the beginning of each eighth step. ``evicting``, ``not
admitted`` and ``expiring`` are forwards of tables with bounds, a third of whose ids are
new. ``save`` reads the rows of one table of 300,000 rows, as a checkpoint does. ``first
touch`` fills fresh memory of the size of the new rows. ``gather`` and ``scatter`` move
the same rows of one array by known slots, as kernel.py does: they are the limit of the
machine, which has fewer memory channels than processors. The steps of all numbers of
threads are interleaved.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import limit
import torch
from kernel import (
    BATCHES,
    CASES,
    OPTIMIZERS,
    Batch,
    Case,
    limits,
    make_batches,
    recstore,
    step,
)
from measure import Side, Timing, clock, emit, interleave, spread
from torch import Tensor

from torchrec_recstore import LRU, Expiry, MinFrequency, TableOptions
from torchrec_recstore.kernels import PooledGroup
from torchrec_recstore.store import Table

BOUNDS = ("evicting", "not admitted", "expiring")
PARTS = (
    "forward",
    "backward",
    "new rows",
    *BOUNDS,
    "save",
    "first touch",
    "gather",
    "scatter",
)


def new_rows(case: Case) -> Callable[[int], float]:
    """Returns a function that looks up a batch of new ids in tables that grow.

    The function returns the seconds.
    """
    offsets = torch.arange(case.tables * case.batch + 1)
    group: PooledGroup | None = None

    def side(i: int) -> float:
        nonlocal group
        if group is None or i % BATCHES == 0:  # so that the rows fit into memory
            tables = []
            for number in range(case.tables):
                table = Table(
                    case.dim,
                    optimizer=OPTIMIZERS["rowwise_adagrad"],
                    name=f"n{number}",
                )
                tables.append(table)
            group = PooledGroup(tables, range(case.tables), "sum")
        first = (i % BATCHES) * len(offsets)
        numbers = torch.arange(len(offsets) - 1) + first
        ids = numbers * 7919
        begin = clock()
        group(ids, offsets, train=True)
        return clock() - begin

    return side


def options_of(bound: str, case: Case) -> TableOptions:
    """Returns the options of the tables of a part."""
    if bound == "evicting":
        return TableOptions(max_rows=2 * case.batch, eviction=LRU())
    if bound == "not admitted":
        return TableOptions(admission=MinFrequency(2, counter_bytes=2**26))
    return TableOptions(expiry=Expiry(steps=8))


def bounded(
    bound: str,
    case: Case,
    batches: list[Batch],
    grads: dict[torch.Size, Tensor],
) -> Callable[[int], float]:
    """Returns a function that looks up a batch in tables with a bound.

    A third of its ids are new. The function returns the seconds.
    """
    optimizer = OPTIMIZERS["rowwise_adagrad"]
    options = options_of(bound, case)
    tables = []
    for number in range(case.tables):
        table = Table(
            case.dim,
            optimizer=optimizer,
            options=options,
            name=f"b{number}",
        )
        tables.append(table)
    group = PooledGroup(tables, range(case.tables), "sum")

    def side(i: int) -> float:
        batch = batches[i % BATCHES]
        count = len(batch.ids)
        places = torch.arange(count)
        first_new = (i + 1) * count
        new_ids = (places + first_new) * 7919
        few_ids = batch.ids % case.batch
        ids = torch.where(places % 3 == 0, new_ids, few_ids)
        forward_s, _ = step(
            lambda: group(ids, batch.offsets, batch.weights, train=True),
            grads,
        )
        return forward_s

    return side


def save(table: Table) -> float:
    """Reads all rows of a table as a checkpoint does, and returns the seconds."""
    with table.snapshot() as snapshot:
        begin = clock()
        snapshot.read(len(snapshot))
        return clock() - begin


def first_touch(case: Case) -> float:
    """Fills fresh memory in huge pages, and returns the seconds."""
    begin = clock()
    limit.empty(case.tables * case.batch, case.dim).zero_()
    return clock() - begin


def measure(case: Case, threads: list[int], steps: int) -> list[dict[str, Any]]:
    """Returns a row for each number of threads."""
    generator = torch.Generator().manual_seed(0)
    batches = make_batches(case, generator)
    tables, group = recstore(case, batches, OPTIMIZERS["rowwise_adagrad"])
    shape = torch.Size((case.batch, case.tables * case.dim))
    grads = {shape: torch.randn(shape, generator=generator) * 0.01}
    bare = limits(case, batches)

    def side(count: int) -> Side:
        grow = new_rows(case)
        bounds = [bounded(bound, case, batches, grads) for bound in BOUNDS]

        def run(i: int) -> Timing:
            torch.set_num_threads(count)
            batch = batches[i % BATCHES]
            # wakes the threads of this number
            group(batch.ids, batch.offsets, batch.weights, train=False)
            forward_s, backward_s = step(
                lambda: group(batch.ids, batch.offsets, batch.weights, train=True),
                grads,
            )
            seconds = [forward_s, backward_s, grow(i)]
            for bound_side in bounds:
                seconds.append(bound_side(i))
            seconds.append(save(tables[0]))
            seconds.append(first_touch(case))
            seconds += bare(i)
            return tuple(seconds)

        return run

    sides = {str(count): side(count) for count in threads}
    # Rows expire from the ninth step on.
    timings = interleave(sides, steps, warm_up=9)
    rows = []
    for count in threads:
        timings_of_count = timings[str(count)]
        row: dict[str, Any] = {"batch": case.batch, "threads": count}
        for place, part in enumerate(PARTS):
            part_seconds = [timing[place] for timing in timings_of_count]
            row[part] = spread(part_seconds)
        rows.append(row)
    return rows


def main() -> None:
    """Runs the requested batch sizes and prints the speeds over one thread."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    powers = range(torch.get_num_threads().bit_length())
    all_threads = ",".join(str(2**power) for power in powers)
    parser.add_argument("--threads", default=all_threads)
    parser.add_argument("--batches", default="8192,65536")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    threads = [int(count) for count in arguments.threads.split(",")]
    lines = [
        f"| batch | threads | {' | '.join(PARTS)} |",
        f"| --- | --- |{' --- |' * len(PARTS)}",
    ]
    for batch in arguments.batches.split(","):
        case = replace(
            CASES["criteo"],
            batch=int(batch),
            dim=arguments.dim,
        )
        rows = measure(case, threads, arguments.steps)
        for row in rows:
            torch.set_num_threads(row["threads"])  # a condition that each row states
            emit({"benchmark": "threads", "dim": arguments.dim, **row})
            cells = [batch, str(row["threads"])]
            for part in PARTS:
                median_ms = row[part]["median"]
                speedup = rows[0][part]["median"] / median_ms
                cells.append(f"{median_ms:.2f} ms, {speedup:.2f}x")
            lines.append(f"| {' | '.join(cells)} |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
