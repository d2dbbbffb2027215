"""Training on two ranks, with a save, a crash and a resume, on the CPU or on the device
with rows there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology

from tests.device import simulated
from tests.device.scenarios import META, bag_tables, host
from torchrec_recstore import (
    LRU,
    RecStoreConstraints,
    RecStorePlanner,
    RecStoreSharder,
    TableOptions,
    load_checkpoint,
    save_checkpoint,
    table_stats,
)

RANKS = 2
IDS = 120
NUM_EMBEDDINGS = 2**40
SAVED = 12
"""The steps before the save."""
LOST = 5
"""The steps after it that a crash loses."""
STEPS = 24
ROWS = 40
MOST = 72


def features(step: int, rank: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(0, 4, (3 * 5,), generator=generator)
    count = int(lengths.sum())
    ids = (torch.rand(count, generator=generator) ** 3 * IDS).long()
    # Both ranks have frequent ids of a row-wise table.
    spread = (ids * 37 % IDS) * (NUM_EMBEDDINGS // IDS)
    return KeyedJaggedTensor(["u", "i", "j"], values=spread, lengths=lengths)


def build(
    device: torch.device, sharding_type: str, routing: Literal["block", "hash"]
) -> Any:
    module = EmbeddingBagCollection(bag_tables(), device=META)
    rows = None if device.type == "cpu" else ROWS
    options = TableOptions(
        max_rows=MOST, eviction=LRU(), device_rows=rows, routing=routing
    )
    constraint = RecStoreConstraints(
        sharding_types=[sharding_type],
        min_partition=4 if sharding_type == "column_wise" else None,
        options=options,
    )
    planner = RecStorePlanner(
        topology=Topology(world_size=RANKS, compute_device="cpu"),
        constraints={"t_user": constraint, "t_item": constraint},
    )
    params = {"learning_rate": 0.1, "optimizer": EmbOptimType.ADAM}
    sharders: list[Any] = [RecStoreSharder(fused_params=params)]
    plan = planner.collective_plan(module, sharders, dist.group.WORLD)
    return DistributedModelParallel(
        module,
        plan=plan,
        sharders=sharders,
        device=device,
        init_data_parallel=False,
        init_parameters=False,
    )


def steps(model: Any, device: torch.device, rank: int, numbers: range) -> list[Any]:
    outputs = []
    for number in numbers:
        out = model(features(number, rank).to(device)).wait().values()
        (out * out).sum().backward()
        outputs.append(host(out))
    return outputs


def train(
    rank: int,
    world_size: int,
    *,
    sharding_type: str,
    routing: Literal["block", "hash"],
    path: str,
    phase: str,
) -> None:
    """One phase: ``cpu`` trains to the end, ``before`` and ``after`` a crash train on
    the device.
    """
    device = torch.device("cpu") if phase == "cpu" else simulated.register()
    model = build(device, sharding_type, routing)
    folder = Path(path)
    if phase == "before":
        seen = steps(model, device, rank, range(SAVED))
        save_checkpoint(model, folder / "checkpoint")
        steps(model, device, rank, range(SAVED, SAVED + LOST))
        torch.save(seen, folder / f"before-{rank}")
        return
    first = 0
    if phase == "after":
        load_checkpoint(model, folder / "checkpoint")
        first = SAVED
    seen = steps(model, device, rank, range(first, STEPS))
    rows: dict[str, Any] = {}
    for table in model.module.recstore_tables():
        ids = table.ids()
        rows[f"{table.name} {table.columns}"] = [ids, table.read_rows(ids)]
    found = {"seen": seen, "rows": rows, "stats": dict(table_stats(model))}
    torch.save(found, folder / f"{phase}-{rank}")
