r"""Measures the cost of each option of a table, for docs/options.md.

    python benchmarks/options.py [--rows 200000] [--batch 20000] [--dim 64] \
        [--steps 300]

The work is compared with the same work without the option. Prints a JSON row for each
part. The sides of a part are interleaved in one process. Ratios are computed over
blocks of consecutive steps, so that neither a drift of the machine's speed nor a single
step matters. The benchmark uses one thread and measures its processor time, because it
asks how much work an option adds.

- options_training: Forward and backward of a group over one table of ``--rows`` rows.
  One twentieth of the ids of each batch occur only once. Admission, expiry, narrow rows
  and states, stochastic rounding, the check of gradients and other optimizers are
  compared with float32, row-wise Adagrad and no option.
- options_new_rows: Training lookups of new ids with other initializers, compared with
  ``UniformInit``.
- options_evaluation: Lookups in which half of the ids have no row, ``missing="init"``
  compared with ``missing="zeros"``.
- options_routing: TorchRec's split of a batch's ids over ranks, with ``routing="hash"``
  compared with ``routing="block"``.
- options_optimizers: ``Table.update`` with a user-defined optimizer (``RowOptimizer``),
  compared with the built-in one of the same formula. Bar: 1.3. Needs g++.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import fbgemm_gpu  # noqa: F401  (registers the op that splits ids)
import torch
from measure import Side, Timing, emit, interleave, spread, step_seconds

from torchrec_recstore import ops
from torchrec_recstore.kernels import PooledGroup
from torchrec_recstore.optim import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Optimizer,
    RowOptimizer,
    RowWiseAdagrad,
)
from torchrec_recstore.options import (
    ConstantInit,
    Expiry,
    MinFrequency,
    NormalInit,
    TableOptions,
    UniformInit,
)
from torchrec_recstore.store import Table

ONCE = 0.05  # the fraction of a batch's ids that occur only once
EXPIRY_STEPS = 40
# a multiple of 10, because expired rows are searched for in every tenth step
BLOCK_STEPS = 30
RANKS = 2
HINT = 2**40

BUILT_IN: dict[str, tuple[RowOptimizer, Optimizer]] = {
    "Adagrad": (
        RowOptimizer(
            name="adagrad",
            states={"sum": "element"},
            hyperparameters={"eps": 1e-8},
            step="sum += g * g; w -= lr * g / (sqrt(sum) + eps);",
        ),
        Adagrad(),
    ),
    "RowWiseAdagrad": (
        RowOptimizer(
            name="row_wise_adagrad",
            states={"sum": "row"},
            hyperparameters={"eps": 1e-8},
            row=(
                "sum += row_sum(g * g) / columns; const float rate = lr / (sqrt(sum) +"
                " eps);"
            ),
            step="w -= rate * g;",
        ),
        RowWiseAdagrad(),
    ),
    "Adam": (
        RowOptimizer(
            name="adam",
            states={"exp_avg": "element", "exp_avg_sq": "element"},
            hyperparameters={"beta1": 0.9, "beta2": 0.999, "eps": 1e-8},
            once={
                "rest1": "1 - beta1",
                "rest2": "1 - beta2",
                "rate": "lr / (1 - pow(beta1, t))",
                "bias2": "1 / (1 - pow(beta2, t))",
            },
            step="""
                exp_avg = beta1 * exp_avg + rest1 * g;
                exp_avg_sq = beta2 * exp_avg_sq + rest2 * (g * g);
                w -= rate * exp_avg / (sqrt(exp_avg_sq * bias2) + eps);
            """,
        ),
        Adam(),
    ),
    "Adadelta": (
        RowOptimizer(
            1.0,
            name="adadelta",
            states={"square_avg": "element", "acc_delta": "element"},
            hyperparameters={"rho": 0.9, "eps": 1e-6},
            once={"rest": "1 - rho"},
            step="""
                square_avg = rho * square_avg + rest * (g * g);
                const float delta = sqrt(acc_delta + eps) / sqrt(square_avg + eps) * g;
                acc_delta = rho * acc_delta + rest * (delta * delta);
                w -= lr * delta;
            """,
        ),
        Adadelta(),
    ),
}
"""User-defined optimizers, each with the built-in optimizer of the same formula."""


def over(
    sides: dict[str, Side],
    base: str,
    steps: int,
    warm_up: int,
) -> dict[str, dict[str, float]]:
    """Returns the ratio of each side's time to the time of the base.

    The ratios are those of blocks of steps.
    """
    timings = interleave(sides, steps, warm_up)
    base_blocks = block_seconds(timings[base])
    result = {"base_ms": spread(step_seconds(timings[base]))}
    for name, side_timings in timings.items():
        if name != base:
            blocks = block_seconds(side_timings)
            ratios = []
            for seconds, base_seconds in zip(blocks, base_blocks, strict=True):
                ratios.append(seconds / base_seconds)
            result[name] = spread(ratios, 1)
    return result


def block_seconds(timings: list[Timing]) -> list[float]:
    """Returns the time of each block of steps."""
    seconds = step_seconds(timings)
    return [
        sum(seconds[begin : begin + BLOCK_STEPS])
        for begin in range(0, len(seconds), BLOCK_STEPS)
    ]


def timed(work: Callable[[int], Any]) -> Side:
    """Returns a side that measures ``work``."""

    def step(i: int) -> Timing:
        begin = time.thread_time()
        work(i)
        return (time.thread_time() - begin,)

    return step


def training_tables(dim: int) -> dict[str, Table]:
    """Returns a table for each option of training, by the option's name."""
    return {
        "plain": Table(dim, name="plain"),
        "admission": Table(dim, options=TableOptions(admission=MinFrequency(2))),
        "expiry": Table(dim, options=TableOptions(expiry=Expiry(EXPIRY_STEPS))),
        "float16": Table(dim, torch.float16),
        "bfloat16": Table(dim, torch.bfloat16),
        "bfloat16, stochastic rounding": Table(
            dim,
            torch.bfloat16,
            stochastic_rounding=True,
        ),
        "int8": Table(dim, torch.int8),
        "int8, state in float16": Table(
            dim,
            torch.int8,
            state_dtype=torch.float16,
        ),
        "state in float16": Table(dim, state_dtype=torch.float16),
        'nonfinite="skip"': Table(dim, options=TableOptions(nonfinite="skip")),
        'nonfinite="raise"': Table(dim, options=TableOptions(nonfinite="raise")),
        "SGD": Table(dim, optimizer=SGD()),
        "Adagrad": Table(dim, optimizer=Adagrad()),
        "Adagrad, state in float16": Table(
            dim,
            optimizer=Adagrad(),
            state_dtype=torch.float16,
        ),
        "Adam": Table(dim, optimizer=Adam()),
        "Adam, state in float16": Table(
            dim,
            optimizer=Adam(),
            state_dtype=torch.float16,
        ),
    }


