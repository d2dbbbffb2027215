"""A model with dense layers trains in TorchRec's pipeline as in a plain loop."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.planner import Topology
from torchrec.distributed.train_pipeline import TrainPipelineBase
from torchrec.distributed.train_pipeline.train_pipelines import (
    TrainPipelineSparseDistLite,
)
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from torchrec_recstore.optim import RowWiseAdagrad
from torchrec_recstore.planner import RecStoreConstraints, RecStorePlanner
from torchrec_recstore.sharders import (
    RecStoreEmbeddingCollectionSharder,
    RecStorePrefetchPipeline,
    RecStoreSharder,
    table_stats,
)

from .reference import Case
from .workers import run_on_ranks

TABLES = [
    EmbeddingBagConfig(
        name="a", num_embeddings=2**40, embedding_dim=8, feature_names=["f0", "f1"]
    ),
    EmbeddingBagConfig(
        name="b", num_embeddings=10, embedding_dim=4, feature_names=["f2"]
    ),
]
ROWS = [
    EmbeddingConfig(
        name="c", num_embeddings=2**40, embedding_dim=4, feature_names=["f1"]
    ),
    EmbeddingConfig(name="d", num_embeddings=10, embedding_dim=4, feature_names=["f2"]),
]
CASE = Case(TABLES, RowWiseAdagrad(lr=0.05))
STEPS = 6
PIPELINES = (
    TrainPipelineBase,
    TrainPipelineSparseDist,
    TrainPipelineSparseDistLite,
    RecStorePrefetchPipeline,
)
SHARDERS = (RecStoreSharder, RecStoreEmbeddingCollectionSharder)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(tables=TABLES, device=torch.device("meta"))
        self.ec = EmbeddingCollection(tables=ROWS, device=torch.device("meta"))
        self.over = nn.Linear(28, 1)

    def forward(self, batch: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = self.ebc(batch)
        rows = self.ec(batch)
        bags = [rows[feature].to_padded_dense(4).sum(1) for feature in ("f1", "f2")]
        out = self.over(
            torch.cat([pooled["f0"], pooled["f1"], pooled["f2"], *bags], dim=1)
        )
        loss = ((out - 1) ** 2).mean()
        return loss, loss.detach()


def build() -> tuple[DistributedModelParallel, CombinedOptimizer]:
    torch.manual_seed(0)
    sharders = [sharder(fused_params={"learning_rate": 0.05}) for sharder in SHARDERS]
    model = DistributedModelParallel(Model(), sharders=sharders)
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    assert sorted(dense) == ["over.bias", "over.weight"]
    wrapped = KeyedOptimizerWrapper(dense, partial(torch.optim.SGD, lr=0.1))
    return model, CombinedOptimizer([model.fused_optimizer, ("dense", wrapped)])


def pipeline_equals_loop(rank: int, world_size: int) -> None:
    looped, optimizer = build()
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss, _ = looped(CASE.batch(step, rank))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    assert losses[-1] < losses[0]
    for kind in PIPELINES:
        piped, optimizer = build()
        pipeline = kind(piped, optimizer, torch.device("cpu"))
        batches = iter([CASE.batch(step, rank) for step in range(STEPS)])
        assert torch.equal(
            torch.stack([pipeline.progress(batches) for _ in range(STEPS)]),
            torch.stack(losses),
        ), kind
        with pytest.raises(StopIteration):
            pipeline.progress(batches)
        pairs = [
            pair
            for name in ("ebc", "ec")
            for pair in zip(
                *(getattr(m.module, name).recstore_tables() for m in (looped, piped)),
                strict=True,
            )
        ]
        for one, other in pairs:
            assert torch.equal(one.ids(), other.ids())
            assert torch.equal(one.lookup(one.ids()), other.lookup(one.ids()))
        assert table_stats(looped) == table_stats(piped)


@pytest.mark.usefixtures("one_rank")
def test_one_rank() -> None:
    pipeline_equals_loop(0, 1)


def weights_that_are_trained_are_refused(rank: int) -> None:
    """The error is raised on every rank, and no collective is pending, so that the next
    collectives work.
    """
    features = CASE.batch(0, rank)
    weights = torch.ones(len(features.values()), requires_grad=True)
    learned = KeyedJaggedTensor(
        features.keys(), features.values(), lengths=features.lengths(), weights=weights
    )
    for sharding_type in ("table_wise", "row_wise"):
        module = EmbeddingBagCollection(
            tables=TABLES, device=torch.device("meta"), is_weighted=True
        )
        constraints = {
            table.name: RecStoreConstraints(sharding_types=[sharding_type])
            for table in TABLES
        }
        topology = Topology(world_size=2, local_world_size=2, compute_device="cpu")
        sharders = [RecStoreSharder()]
        plan = RecStorePlanner(
            topology=topology, constraints=constraints, debug=False
        ).collective_plan(module, sharders, dist.group.WORLD)
        model = DistributedModelParallel(module, plan=plan, sharders=sharders)
        with pytest.raises(
            NotImplementedError,
            match=rf"'a'.*'f0', 'f1' .*\({sharding_type} on 2 rank\(s\)\): use",
        ):
            model(learned)
        assert all(
            stats.rows == stats.steps == 0 for stats in table_stats(model).values()
        )


def on_two_ranks(rank: int, world_size: int) -> None:
    weights_that_are_trained_are_refused(rank)
    pipeline_equals_loop(rank, world_size)


def test_two_ranks() -> None:
    run_on_ranks(2, on_two_ranks)


@pytest.mark.usefixtures("one_rank")
def test_the_next_batch_has_its_rows_before_its_turn() -> None:
    model, optimizer = build()
    pipeline = RecStorePrefetchPipeline(model, optimizer, torch.device("cpu"))
    batches = [CASE.batch(step, 0) for step in range(2)]
    pipeline.progress(iter(batches))
    pipeline.finish_prefetch()
    table = next(
        table for table in model.module.ebc.recstore_tables() if table.name == "a"
    )
    wanted = torch.cat([batches[1][feature].values() for feature in ("f0", "f1")])
    assert len(wanted)
    assert table.contains(wanted).all()
    assert table.stats().steps == 1
