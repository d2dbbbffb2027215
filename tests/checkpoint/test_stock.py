"""Stock TorchRec models are converted to RecStore tables and back, with their optimizer
state.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from tests.distributed.workers import run_on_ranks
from torchrec_recstore import (
    load_into_stock,
    load_stock_state_dict,
    stock_optimizer_state_dict,
    stock_state_dict,
)
from torchrec_recstore.checkpoint.stock import to_plain
from torchrec_recstore.optim import Adam, AdamW
from torchrec_recstore.planner import RecStoreConstraints, RecStorePlanner
from torchrec_recstore.sharders import (
    RecStoreEmbeddingCollectionSharder,
    RecStoreFeatureProcessedEmbeddingBagCollectionSharder,
    RecStoreSharder,
)

from . import models

ROWS = 100
NUM_ROWS = dict.fromkeys(models.TABLES, ROWS)
USER, ITEM = (f"sparse.embedding_bags.{name}.weight" for name in models.TABLES)
IDS = {"low": 0, "high": ROWS}
SGD, ADAGRAD, ROW_WISE = (
    EmbOptimType.EXACT_SGD,
    EmbOptimType.EXACT_ADAGRAD,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD,
)


def states_of(model: DistributedModelParallel) -> dict[str, Any]:
    state: dict[str, Any] = model.fused_optimizer.state_dict()
    return state


def train_on(*trained: DistributedModelParallel) -> None:
    """Runs the same further steps on both models, which also train the dense part."""
    for model in trained:
        dense = torch.optim.SGD(model.module.over.parameters(), lr=0.1)
        for step in range(10, 13):
            dense.zero_grad()
            model(models.batch(step, **IDS)).sum().backward()
            dense.step()


def assert_alike(
    model: DistributedModelParallel, stock: DistributedModelParallel
) -> None:
    state = stock_state_dict(model, NUM_ROWS)
    assert state.keys() == stock.state_dict().keys()
    for key, value in stock.state_dict().items():
        torch.testing.assert_close(state[key], to_plain(key, value), rtol=0, atol=1e-5)


@pytest.mark.parametrize("sharding", ["table_wise", "column_wise"])
@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD, ROW_WISE])
def test_training_goes_on_alike(
    one_rank: None, optimizer: EmbOptimType, sharding: str
) -> None:
    stock, model = (
        models.stock(sharding, optimizer),
        models.recstore(sharding, optimizer),
    )
    models.train(model, steps=1)  # The load must remove these rows.
    models.train(stock, **IDS)
    load_stock_state_dict(model, stock.state_dict(), states_of(stock))
    for table in model.module.sparse.recstore_tables():
        assert torch.equal(table.ids(), torch.arange(ROWS))
    train_on(stock, model)
    assert_alike(model, stock)

    back = models.stock(sharding, optimizer)
    load_into_stock(
        back,
        stock_state_dict(model, NUM_ROWS),
        stock_optimizer_state_dict(model, NUM_ROWS),
    )
    assert_alike(model, back)
    # The export averages the row-wise states of column shards.
    if (optimizer, sharding) != (ROW_WISE, "column_wise"):
        train_on(back, model)
        assert_alike(model, back)


def test_load_into_stock_changes_no_recstore_table(one_rank: None) -> None:
    model = models.recstore()
    models.train(model, **IDS)
    before = [(name, ids, rows) for name, _, ids, rows in models.shards(model)]
    with pytest.raises(
        ValueError,
        match="'item', 'user' are RecStore tables: call load_stock_state_dict",
    ):
        load_into_stock(model, stock_state_dict(model, NUM_ROWS))
    for (name, ids, rows), (_, _, ids_now, rows_now) in zip(
        before, models.shards(model), strict=True
    ):
        assert torch.equal(ids, ids_now), name
        assert all(torch.equal(rows[key], rows_now[key]) for key in rows)


def test_row_wise_state_of_column_shards_is_joined(one_rank: None) -> None:
    model, stock = (
        models.recstore("column_wise", ROW_WISE),
        models.stock("column_wise", ROW_WISE),
    )
    models.train(model, **IDS)
    sums = [rows["sum"] for name, _, _, rows in models.shards(model) if name == "user"]
    ids = next(ids for name, _, ids, _ in models.shards(model) if name == "user")
    assert len(sums) == 2
    momentum = stock_optimizer_state_dict(model, NUM_ROWS)["state"][USER][
        "user.momentum1"
    ]
    torch.testing.assert_close(momentum[ids], (sums[0] + sums[1]) / 2)
    assert momentum.count_nonzero() == (sums[0] + sums[1]).count_nonzero()
    load_into_stock(
        stock,
        stock_state_dict(model, NUM_ROWS),
        stock_optimizer_state_dict(model, NUM_ROWS),
    )
    assert torch.equal(
        to_plain("", states_of(stock)["state"][USER]["user.momentum1"]),
        momentum.repeat(2),
    )


def test_dtensors(one_rank: None) -> None:
    stock = models.stock(
        "column_wise", ADAGRAD, ShardingEnv(1, 0, dist.group.WORLD, output_dtensor=True)
    )
    models.train(stock, **IDS)
    model = models.recstore("table_wise", ADAGRAD)
    load_stock_state_dict(model, stock.state_dict(), states_of(stock))
    assert_alike(model, stock)
    momentum = stock_optimizer_state_dict(model, NUM_ROWS)["state"][USER][
        "user.momentum1"
    ]
    assert torch.equal(
        momentum, to_plain("", states_of(stock)["state"][USER]["user.momentum1"])
    )


@pytest.mark.parametrize(
    "optimizer", [EmbOptimType.ADAM, EmbOptimType.PARTIAL_ROWWISE_LAMB]
)
def test_optimizers_that_torchrec_has_on_gpus_alone(
    one_rank: None, optimizer: EmbOptimType
) -> None:
    model, other = (models.recstore(optimizer=optimizer) for _ in range(2))
    models.train(model, **IDS)
    state, states = (
        stock_state_dict(model, NUM_ROWS),
        stock_optimizer_state_dict(model, NUM_ROWS),
    )
    row_wise = optimizer == EmbOptimType.PARTIAL_ROWWISE_LAMB
    assert {
        key: tuple(value.shape) for key, value in states["state"][USER].items()
    } == {
        "user.momentum1": (ROWS, models.DIM),
        "user.exp_avg_sq": (ROWS,) if row_wise else (ROWS, models.DIM),
    }
    with pytest.raises(ValueError, match=r"'user': .* needs optimizer_steps"):
        load_stock_state_dict(other, state, states)
    load_stock_state_dict(other, state, states, optimizer_steps=5)
    trained = {name: ids for name, _, ids, _ in models.shards(model)}
    for each in (model, other):
        models.train(each, steps=3, distinct=60, **IDS)
    for table, loaded in zip(
        model.module.sparse.recstore_tables(),
        other.module.sparse.recstore_tables(),
        strict=True,
    ):
        ids = trained[table.name]
        assert torch.equal(table.lookup(ids), loaded.lookup(ids))


def mixed(optimizer: EmbOptimType) -> DistributedModelParallel:
    """A model with the user table in RecStore and the item table on TorchRec's kernel."""
    torch.manual_seed(0)
    model, world = models.Model(), dist.get_world_size()
    sharders = [
        RecStoreSharder(fused_params={"optimizer": optimizer, "learning_rate": 0.1})
    ]
    constraints = {
        "user": RecStoreConstraints(sharding_types=["row_wise"]),
        "item": ParameterConstraints(
            sharding_types=["table_wise"], compute_kernels=["fused"]
        ),
    }
    topology = Topology(world_size=world, local_world_size=world, compute_device="cpu")
    planner = RecStorePlanner(topology=topology, constraints=constraints, debug=False)
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    return DistributedModelParallel(
        model, plan=plan, sharders=sharders, device=torch.device("cpu")
    )