def training(arguments: argparse.Namespace) -> None:
    """Measures training steps and prints the JSON row."""
    rows = arguments.rows
    batch = arguments.batch
    dim = arguments.dim
    generator = torch.Generator().manual_seed(0)
    once = int(ONCE * batch)
    tables = training_tables(dim)
    offsets = torch.arange(batch + 1)
    grads = torch.randn(batch, dim, generator=generator) * 0.01
    batches: dict[int, torch.Tensor] = {}

    def ids_of(step: int) -> torch.Tensor:
        if step not in batches:
            batches.clear()
            frequent = torch.randint(0, rows, (batch - once,), generator=generator)
            new = 2**40 + torch.arange(step * once, (step + 1) * once)
            ids = torch.cat([frequent, new])
            order = torch.randperm(batch, generator=generator)
            batches[step] = ids[order]
        return batches[step]

    def side(table: Table) -> Side:
        group = PooledGroup([table], [0], "sum")

        def step(i: int) -> Timing:
            ids = ids_of(i)
            begin = time.thread_time()
            out = group(ids, offsets, train=True)
            out.backward(grads.to(out.dtype))
            return (time.thread_time() - begin,)

        return step

    for table in tables.values():
        weights = torch.randn(rows, dim, generator=generator) * 0.01
        table.insert(torch.arange(rows), weights)
    sides = {name: side(table) for name, table in tables.items()}
    measured = over(
        sides,
        "plain",
        arguments.steps,
        warm_up=EXPIRY_STEPS * 2,
    )
    resident = {}
    bytes_per_row = {}
    for name, table in tables.items():
        stats = table.stats()
        resident[name] = stats.rows
        bytes_per_row[name] = round(stats.bytes / stats.rows, 1)
    emit(
        {
            "benchmark": "options_training",
            "rows": rows,
            "dim": dim,
            "batch": batch,
            "ids_that_come_once": ONCE,
            "over_plain": measured,
            "resident": resident,
            "bytes_per_row": bytes_per_row,
        }
    )


