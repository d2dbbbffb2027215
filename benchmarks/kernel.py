r"""Compares RecStore's pooled group with FBGEMM's CPU tables.

    python benchmarks/kernel.py [--cases criteo,big] \
        [--optimizers rowwise_adagrad] [--steps 20]

It is also compared with the limit of the machine. Prints one JSON row for each case and
optimizer, with the milliseconds of forward and backward and the ratios FBGEMM /
RecStore. Both sides get the same ids and gradients, and their steps are interleaved in
one process. The side ``ahead`` is RecStore with slots that a prefetch has resolved
before the measured step. The ratios to the limit are those of the forward to a gather
and of the backward to a scatter of the same rows. ``benchmarks/run.py`` runs the
benchmark in each lane (see measure.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import limit
import torch
from measure import Timing, clock, emit, interleave, spread
from torch import Tensor

from torchrec_recstore.kernels import PooledGroup
from torchrec_recstore.optim import SGD, Adagrad, Optimizer, RowWiseAdagrad
from torchrec_recstore.store import Table

OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": SGD(0.01),
    "adagrad": Adagrad(0.01),
    "rowwise_adagrad": RowWiseAdagrad(0.01),
}


@dataclass(frozen=True)
class Case:
    """The shape of a case.

    It has ``tables`` x ``batch`` bags of ``length`` ids on average, and ``rows`` rows
    in a table.
    """

    tables: int
    dim: int
    batch: int
    rows: int
    length: int = 1
    weighted: bool = False
    zipf: bool = False
    pooled: bool = True
    optimizers: tuple[str, ...] = ("rowwise_adagrad",)


CASES = {
    "criteo": Case(
        tables=26,
        dim=64,
        batch=8192,
        rows=300_000,
        optimizers=("sgd", "adagrad", "rowwise_adagrad"),
    ),
    "zipf": Case(
        tables=26,
        dim=64,
        batch=8192,
        rows=300_000,
        zipf=True,
    ),
    "big": Case(
        tables=1,
        dim=64,
        batch=213_000,
        rows=8_000_000,
        optimizers=("sgd", "adagrad", "rowwise_adagrad"),
    ),
    "big_7m": Case(
        tables=1,
        dim=64,
        batch=213_000,
        rows=7_000_000,
        optimizers=("sgd", "rowwise_adagrad"),
    ),
    "big_3m3": Case(
        tables=1,
        dim=64,
        batch=213_000,
        rows=3_300_000,
    ),
    "multihot": Case(
        tables=8,
        dim=128,
        batch=2048,
        rows=300_000,
        length=20,
        weighted=True,
    ),
    "small": Case(
        tables=26,
        dim=16,
        batch=512,
        rows=100_000,
    ),
    "sequence": Case(
        tables=1,
        dim=64,
        batch=200_000,
        rows=2_000_000,
        pooled=False,
    ),
}
BATCHES = 8


@dataclass
class Batch:
    """A batch.

    ``ids`` are for RecStore; ``rows`` are the same ids as row numbers of FBGEMM's fixed
    tables.
    """

    ids: Tensor
    rows: Tensor
    offsets: Tensor
    weights: Tensor | None


def zipf(
    n: int,
    generator: torch.Generator,
    exponent: float = 1.05,
    population: int = 2**40,
) -> Tensor:
    """Returns (n,) int64 that follow a Zipf law over ``population``.

    The integral of its density is inverted.
    """
    uniform = torch.rand(n, generator=generator, dtype=torch.float64)
    power = 1 - exponent
    tail = float(population) ** power
    remaining = 1 - uniform * (1 - tail)
    ranks = remaining.pow(1 / power)
    return ranks.long().clamp(1, population)


def random_ids(
    case: Case,
    n: int,
    generator: torch.Generator,
) -> Tensor:
    """Returns the ids of a batch, (n,) int64."""
    if case.zipf:
        return zipf(n, generator)
    return torch.randint(0, case.rows, (n,), generator=generator)


def make_batches(case: Case, generator: torch.Generator) -> list[Batch]:
    """Returns ``BATCHES`` batches. The ids of a batch are ordered by feature."""
    bags = case.tables * case.batch
    first_offset = torch.zeros(1, dtype=torch.int64)
    batches = []
    for _ in range(BATCHES):
        if case.length == 1:
            lengths = torch.ones(bags, dtype=torch.int64)
        else:
            too_long = 2 * case.length + 1
            lengths = torch.randint(0, too_long, (bags,), generator=generator)
        ends = lengths.cumsum(0)
        offsets = torch.cat([first_offset, ends])

        n = int(offsets[-1])
        ids = random_ids(case, n, generator)
        weights = None
        if case.weighted:
            weights = torch.rand(n, generator=generator)
        batch = Batch(
            ids=ids,
            rows=ids % case.rows,
            offsets=offsets,
            weights=weights,
        )
        batches.append(batch)
    return batches


def recstore(
    case: Case,
    batches: list[Batch],
    optimizer: Optimizer,
) -> tuple[list[Table], PooledGroup]:
    """Returns tables with all ids of the batches, and their group.

    They have as many rows as the case.
    """
    tables = []
    for number in range(case.tables):
        table = Table(
            case.dim,
            optimizer=optimizer,
            name=f"t{number}",
        )
        tables.append(table)
    for number, table in enumerate(tables):
        row_ids = torch.randperm(case.rows)
        for part in row_ids.split(1 << 20):
            table.lookup(part, train=True)

        first_bag = number * case.batch
        for batch in batches:
            begin = batch.offsets[first_bag]
            end = batch.offsets[first_bag + case.batch]
            table.lookup(batch.ids[begin:end], train=True)
    group = PooledGroup(tables, range(case.tables), "sum")
    return tables, group


def fbgemm(case: Case, optimizer: str) -> Any:
    """Returns FBGEMM tables of ``case.rows`` rows, initialized as in TorchRec."""
    # threads.py, which shares the other functions, needs torch alone.
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
        EmbeddingLocation,
        PoolingMode,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    spec = (
        case.rows,
        case.dim,
        EmbeddingLocation.HOST,
        ComputeDevice.CPU,
    )
    pooling_mode = PoolingMode.SUM if case.pooled else PoolingMode.NONE
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [spec] * case.tables,
        optimizer=EmbOptimType[f"EXACT_{optimizer.upper()}"],
        learning_rate=0.01,
        eps=1e-8,
        pooling_mode=pooling_mode,
        device=torch.device("cpu"),
    )
    for weights in module.split_embedding_weights():
        weights.data.uniform_(-0.01, 0.01)
    return module


def step(
    forward: Callable[[], Tensor],
    grads: dict[torch.Size, Tensor],
) -> tuple[float, float]:
    """Returns the seconds of forward and of backward.

    The output is freed after both.
    """
    begin = clock()
    out = forward()
    middle = clock()
    out.backward(grads[out.shape])
    end = clock()
    return middle - begin, end - middle


def limits(case: Case, batches: list[Batch]) -> Callable[[int], tuple[float, float]]:
    """Returns a function that measures the limit of the machine.

    It is a gather, and a gather and scatter, of rows in one array by slot.
    """
    rows = limit.empty(case.tables * case.rows, case.dim)
    rows.uniform_(-0.01, 0.01)

    table_of_bag = torch.arange(case.tables).repeat_interleave(case.batch)
    slots = []
    distinct_slots = []
    for batch in batches:
        lengths = batch.offsets.diff()
        table_of_id = table_of_bag.repeat_interleave(lengths)
        batch_slots = batch.rows + table_of_id * case.rows
        slots.append(batch_slots.to(torch.int32))
    for batch_slots in slots:
        distinct = batch_slots.unique()
        order = torch.randperm(len(distinct))
        distinct_slots.append(distinct[order])

    most_ids = max(len(batch_slots) for batch_slots in slots)
    values = limit.empty(most_ids, case.dim).zero_()

    def side(i: int) -> tuple[float, float]:
        number = i % BATCHES
        begin = clock()
        limit.gather(rows, slots[number], values)
        middle = clock()
        limit.scatter(rows, distinct_slots[number], values)
        end = clock()
        return middle - begin, end - middle

    return side


def run(name: str, optimizer: str, steps: int) -> None:
    """Measures one case and prints its JSON row."""
    case = CASES[name]
    generator = torch.Generator().manual_seed(0)
    batches = make_batches(case, generator)
    _tables, group = recstore(case, batches, OPTIMIZERS[optimizer])
    reference = fbgemm(case, optimizer)
    grads = gradients(case, batches, generator)

    def recstore_step(i: int) -> tuple[float, float]:
        batch = batches[i % BATCHES]
        return step(
            lambda: group(batch.ids, batch.offsets, batch.weights, train=True),
            grads,
        )

    def ahead_step(i: int) -> tuple[float, float]:
        # not the batch that has just been looked up
        batch = batches[(i + BATCHES // 2) % BATCHES]
        first_offsets = batch.offsets[:: case.batch]
        group.prefetch(batch.ids, first_offsets.diff().tolist())
        return step(
            lambda: group(batch.ids, batch.offsets, batch.weights, train=True),
            grads,
        )

    def fbgemm_step(i: int) -> tuple[float, float]:
        batch = batches[i % BATCHES]
        return step(
            lambda: reference(batch.rows, batch.offsets, batch.weights),
            grads,
        )

    sides = {
        "recstore": recstore_step,
        "fbgemm": fbgemm_step,
        "ahead": ahead_step,
        "limit": limits(case, batches),
    }
    timings = interleave(sides, steps, warm_up=BATCHES)
    emit(
        {
            "benchmark": "kernel",
            "case": name,
            "optimizer": optimizer,
            "ids": len(batches[0].ids),
            **compared(timings),
        }
    )


def gradients(
    case: Case,
    batches: list[Batch],
    generator: torch.Generator,
) -> dict[torch.Size, Tensor]:
    """Returns a gradient for each shape of the output.

    The output is pooled, or has a row for each id of a batch.
    """
    shapes = [torch.Size((case.batch, case.tables * case.dim))]
    for batch in batches:
        shapes.append(torch.Size((len(batch.ids), case.dim)))
    grads = {}
    for shape in shapes:
        grads[shape] = torch.randn(shape, generator=generator) * 0.01
    return grads


def pass_spreads(timings: list[Timing]) -> dict[str, dict[str, float]]:
    """Returns the milliseconds of forward, of backward, and of both."""
    return {
        "forward_ms": spread([forward for forward, _ in timings]),
        "backward_ms": spread([backward for _, backward in timings]),
        "total_ms": spread([sum(timing) for timing in timings]),
    }


def compared(timings: dict[str, list[Timing]]) -> dict[str, object]:
    """Returns the milliseconds of each side, and their ratios."""
    spreads: dict[str, dict[str, dict[str, float]]] = {}
    for side, side_timings in timings.items():
        spreads[side] = pass_spreads(side_timings)

    def ratio(numerator: str, denominator: str, part: str) -> float:
        numerator_ms = spreads[numerator][part]["median"]
        denominator_ms = spreads[denominator][part]["median"]
        return round(numerator_ms / denominator_ms, 2)

    return {
        **spreads,
        "forward_over_fbgemm": ratio("fbgemm", "recstore", "forward_ms"),
        "total_over_fbgemm": ratio("fbgemm", "recstore", "total_ms"),
        "forward_over_limit": ratio("recstore", "limit", "forward_ms"),
        "forward_ahead_over_limit": ratio("ahead", "limit", "forward_ms"),
        "backward_over_limit": ratio("recstore", "limit", "backward_ms"),
    }


def main() -> None:
    """Runs the requested cases."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument(
        "--optimizers",
        default="",
        help="default: the optimizers of each case",
    )
    parser.add_argument("--steps", type=int, default=24)
    arguments = parser.parse_args()
    for name in arguments.cases.split(","):
        optimizers = CASES[name].optimizers
        if arguments.optimizers:
            optimizers = arguments.optimizers.split(",")
        for optimizer in optimizers:
            run(name, optimizer, arguments.steps)


if __name__ == "__main__":
    main()
