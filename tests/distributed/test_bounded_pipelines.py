"""Bounded tables in train pipelines train as in a plain loop, if ``max_rows`` has room
for the batches in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.train_pipelines import (
    TrainPipelineSparseDistLite,
)
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from tests.store.dict_store import DictStoreOptions
from torchrec_recstore.options import LFU, LRU, Expiry, MinFrequency, TableOptions
from torchrec_recstore.planner import RecStoreConstraints
from torchrec_recstore.sharders import RecStorePrefetchPipeline, table_stats
from torchrec_recstore.store import Table

from .test_bounded_tables import BAGS, DIM, bags, batch_of, planned, rows
from .workers import run_on_ranks

STEPS = 14
PIPELINES = (
    TrainPipelineSparseDist,
    TrainPipelineSparseDistLite,
    RecStorePrefetchPipeline,
)
COLD = (TableOptions(max_rows=171, cold_store=DictStoreOptions()),)
ALL_AND_EACH = (
    TableOptions(
        max_rows=131, eviction=LRU(), expiry=Expiry(5), admission=MinFrequency(2)
    ),
    TableOptions(max_rows=171, eviction=LRU()),
    TableOptions(max_rows=171, eviction=LFU(half_life_steps=4)),
    TableOptions(expiry=Expiry(4)),
    TableOptions(admission=MinFrequency(2)),
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            tables=[bags("a")], device=torch.device("meta")
        )
        self.ec = EmbeddingCollection(tables=[rows("b")], device=torch.device("meta"))
        self.over = nn.Linear(4 * DIM, 1)

    def forward(self, batch: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = self.ebc(batch)
        sequences = self.ec(batch)
        parts = [
            pooled["a0"],
            pooled["a1"],
            *(sequences[f].to_padded_dense(3).sum(1) for f in ("b0", "b1")),
        ]
        loss = ((self.over(torch.cat(parts, dim=1)) - 1) ** 2).mean()
        return loss, loss.detach()


def build(
    options: TableOptions, world_size: int
) -> tuple[DistributedModelParallel, CombinedOptimizer, list[Table]]:
    torch.manual_seed(0)
    constraints = {
        name: RecStoreConstraints(sharding_types=["row_wise"], options=options)
        for name in "ab"
    }
    model, shards = planned(Model(), constraints, world_size)
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    wrapped = KeyedOptimizerWrapper(dense, partial(torch.optim.SGD, lr=0.1))
    return model, CombinedOptimizer([model.fused_optimizer, ("dense", wrapped)]), shards


def batches(rank: int) -> list[KeyedJaggedTensor]:
    both = [
        [batch_of(table, step, rank) for table in (bags("a"), rows("b"))]
        for step in range(STEPS)
    ]
    assert both[0][0].stride() == BAGS
    return [KeyedJaggedTensor.concat(pair) for pair in both]


def pipeline_equals_loop(
    rank: int, world_size: int, *, bounds: Sequence[TableOptions]
) -> None:
    for options in bounds:
        looped, optimizer, one = build(options, world_size)
        losses = []
        for batch in batches(rank):
            optimizer.zero_grad()
            loss, _ = looped(batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        stats = table_stats(looped)
        for of_table in stats.values():
            assert (
                of_table.evicted
                or options.max_rows is None
                or options.admission is not None
            )
            assert of_table.expired or options.expiry is None
            assert of_table.refused or options.admission is None
            assert of_table.cold_hits or options.cold_store is None
        for kind in PIPELINES:
            piped, optimizer, other = build(options, world_size)
            pipeline = kind(piped, optimizer, torch.device("cpu"))
            coming = iter(batches(rank))
            assert torch.equal(
                torch.stack([pipeline.progress(coming) for _ in range(STEPS)]),
                torch.stack(losses),
            ), (
                kind,
                options,
            )
            with pytest.raises(StopIteration):
                pipeline.progress(coming)
            for looped_shard, piped_shard in zip(one, other, strict=True):
                ids = looped_shard.ids()
                assert torch.equal(ids, piped_shard.ids()), (kind, options)
                expected, found = (
                    looped_shard.read_rows(ids),
                    piped_shard.read_rows(ids),
                )
                assert all(
                    torch.equal(found[key], expected[key]) for key in expected
                ), (kind, options)
            assert table_stats(piped) == stats, (kind, options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "bounds", [COLD, pytest.param(ALL_AND_EACH, marks=pytest.mark.slow)]
)
def test_two_ranks(bounds: Sequence[TableOptions]) -> None:
    run_on_ranks(2, partial(pipeline_equals_loop, bounds=bounds))


@pytest.mark.usefixtures("one_rank")
def test_a_bound_needs_no_room_for_the_batches_that_wait() -> None:
    """Each step decides in its turn which rows are made and evicted.

    A prefetch does not change bounded tables.
    """
    needed = [
        {int(i) for f in ("a0", "a1") for i in batch[f].values()}
        for batch in batches(0)
    ]
    options = TableOptions(max_rows=max(len(ids) for ids in needed), eviction=LRU())
    model, optimizer, (table, _) = build(options, 1)
    pipeline = RecStorePrefetchPipeline(model, optimizer, torch.device("cpu"))
    coming = iter(batches(0))
    for ids in needed:
        pipeline.progress(coming)
        pipeline.finish_prefetch()
        assert table.contains(torch.tensor(sorted(ids))).all()
    assert table.stats().inserts > table.stats().evicted > 0
