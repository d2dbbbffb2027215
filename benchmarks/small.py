"""Measures a training step of a small batch.

    python benchmarks/small.py [--batch-size 64] [--dim 16] [--tables 26] [--steps 2000]

The sides are a sharded collection with RecStore tables, and one with TorchRec's own
tables. Both collections are wrapped in ``DistributedModelParallel`` on one rank, with
row-wise Adagrad and the kernel and sharding that TorchRec chooses by default. A step is
a forward, a backward and the fused update, on one thread. The two sides take turns in
one process, 50 steps each, as a training loop runs the steps of one model: single steps
in turn find caches that the other model has filled. Prints one JSON row with the
microseconds per step and the ratio.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from measure import Side, Timing, clock, emit, interleave, ratios, spread, step_seconds
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

from torchrec_recstore import RecStoreSharder

ROWS = 100_000  # of each table
BATCHES = 50
FUSED_PARAMS = {
    "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "learning_rate": 0.01,
}


def sharded(
    sharder: EmbeddingBagCollectionSharder,
    device: str,
    dim: int,
    tables: int,
) -> DistributedModelParallel:
    """Returns a sharded collection of tables with one feature each.

    Args:
        sharder: The sharder of the collection.
        device: The device of the unsharded module.
        dim: The number of columns of each table.
        tables: The number of tables.
    """
    configs = [
        EmbeddingBagConfig(
            name=f"t{i}",
            embedding_dim=dim,
            num_embeddings=ROWS,
            feature_names=[f"f{i}"],
        )
        for i in range(tables)
    ]
    collection = EmbeddingBagCollection(tables=configs, device=torch.device(device))
    return DistributedModelParallel(
        collection,
        device=torch.device("cpu"),
        sharders=[sharder],
    )


def step_of(
    model: DistributedModelParallel,
    ids: list[torch.Tensor],
    tables: int,
    grad: torch.Tensor,
) -> Side:
    """Returns a side that runs a training step of each batch.

    Its timing is the mean of their seconds.

    Args:
        model: The sharded collection.
        ids: (tables * B,) int64 each. The ids of the batches, feature by feature.
        tables: The number of tables.
        grad: (B, tables * dim) float32. The gradient of the output.
    """
    keys = [f"f{i}" for i in range(tables)]
    lengths = torch.ones(tables * len(grad), dtype=torch.int32)

    def side(_: int) -> Timing:
        begin = clock()
        for batch in ids:
            features = KeyedJaggedTensor(keys, batch, lengths=lengths)
            model(features).values().backward(grad)
        return ((clock() - begin) / len(ids),)

    return side


def main() -> None:
    """Runs the measurement and prints the JSON row."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--steps", type=int, default=2000)
    arguments = parser.parse_args()
    dim = arguments.dim
    tables = arguments.tables
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{Path(folder) / 'store'}",
            rank=0,
            world_size=1,
        )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    recstore_sharder = RecStoreSharder(fused_params=dict(FUSED_PARAMS))
    stock_sharder = EmbeddingBagCollectionSharder(fused_params=dict(FUSED_PARAMS))
    recstore = sharded(recstore_sharder, "meta", dim, tables)
    stock = sharded(stock_sharder, "cpu", dim, tables)
    batches = torch.randint(0, ROWS, (BATCHES, tables * arguments.batch_size))
    ids = list(batches.unbind(0))
    grad = torch.randn(arguments.batch_size, tables * dim)
    sides = {
        "recstore": step_of(recstore, ids, tables, grad),
        "stock": step_of(stock, ids, tables, grad),
    }
    timings = interleave(sides, arguments.steps // BATCHES, warm_up=2)
    # Ratios of consecutive turns, so that a drift of the machine's speed does not
    # matter.
    speedups = spread(ratios(timings["stock"], timings["recstore"]), 1)
    step_us = {}
    for name, side_timings in timings.items():
        step_us[name] = spread(step_seconds(side_timings), 1e6)
    torch.set_num_threads(threads)
    emit(
        {
            "benchmark": "small",
            "batch_size": arguments.batch_size,
            "dim": dim,
            "tables": tables,
            "step_us_one_thread": step_us,
            "steps_per_second_over_stock": {
                key: round(value, 3) for key, value in speedups.items()
            },
        }
    )
    sys.stdout.flush()
    os._exit(0)  # the shutdown of gloo sometimes aborts (torch 2.13)


if __name__ == "__main__":
    main()
