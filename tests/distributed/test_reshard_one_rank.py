"""``reshard`` on one rank: what refers to a model goes on, kinds of collections, and
plans that are refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from tests.sharders.models import bag, batch, collection, sequence, sequences, sharded
from torchrec_recstore import (
    SGD,
    RecStoreEmbeddingCollectionSharder,
    RecStoreFeatureProcessedEmbeddingBagCollectionSharder,
    RecStorePrefetchPipeline,
    RecStoreSharder,
    TableOptions,
    async_save,
    reshard,
    table_stats,
)
from torchrec_recstore.sharders.model_tables import recstore_tables

IDS = batch(f=[[1, 2], [3]])


def weights(model: nn.Module) -> torch.Tensor:
    (table,) = recstore_tables(model)
    return torch.cat([shard.table.lookup(torch.arange(1, 4)) for shard in table.shards])


def step(model: nn.Module, features: KeyedJaggedTensor = IDS) -> None:
    out = model(features)
    out = out.wait() if hasattr(out, "wait") else out
    (out["f"] if isinstance(out, dict) else out).values().sum().backward()


def pair(
    sequential: bool = False,
) -> tuple[DistributedModelParallel, DistributedModelParallel]:
    """The same model with two plans."""
    make: Callable[[], nn.Module] = (
        (lambda: sequences(sequence())) if sequential else (lambda: collection(bag()))
    )
    kinds = ("table_wise", "row_wise")
    one, other = (
        sharded(make(), sharding_type=kind, optimizer=SGD(lr=0.5)) for kind in kinds
    )
    return one, other


def test_optimizers_and_schedulers_go_on(one_rank: None) -> None:
    model, other = pair()
    fused, module = model.fused_optimizer, model.module
    schedule = torch.optim.lr_scheduler.StepLR(fused, 1, gamma=0.5)
    stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.1)]
    warm_up = WarmupOptimizer(fused, stages, lr=0.4)
    step(model)
    reshard(model, other.plan)
    assert model.fused_optimizer is fused
    assert model.module is module
    assert (
        fused.state_dict()["state"].keys()
        == other.fused_optimizer.state_dict()["state"].keys()
    )
    for change in (schedule.step, warm_up.step, warm_up.step):
        (group,), (of_warm_up,) = fused.param_groups, warm_up.param_groups
        rate, before = group["lr"], weights(model)
        change()
        assert group is of_warm_up
        assert group["lr"] != rate
        step(model)
        assert torch.allclose(weights(model), before - group["lr"])


def test_the_plan_of_the_user_stays(one_rank: None) -> None:
    model, other = pair()
    given = model.plan
    reshard(model, other.plan)
    assert given.plan[""]["t"].sharding_type == "table_wise"
    assert model.plan.plan[""]["t"].sharding_type == "row_wise"
    step(model)
    reshard(model, given)
    assert table_stats(model)["t"].rows == 3


def feature_processed(
    wrap: Callable[[nn.Module], nn.Module] = lambda bags: bags,
) -> DistributedModelParallel:
    """A model of feature-processed bags."""
    processors = nn.ModuleDict({"f": PositionWeightedModule(max_feature_length=4)})
    bags = FeatureProcessedEmbeddingBagCollection(
        collection(bag(), is_weighted=True), processors
    )
    sharder = RecStoreFeatureProcessedEmbeddingBagCollectionSharder(
        RecStoreSharder(optimizer=SGD(lr=0.5))
    )
    return DistributedModelParallel(
        wrap(bags), sharders=[sharder], device=torch.device("cpu")
    )


def test_feature_processors(one_rank: None) -> None:
    model, (_, other) = feature_processed(), pair()
    step(model)
    rows = model(IDS).values()
    reshard(model, other.plan)
    assert torch.equal(model(IDS).values(), rows)
    step(model)
    assert not torch.equal(model(IDS).values(), rows)


def test_delta_trackers_go_on(one_rank: None) -> None:
    model, other = pair()
    tracker = ModelDeltaTrackerTrec(model)
    step(model)
    reshard(model, other.plan)
    tracker.clear()
    step(model, batch(f=[[9, 8], [9]]))
    (ids,) = tracker.get_unique_ids().values()
    assert sorted(ids.tolist()) == [8, 9]


def test_plans_that_do_not_fit_change_nothing(one_rank: None, tmp_path: object) -> None:
    model, other = pair()
    step(model)
    before = weights(model)
    entry = other.plan.plan[""]["t"]
    wrong = copy.copy(entry)
    wrong.compute_kernel = "fused"
    for plan, message in (
        (
            {"elsewhere": {"t": entry}},
            "the plan has no collection ''; it has .'elsewhere'.",
        ),
        ({"": {"u": entry}}, r"has no table\(s\) \['t'\], and unknown \['u'\]"),
        (
            {"": {"t": wrong}},
            "table 't' would be on TorchRec's kernel 'fused', whose rows cannot move",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            reshard(model, ShardingPlan(plan))
    saving = async_save(model, f"{tmp_path}/saved")
    if not saving.done():
        with pytest.raises(ValueError, match="being saved"):
            reshard(model, other.plan)
    saving.wait()
    assert torch.equal(weights(model), before)
    step(model)
    assert torch.allclose(weights(model), before - 0.5)
    sequence_model, _ = pair(sequential=True)
    grid = copy.copy(entry)
    grid.sharding_type = "grid_shard"
    with pytest.raises(ValueError, match="sharding type 'grid_shard' is not supported"):
        reshard(sequence_model, ShardingPlan({"": {"t": grid}}))
    step(sequence_model)


class _Model(nn.Module):
    """A collection and a dense layer."""

    def __init__(self, sparse: nn.Module) -> None:
        super().__init__()
        self.sparse = sparse
        self.over = nn.Linear(4, 1)

    def forward(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.sparse(features)
        out = out.wait() if hasattr(out, "wait") else out
        rows = (out["f"] if isinstance(out, dict) else out).values()
        return self.over(rows).sum(), rows


@pytest.mark.parametrize("sequential", [False, True])
def test_reshard_of_torchrec(one_rank: None, sequential: bool) -> None:
    sharders = [
        RecStoreSharder(optimizer=SGD(lr=0.5)),
        RecStoreEmbeddingCollectionSharder(optimizer=SGD(lr=0.5)),
    ]
    tables = sequences(sequence()) if sequential else collection(bag())
    model = DistributedModelParallel(
        _Model(tables), sharders=sharders, device=torch.device("cpu")
    )
    other = pair(sequential)[1].plan.plan[""]
    model(IDS)[0].backward()
    before = weights(model)
    first = model.plan.plan["sparse"]
    model.reshard({"sparse": (0.0, other)})
    assert model.plan.plan["sparse"]["t"].sharding_type == "row_wise"
    assert torch.equal(weights(model), before)
    module = model.module.sparse
    module.update_shards(first, module.ranks_env, torch.device("cpu"))
    assert module.module_sharding_plan["t"].sharding_type == "table_wise"
    assert torch.equal(weights(model), before)
    model(IDS)[0].backward()
    assert not torch.equal(weights(model), before)
    assert len(model.fused_optimizer.param_groups) == 1


def test_a_pipeline_is_detached_first(one_rank: None) -> None:
    sharder = RecStoreSharder(optimizer=SGD(lr=0.5))
    model = DistributedModelParallel(
        _Model(collection(bag())), sharders=[sharder], device=torch.device("cpu")
    )
    _, other = pair()
    plan = ShardingPlan({"sparse": other.plan.plan[""]})
    unused = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    pipeline = RecStorePrefetchPipeline(model, unused, torch.device("cpu"))
    batches = iter([IDS, batch(f=[[1], [2]]), batch(f=[[3], [3]]), batch(f=[[1], [1]])])
    pipeline.progress(batches)
    with pytest.raises(
        ValueError,
        match=r"a train pipeline has begun batches .*: call pipeline.detach\(\) first",
    ):
        reshard(model, plan)
    pipeline.detach()
    reshard(model, plan)
    for _ in range(3):
        pipeline.progress(batches)
    expected = DistributedModelParallel(
        _Model(collection(bag())), sharders=[sharder], device=torch.device("cpu")
    )
    expected.module.over.load_state_dict(model.module.over.state_dict())
    for features in (
        IDS,
        batch(f=[[1], [2]]),
        batch(f=[[3], [3]]),
        batch(f=[[1], [1]]),
    ):
        expected(features)[0].backward()
    assert torch.allclose(weights(model), weights(expected))


def test_a_pipeline_of_feature_processed_bags_is_detached_first(one_rank: None) -> None:
    model, other = feature_processed(_Model), pair()[1].plan.plan[""]
    plan = ShardingPlan({"sparse": other})
    unused = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    pipeline = RecStorePrefetchPipeline(model, unused, torch.device("cpu"))
    batches = iter([batch(f=[[1, 2], [3]]) for _ in range(4)])
    pipeline.progress(batches)
    with pytest.raises(
        ValueError,
        match=r"a train pipeline has begun batches .*: call pipeline.detach\(\) first",
    ):
        reshard(model, plan)
    pipeline.detach()
    reshard(model, plan)
    before = weights(model)
    pipeline.progress(batches)
    assert not torch.equal(weights(model), before)


def test_options_of_the_new_plan_hold(one_rank: None) -> None:
    model, _ = pair()
    step(model)
    other = sharded(
        collection(bag()),
        options={"t": TableOptions(missing="init")},
        optimizer=SGD(lr=0.5),
    )
    reshard(model, other.plan)
    model.eval()
    assert dist.get_world_size() == 1
    assert bool(model(batch(f=[[77], [77]])).values().all())
