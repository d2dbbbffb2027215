"""Optimizers whose state or clock could differ between ranks: rows split over two ranks
equal the rows of one table.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import Topology

from torchrec_recstore.optim import LAMB, Adam, Ftrl, Optimizer
from torchrec_recstore.options import TableOptions
from torchrec_recstore.planner import RecStoreConstraints, RecStorePlanner
from torchrec_recstore.sharders import RecStoreSharder
from torchrec_recstore.store import Table

from .workers import run_on_ranks

BAGS, DIM, STEPS = 5, 4, 4


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ids, one for each bag, and their gradients.

    In even steps, all ids belong to rank 0.
    """
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(0, 10 if step % 2 else 5, (BAGS,), generator=generator)
    return ids, torch.randn(BAGS, DIM, generator=generator)


def compare(
    optimizer: Optimizer, accumulation_steps: int, rank: int, world_size: int
) -> None:
    config = EmbeddingBagConfig(
        name="t", num_embeddings=10, embedding_dim=DIM, feature_names=["f"]
    )
    ebc = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
    sharders = [
        RecStoreSharder(optimizer=optimizer, accumulation_steps=accumulation_steps)
    ]
    topology = Topology(
        world_size=world_size, local_world_size=world_size, compute_device="cpu"
    )
    constraints = {"t": RecStoreConstraints(sharding_types=["row_wise"])}
    plan = RecStorePlanner(topology=topology, constraints=constraints).collective_plan(
        ebc, sharders, dist.group.WORLD
    )
    model = DistributedModelParallel(ebc, plan=plan, sharders=sharders)
    whole = Table(
        DIM, optimizer=optimizer, options=TableOptions(expected_rows=10), name="t"
    )
    pending: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(STEPS):
        ids, grad = batch(step, rank)
        pooled = model(
            KeyedJaggedTensor(["f"], ids, lengths=torch.ones(BAGS, dtype=torch.int64))
        ).values()
        pooled.backward(grad)
        pending += [batch(step, other) for other in range(world_size)]
        if (step + 1) % accumulation_steps == 0:
            # TorchRec divides gradients by the number of ranks.
            whole.update(
                torch.cat([p[0] for p in pending]),
                torch.cat([p[1] for p in pending]) / world_size,
            )
            pending = []
    (mine,) = model.module.recstore_tables()
    torch.testing.assert_close(
        mine.lookup(mine.ids()), whole.lookup(mine.ids()), atol=1e-6, rtol=1e-5
    )
    rows = torch.tensor([len(mine)])
    dist.all_reduce(rows)
    assert int(rows) == len(whole)


def two_ranks(rank: int, world_size: int) -> None:
    for optimizer in (
        Adam(lr=0.1),
        LAMB(lr=0.1, weight_decay=0.1),
        Ftrl(lr=0.1, l1=0.01),
    ):
        for accumulation_steps in (1, 2):
            compare(optimizer, accumulation_steps, rank, world_size)


def test_two_ranks_equal_one_table() -> None:
    run_on_ranks(2, two_ranks)
