"""``state_dict`` of models and fused optimizers is loaded into equal models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv

from tests.distributed.workers import run_on_ranks
from torchrec_recstore.checkpoint import (
    export_dense_weights,
    load_distributed_checkpoint,
)
from torchrec_recstore.optim import Adam
from torchrec_recstore.sharders import RecStoreEmbeddingCollectionSharder, layout
from torchrec_recstore.sharders.layout import LocalShard
from torchrec_recstore.store import Table

from . import models

USER_IDS = "sparse.embedding_bags.user.weight_id"


def forth_and_back(sharding: str) -> None:
    model = models.recstore(sharding, EmbOptimType.EXACT_ADAGRAD)
    models.train(model)
    state, optimizer = model.state_dict(), model.fused_optimizer.state_dict()
    before = models.shards(model)
    models.train(model, steps=9, distinct=60)
    model.load_state_dict(state)
    model.fused_optimizer.load_state_dict(optimizer)
    assert all(table.steps == 5 for table in model.module.sparse.recstore_tables())
    models.assert_holds(model, before)


def refused_on_every_rank() -> None:
    model = models.recstore("table_wise")
    models.train(model)
    before, state = models.shards(model), model.state_dict()
    with pytest.raises(ValueError, match=r"table 'user'.*the table's dim is 8"):
        model.load_state_dict(
            {
                **state,
                "sparse.embedding_bags.user.weight": torch.zeros(
                    state[USER_IDS].size()[0], 3
                ),
            }
        )
    optimizer = model.fused_optimizer.state_dict()
    states = optimizer["state"]["sparse.embedding_bags.item.weight"]["rows"]
    states.update(
        id=torch.tensor([2**50]), sum=torch.ones(1, 1), rows=torch.tensor([1])
    )
    with pytest.raises(ValueError, match="id 1125899906842624 has no row"):
        model.fused_optimizer.load_state_dict(optimizer)
    models.assert_holds(model, before)


def two_ranks(rank: int, world_size: int) -> None:
    for sharding in ("row_wise", "column_wise", "table_wise"):
        forth_and_back(sharding)
    refused_on_every_rank()


def test_two_ranks() -> None:
    run_on_ranks(2, two_ranks)


@pytest.mark.parametrize(
    "optimizer",
    [
        EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        EmbOptimType.ADAM,
        EmbOptimType.PARTIAL_ROWWISE_LAMB,
    ],
)
def test_a_resumed_run_is_the_run_that_never_stopped(
    one_rank: None, optimizer: EmbOptimType
) -> None:
    model, other = (
        models.recstore(optimizer=optimizer),
        models.recstore(optimizer=optimizer),
    )
    models.train(model)
    other.load_state_dict(model.state_dict())
    other.fused_optimizer.load_state_dict(model.fused_optimizer.state_dict())
    for trained in (model, other):
        models.train(trained, steps=3, distinct=50)
    models.assert_holds(other, models.shards(model))


def test_empty_tables_and_plain_sgd(one_rank: None) -> None:
    model = models.recstore(optimizer=EmbOptimType.EXACT_SGD)
    state = model.state_dict()
    assert tuple(state["sparse.embedding_bags.user.weight"].size()) == (0, models.DIM)
    optimizer = model.fused_optimizer.state_dict()
    rows = optimizer["state"]["sparse.embedding_bags.user.weight"]["rows"]
    assert list(rows) == [
        "id",
        "columns",
        "rows",
        "steps",
        "optimizer_steps",
        "last_step",
        "frequency",
    ]
    models.train(model)
    model.load_state_dict(state)
    model.fused_optimizer.load_state_dict(optimizer)
    assert [
        (len(table), table.steps) for table in model.module.sparse.recstore_tables()
    ] == [(0, 0), (0, 0)]


def test_stock_state_goes_in_and_dense_comes_out(one_rank: None) -> None:
    stock, model = models.stock(), models.recstore()
    models.train(stock, low=0, high=100)
    model.load_state_dict(stock.state_dict())
    batch = models.batch(3, low=0, high=100)
    assert torch.equal(stock.eval()(batch), model.eval()(batch))
    models.train(model.train(), low=0, high=100)
    dense = {
        f"sparse.embedding_bags.{name}.weight": export_dense_weights(model, name, 100)
        for name in models.TABLES
    }
    stock.load_state_dict({**stock.state_dict(), **dense})
    assert torch.equal(stock.eval()(batch), model.eval()(batch))


def test_what_does_not_fit_is_refused(one_rank: None) -> None:
    model = models.recstore()
    models.train(model)
    state = model.state_dict()
    models.train(model, steps=2, distinct=50)
    before = models.shards(model)
    # The last table does not fit. The first table must not have changed either.
    for broken, message in [
        (
            {"sparse.embedding_bags.item.weight": torch.zeros(2, 3)},
            "table 'item'.*weight",
        ),
        (
            {"sparse.embedding_bags.item.weight_id": torch.zeros(2, dtype=torch.int64)},
            "its ids are",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            model.load_state_dict({**state, **broken})
    for key, value, message in [
        ("sum", None, "table 'user': the optimizer state has no sum"),
        (
            "sum",
            torch.zeros(len(before[0][2]), 2),
            r"table 'user': sum is of shape \(.*, 2\), not 1 columns",
        ),
        ("last_step", torch.zeros(2), r"table 'user': last_step is of shape \(2,\)"),
    ]:
        optimizer = model.fused_optimizer.state_dict()
        rows = optimizer["state"]["sparse.embedding_bags.user.weight"]["rows"]
        rows.pop(key) if value is None else rows.update({key: value})
        with pytest.raises(ValueError, match=message):
            model.fused_optimizer.load_state_dict(optimizer)
    models.assert_holds(model, before)


def test_sequences(one_rank: None, tmp_path: Path) -> None:
    def build() -> DistributedModelParallel:
        config = EmbeddingConfig(
            name="t", embedding_dim=4, num_embeddings=100, feature_names=["f"]
        )
        module = EmbeddingCollection(tables=[config], device=torch.device("meta"))
        sharder = RecStoreEmbeddingCollectionSharder(optimizer=Adam(lr=0.1))
        return DistributedModelParallel(
            module, sharders=[sharder], device=torch.device("cpu")
        )

    batch = KeyedJaggedTensor(
        ["f"], values=torch.tensor([2**50, -1, 2**50]), lengths=torch.tensor([2, 1])
    )

    def step(model: DistributedModelParallel) -> torch.Tensor:
        values: torch.Tensor = model(batch).wait()["f"].values()
        values.square().sum().backward()
        return values.detach()

    model, other, third = build(), build(), build()
    for _ in range(3):
        step(model)
    state = {
        "model": model.state_dict(),
        "optimizer": model.fused_optimizer.state_dict(),
    }
    assert sorted(state["model"]) == [
        f"embeddings.t.weight{suffix}" for suffix in ("", "_id", "_rows")
    ]
    other.load_state_dict(state["model"])
    other.fused_optimizer.load_state_dict(state["optimizer"])
    dcp.save(state, checkpoint_id=tmp_path / "saved")
    load_distributed_checkpoint(third, tmp_path / "saved")
    for _ in range(2):
        values = step(model)
        assert torch.equal(values, step(other))
        assert torch.equal(values, step(third))


def test_a_table_without_rows_in_grid_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first of four ranks on two nodes. A node has half of the columns, and each of
    # its ranks half of the rows.
    right = (0, range(8, 16), torch.float32)
    monkeypatch.setattr(
        layout,
        "all_gathered",
        lambda local, env: [local, local, ([right], []), ([right], [])],
    )
    shards = [LocalShard(Table(16, columns=range(8)), None)]
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        spread = layout.ShardLayout(
            "t", shards, ShardingEnv.from_process_group(dist.group.WORLD)
        )
        weight = spread.by_column([torch.empty(0, 8)])
    finally:
        dist.destroy_process_group()
    assert [piece.shard_offsets for piece in weight.metadata().shards_metadata] == [
        [0, 0],
        [0, 8],
    ]