def two_ranks(rank: int, world_size: int) -> None:
    model = models.recstore("row_wise", ADAGRAD)
    models.train(model, **IDS)
    state, states = (
        stock_state_dict(model, NUM_ROWS),
        stock_optimizer_state_dict(model, NUM_ROWS),
    )
    other, stock = (
        models.recstore("column_wise", ADAGRAD),
        models.stock("table_wise", ADAGRAD),
    )
    both = mixed(ADAGRAD)
    load_stock_state_dict(other, state, states)
    load_into_stock(stock, state, states)
    load_stock_state_dict(both, state, states)
    for trained in (other, stock, both):
        models.train(trained, steps=2, **IDS)
    state, states = (
        stock_state_dict(other, NUM_ROWS),
        stock_optimizer_state_dict(other, NUM_ROWS),
    )
    for key, value in stock.state_dict().items():
        for part in value.local_shards() if key in (USER, ITEM) else ():
            torch.testing.assert_close(
                state[key], part.tensor.detach(), rtol=0, atol=1e-5
            )
    user = {"user": ROWS}
    torch.testing.assert_close(stock_state_dict(both, user), state, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        stock_optimizer_state_dict(both, user), states, rtol=0, atol=1e-5
    )
    with pytest.raises(ValueError, match="is sharded over several processes"):
        load_stock_state_dict(model, stock.state_dict())
    with pytest.raises(ValueError, match=r"table 'user' has \d+ ids outside \[0, 1\)"):
        stock_state_dict(other, {**NUM_ROWS, "user": 1})
    del states["state"][ITEM]  # Only one rank has a shard of this table.
    with pytest.raises(ValueError, match="the stock optimizer state has no item"):
        load_into_stock(stock, state, states)


