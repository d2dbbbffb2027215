"""Trains a table whose rows go to a cold store, is killed, and starts again from its
checkpoint; all rows are compared.

``python -m tests.checkpoint.no_loss train|resume FOLDER --ids N --max-rows M``. Also
with 10 million ids: ``--ids 10000000 --max-rows 1000000``.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import Topology

from torchrec_recstore import load_checkpoint, save_checkpoint, table_stats
from torchrec_recstore.options import LRU, SSDStore, TableOptions
from torchrec_recstore.planner import RecStoreConstraints, RecStorePlanner
from torchrec_recstore.sharders import RecStoreSharder
from torchrec_recstore.store import Table

DIM = 32
STEPS = 40


def model_of(options: TableOptions) -> DistributedModelParallel:
    config = EmbeddingBagConfig(
        name="t", embedding_dim=DIM, num_embeddings=2**40, feature_names=["f"]
    )
    module = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
    sharders = [
        RecStoreSharder(
            fused_params={
                "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
                "learning_rate": 0.1,
            }
        )
    ]
    planner = RecStorePlanner(
        topology=Topology(world_size=1, compute_device="cpu"),
        constraints={"t": RecStoreConstraints(options=options)},
        debug=False,
    )
    plan = planner.collective_plan(module, sharders, dist.group.WORLD)
    return DistributedModelParallel(
        module, plan=plan, sharders=sharders, device=torch.device("cpu")
    )


def table_of(model: DistributedModelParallel) -> Table:
    table: Table = model.module.recstore_state.shards["t"][0].table
    return table


def train(model: DistributedModelParallel, ids: int, steps: range) -> None:
    """Half of the ids of each step are new; the others are earlier ids, most of which
    have left memory.
    """
    new = ids // STEPS
    spread = 0x9E3779B97F4A7C15 - 2**64  # so that ids are anywhere among int64
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        old = torch.randint(0, max(1, step * new), (new,), generator=generator)
        values = torch.cat([torch.arange(step * new, (step + 1) * new), old]) * spread
        features = KeyedJaggedTensor(
            keys=["f"],
            values=values,
            lengths=torch.ones(len(values), dtype=torch.int64),
        )
        pooled = model(features).values()
        (pooled * torch.rand(pooled.shape, generator=generator)).sum().backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("phase", choices=["train", "resume"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ids", type=int, required=True)
    parser.add_argument("--max-rows", type=int, required=True)
    arguments = parser.parse_args()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{arguments.folder / arguments.phase}",
        rank=0,
        world_size=1,
    )
    folder, begin = arguments.folder, time.monotonic()
    cold = SSDStore(str(folder / f"rows_of_{arguments.phase}"))
    model = model_of(
        TableOptions(max_rows=arguments.max_rows, eviction=LRU(), cold_store=cold)
    )
    if arguments.phase == "train":
        train(model, arguments.ids, range(STEPS // 2))
        save_checkpoint(model, folder / "saved")
        train(model, arguments.ids, range(STEPS // 2, STEPS * 3 // 4))
        print(
            f"killed after {time.monotonic() - begin:.0f} s: {table_stats(model)['t']}",
            flush=True,
        )
        os.kill(os.getpid(), signal.SIGKILL)
    load_checkpoint(model, folder / "saved")
    train(model, arguments.ids, range(STEPS // 2, STEPS))
    stats = table_stats(model)["t"]
    assert stats.rows <= arguments.max_rows
    print(f"trained after {time.monotonic() - begin:.0f} s: {stats}", flush=True)
    whole = model_of(TableOptions())
    train(whole, arguments.ids, range(STEPS))
    expected, table = table_of(whole), table_of(model)
    ids = expected.ids()
    assert torch.equal(table.ids(), ids), "the tables hold different ids"
    differing = 0
    for part in torch.split(ids, 1 << 17):
        one, other = table.read_rows(part), expected.read_rows(part)
        differing += sum(int((one[key] != other[key]).sum()) for key in other)
    print(
        f"{len(ids)} rows, {stats.cold_rows} of them cold; numbers that differ:"
        f" {differing}",
        flush=True,
    )
    assert differing == 0
    os._exit(0)


if __name__ == "__main__":
    main()