def new_rows(arguments: argparse.Namespace) -> None:
    """Measures the creation of rows and prints the JSON row."""
    initializers = {
        "UniformInit": UniformInit(-0.01, 0.01),
        "NormalInit": NormalInit(0.0, 0.01),
        "NormalInit, truncated": NormalInit(0.0, 0.01, truncate_std=2.0),
        "ConstantInit": ConstantInit(0.0),
    }
    new = arguments.batch // 4

    def side(initializer: Any) -> Side:
        table = Table(arguments.dim, options=TableOptions(initializer=initializer))
        return timed(
            lambda i: table.lookup(torch.arange(i * new, (i + 1) * new), train=True)
        )

    sides = {name: side(initializer) for name, initializer in initializers.items()}
    measured = over(sides, "UniformInit", arguments.steps, BLOCK_STEPS)
    emit(
        {
            "benchmark": "options_new_rows",
            "dim": arguments.dim,
            "batch": new,
            "over_uniform": measured,
        }
    )


def evaluation(arguments: argparse.Namespace) -> None:
    """Measures evaluation and prints the JSON row."""
    rows = arguments.rows
    batch = arguments.batch
    generator = torch.Generator().manual_seed(0)

    def side(missing: Any) -> Side:
        table = Table(arguments.dim, options=TableOptions(missing=missing))
        table.insert(torch.arange(rows), torch.ones(rows, arguments.dim))
        return timed(lambda i: table.lookup(ids[i % len(ids)]))

    ids = [torch.randint(0, 2 * rows, (batch,), generator=generator) for _ in range(16)]
    measured = over(
        {"zeros": side("zeros"), "init": side("init")},
        "zeros",
        arguments.steps,
        BLOCK_STEPS,
    )
    emit(
        {
            "benchmark": "options_evaluation",
            "rows": rows,
            "dim": arguments.dim,
            "batch": batch,
            "over_zeros": measured,
        }
    )


def routing(arguments: argparse.Namespace) -> None:
    """Measures the split of ids over ranks and prints the JSON row."""
    batch = arguments.batch
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(
        -(2**63),
        2**63 - 1,
        (batch,),
        generator=generator,
    )
    lengths = torch.ones(batch, dtype=torch.int64)

    def split(ids: torch.Tensor) -> None:
        torch.ops.fbgemm.block_bucketize_sparse_features(
            lengths,
            ids,
            bucketize_pos=False,
            sequence=False,
            block_sizes=torch.tensor([-(-HINT // RANKS)]),
            my_size=RANKS,
        )

    sides = {
        "block": timed(lambda i: split(ids)),
        "hash": timed(lambda i: split(ops.mix_ids(ids, False))),
    }
    measured = over(sides, "block", arguments.steps, BLOCK_STEPS)
    emit(
        {
            "benchmark": "options_routing",
            "ranks": RANKS,
            "batch": batch,
            "over_block": measured,
        }
    )


def optimizers(arguments: argparse.Namespace) -> None:
    """Measures updates with user-defined optimizers and prints the JSON row."""
    rows = arguments.rows
    batch = arguments.batch
    dim = arguments.dim
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(16):
        batches.append(torch.randint(0, rows, (batch,), generator=generator))
    grads = torch.randn(batch, dim, generator=generator) * 0.01

    def side(optimizer: Optimizer, dtypes: dict[str, torch.dtype]) -> Side:
        table = Table(dim, optimizer=optimizer, **dtypes)
        weights = torch.randn(rows, dim, generator=generator) * 0.01
        table.insert(torch.arange(rows), weights)
        return timed(lambda i: table.update(batches[i % len(batches)], grads))

    def ratio(name: str, dtypes: dict[str, torch.dtype]) -> dict[str, float]:
        user_defined, built_in = BUILT_IN[name]
        sides = {
            "user-defined": side(user_defined, dtypes),
            "built-in": side(built_in, dtypes),
        }
        ratios = over(sides, "built-in", arguments.steps, BLOCK_STEPS)
        return ratios["user-defined"]

    measured = {name: ratio(name, {}) for name in BUILT_IN}
    narrow = {"dtype": torch.bfloat16, "state_dtype": torch.float16}
    for name in BUILT_IN:
        key = f"{name}, rows in bfloat16, state in float16"
        measured[key] = ratio(name, narrow)
    emit(
        {
            "benchmark": "options_optimizers",
            "rows": rows,
            "dim": dim,
            "batch": batch,
            "over_built_in": measured,
            "bar": 1.3,
        }
    )


def main() -> None:
    """Runs the measurements and prints the JSON rows."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--batch", type=int, default=20_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument(
        "--steps",
        type=int,
        default=300,
        help=f"a multiple of {BLOCK_STEPS}",
    )
    arguments = parser.parse_args()
    if arguments.steps % BLOCK_STEPS:
        parser.error(
            f"--steps must be a multiple of {BLOCK_STEPS}, got {arguments.steps}"
        )
    torch.set_num_threads(1)
    for part in (training, new_rows, evaluation, routing, optimizers):
        part(arguments)


if __name__ == "__main__":
    main()