def test_two_ranks() -> None:
    run_on_ranks(2, two_ranks)


def test_unsharded_models_take_it(one_rank: None) -> None:
    """Each kind of collection has the keys of the unsharded model."""
    bag = EmbeddingBagConfig(
        name="t", embedding_dim=4, num_embeddings=10, feature_names=["f"]
    )
    sequence = EmbeddingConfig(
        name="t", embedding_dim=4, num_embeddings=10, feature_names=["f"]
    )

    def processed() -> nn.Module:
        weighted = EmbeddingBagCollection(tables=[bag], is_weighted=True)
        return FeatureProcessedEmbeddingBagCollection(
            weighted, PositionWeightedModuleCollection({"f": 5})
        )

    for make, sharder in [
        (lambda: EmbeddingBagCollection(tables=[bag]), RecStoreSharder()),
        (
            lambda: EmbeddingCollection(tables=[sequence]),
            RecStoreEmbeddingCollectionSharder(),
        ),
        (
            processed,
            RecStoreFeatureProcessedEmbeddingBagCollectionSharder(RecStoreSharder()),
        ),
    ]:
        model = DistributedModelParallel(
            nn.Sequential(make()), sharders=[sharder], device=torch.device("cpu")
        )
        unsharded = nn.Sequential(make())
        load_stock_state_dict(model, unsharded.state_dict())
        state, other = stock_state_dict(model, {"t": 10}), nn.Sequential(make())
        other.load_state_dict(state)
        for key, value in unsharded.state_dict().items():
            assert torch.equal(other.state_dict()[key], value), key


def test_ids_outside_are_refused_or_left_out(one_rank: None) -> None:
    model = models.recstore(optimizer=ADAGRAD)
    models.train(model, low=-20, high=80)
    by_name = {table.name: table for table in model.module.sparse.recstore_tables()}
    ids = by_name["item"].ids()
    outside = int(((ids < 0) | (ids >= 60)).sum())
    assert 0 < outside < len(ids)
    by_name["user"].remove(by_name["user"].ids())
    for export in (stock_state_dict, stock_optimizer_state_dict):
        with pytest.raises(
            ValueError, match=rf"table 'item' has {outside} ids outside \[0, 60\)"
        ):
            export(model, {"user": 60, "item": 60})
    rows = stock_state_dict(model, {"user": 60, "item": 60}, leave_out=True)[ITEM]
    sums = stock_optimizer_state_dict(model, {"user": 60, "item": 60}, leave_out=True)[
        "state"
    ][ITEM]["item.momentum1"]
    inside = ids[(ids >= 0) & (ids < 60)]
    expected = by_name["item"].read_rows(inside)
    for plain, own in [(rows, expected["weight"]), (sums, expected["sum"])]:
        assert plain.shape == (60, models.DIM)
        assert torch.equal(plain[inside], own)
        assert plain.any(dim=1).sum() == len(inside)


def refused(model: DistributedModelParallel, message: str, *state: Any) -> None:
    before, dense = models.shards(model), model.module.over.weight.clone()
    with pytest.raises(ValueError, match=message):
        load_stock_state_dict(model, *state)
    models.assert_holds(model, before)
    assert torch.equal(model.module.over.weight, dense)


