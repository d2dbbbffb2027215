"""Measures the time and the memory of ``reshard``, which moves rows between ranks.

    python benchmarks/reshard.py [--rows 1000000] [--dim 64] [--ranks 2]

The ranks are processes of this host with gloo, with row-wise Adagrad and one thread
each. The table goes from one rank to all ranks by rows, from there to other owners of
the rows, to all ranks by columns, and back to one rank. Prints one JSON row for each
move: the seconds; and, for the rank where it is the largest, the peak of the resident
memory in the move over the bytes of the table on that rank before or after the move,
whichever are more. The memory that the process had before the move besides the table is
left out of the peak.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from measure import clock, emit, end_rank
from memory import resident_bytes
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import ShardingPlan

from torchrec_recstore import (
    RecStoreConstraints,
    RecStorePlanner,
    RecStoreSharder,
    TableOptions,
    reshard,
    table_stats,
)

MOVES = ("row_wise", "hash", "column_wise", "table_wise", "row_wise", "table_wise")
BATCH = 100_000


class Peak:
    """A thread that samples the resident memory of this process."""

    def __init__(self) -> None:
        self.bytes = resident_bytes()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def end(self) -> int:
        """Returns the largest sample."""
        self._ends.set()
        self._thread.join()
        return self.bytes

    def _sample(self) -> None:
        while not self._ends.wait(0.005):
            self.bytes = max(self.bytes, resident_bytes())


def plan_of(
    kind: str,
    collection: EmbeddingBagCollection,
    sharder: RecStoreSharder,
    dim: int,
) -> ShardingPlan:
    """Returns a plan with all of the table's shards of one kind of ``MOVES``."""
    options = TableOptions(routing="hash" if kind == "hash" else "block")
    constraints = {
        "t": RecStoreConstraints(
            sharding_types=["row_wise" if kind == "hash" else kind],
            min_partition=dim // 2 if kind == "column_wise" else None,
            options=options,
        )
    }
    world = dist.get_world_size()
    topology = Topology(
        world_size=world,
        local_world_size=world,
        compute_device="cpu",
    )
    planner = RecStorePlanner(
        topology=topology,
        constraints=constraints,
        debug=False,
    )
    return planner.collective_plan(collection, [sharder], dist.group.WORLD)


def bytes_of_rank(model: DistributedModelParallel) -> int:
    """Returns the bytes of the table's shards on this rank."""
    return sum(table.stats().bytes for table in model.module.recstore_tables())


def rank_main(
    rank: int,
    ranks: int,
    rows: int,
    dim: int,
    directory: str,
) -> None:
    """Runs one rank of the measurement."""
    os.environ.update(LOCAL_WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/rendezvous",
        rank=rank,
        world_size=ranks,
    )
    collection = make_collection(rows, dim)
    sharder = RecStoreSharder(
        fused_params={
            "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "learning_rate": 0.01,
        }
    )
    plans = {kind: plan_of(kind, collection, sharder, dim) for kind in MOVES}
    model = DistributedModelParallel(
        collection,
        plan=plans["table_wise"],
        sharders=[sharder],
    )
    make_rows(model, rows, rank, ranks)
    present_kind = "table_wise"
    for kind in MOVES:
        dist.barrier()
        table_bytes = bytes_of_rank(model)
        bytes_beside = resident_bytes() - table_bytes
        peak = Peak()
        begin = clock()
        reshard(model, plans[kind])
        dist.barrier()
        seconds = clock() - begin
        peak_bytes = peak.end() - bytes_beside
        ratio = torch.tensor([peak_bytes / max(table_bytes, bytes_of_rank(model))])
        dist.all_reduce(ratio, dist.ReduceOp.MAX)
        assert table_stats(model)["t"].rows == rows
        if rank == 0:
            emit(
                {
                    "benchmark": "reshard",
                    "rows": rows,
                    "dim": dim,
                    "ranks": ranks,
                    "from": present_kind,
                    "to": kind,
                    "seconds": round(seconds, 3),
                    "peak_over_held": round(float(ratio), 3),
                }
            )
        present_kind = kind
        time.sleep(0.2)
    end_rank()


def make_collection(rows: int, dim: int) -> EmbeddingBagCollection:
    """Returns a collection of one table, before it is sharded."""
    config = EmbeddingBagConfig(
        name="t",
        embedding_dim=dim,
        num_embeddings=rows,
        feature_names=["f"],
    )
    return EmbeddingBagCollection(tables=[config], device=torch.device("meta"))


def make_rows(
    model: DistributedModelParallel,
    rows: int,
    rank: int,
    ranks: int,
) -> None:
    """Makes all rows of the table by training steps."""
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    for ids in order.split(BATCH):
        rank_ids = ids[rank::ranks].contiguous()
        lengths = torch.ones(len(rank_ids), dtype=torch.int32)
        features = KeyedJaggedTensor(["f"], rank_ids, lengths=lengths)
        values = model(features).values()
        values.backward(torch.ones(values.shape))


def main() -> None:
    """Runs the measurement and prints the JSON rows."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        mp.start_processes(
            rank_main,
            (args.ranks, args.rows, args.dim, directory),
            args.ranks,
            start_method="spawn",
        )


if __name__ == "__main__":
    main()