def test_what_does_not_fit_changes_nothing(one_rank: None) -> None:
    model = models.recstore(optimizer=ADAGRAD)
    models.train(model)
    stock = models.stock(optimizer=ADAGRAD)
    with torch.no_grad():
        stock.module.over.weight.add_(1)
    state = {key: to_plain(key, value) for key, value in stock.state_dict().items()}
    states = stock_optimizer_state_dict(model, NUM_ROWS, leave_out=True)["state"]

    def without(entries: dict[str, Any], key: str) -> dict[str, Any]:
        return {k: value for k, value in entries.items() if k != key}

    def optimizer(**item: Tensor) -> dict[str, Any]:
        return {
            "state": {
                **states,
                ITEM: {f"item.{name}": value for name, value in item.items()},
            }
        }

    ones = torch.ones(ROWS, models.DIM)
    refused(model, f"the stock state_dict has no {ITEM}", without(state, ITEM))
    refused(
        model,
        "has stranger.weight, which the model does not have",
        {**state, "stranger.weight": ones},
    )
    refused(
        model,
        r"table 'item': .* is of shape \(100, 5\), and the table's dim is 8",
        {**state, ITEM: torch.ones(ROWS, 5)},
    )
    refused(
        model,
        r"over.bias is of shape \(3,\), and of shape \(1,\) in the model",
        {**state, "over.bias": torch.ones(3)},
    )
    refused(model, 'the stock optimizer state has no "state"', state, states)
    refused(
        model,
        "the stock optimizer state has no item.mom",
        state,
        {"state": without(states, ITEM)},
    )
    refused(
        model,
        "the stock optimizer state has stranger, which",
        state,
        {"state": {**states, "stranger": {}}},
    )
    refused(
        model,
        "'item': the stock optimizer state has no item.momentum1",
        state,
        optimizer(),
    )
    refused(
        model,
        "'item'.* has item.prev_iter, which",
        state,
        optimizer(momentum1=ones, prev_iter=ones),
    )
    refused(
        model,
        r"item.momentum1 is of shape \(100,\)",
        state,
        optimizer(momentum1=torch.ones(ROWS)),
    )
    # This state would have fitted without the error.
    load_stock_state_dict(model, state, optimizer(momentum1=ones))

    with pytest.raises(
        ValueError, match="num_rows has no number for RecStore table 'item'"
    ):
        stock_state_dict(model, {"user": ROWS})
    with pytest.raises(ValueError, match="no RecStore table 'stranger'"):
        stock_state_dict(model, {**NUM_ROWS, "stranger": 3})
    with pytest.raises(
        ValueError, match="num_rows of table 'user' must be at least 0, got -1"
    ):
        stock_state_dict(model, {**NUM_ROWS, "user": -1})
    before = {
        key: to_plain(key, value).clone() for key, value in stock.state_dict().items()
    }
    with pytest.raises(
        ValueError,
        match=(
            r"item.weight is of shape \(99, 8\), and of shape \(100, 8\) in the model"
        ),
    ):
        load_into_stock(
            stock, stock_state_dict(model, {**NUM_ROWS, "item": 99}, leave_out=True)
        )
    for key, value in stock.state_dict().items():
        assert torch.equal(to_plain(key, value), before[key])


@pytest.mark.parametrize("optimizer", [AdamW(lr=0.1), Adam(lr=0.1)])
def test_optimizers_that_torchrec_lacks_are_refused(
    one_rank: None, optimizer: Adam | AdamW
) -> None:
    config = EmbeddingBagConfig(
        name="t", embedding_dim=4, num_embeddings=10, feature_names=["f"]
    )
    model = DistributedModelParallel(
        EmbeddingBagCollection(tables=[config], device=torch.device("meta")),
        sharders=[RecStoreSharder(optimizer=optimizer)],
        device=torch.device("cpu"),
    )
    if type(optimizer) is Adam:
        assert stock_optimizer_state_dict(model, {"t": 10})["state"][
            "embedding_bags.t.weight"
        ]
    else:
        with pytest.raises(
            ValueError,
            match="table 't': TorchRec's fused tables have no optimizer AdamW",
        ):
            stock_optimizer_state_dict(model, {"t": 10})
