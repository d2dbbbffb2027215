"""Frozen tables beside trained ones, at one and two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.planner import Topology

from tests.checkpoint import models
from tests.checkpoint.test_load import KINDS, Rows, whole
from tests.distributed.workers import run_on_ranks
from torchrec_recstore import (
    RecStoreEmbeddingCollectionSharder,
    RecStorePrefetchPipeline,
    RecStoreSharder,
    apply_delta,
    load_checkpoint,
    load_distributed_checkpoint,
    reshard,
    save_checkpoint,
    table_stats,
)
from torchrec_recstore.optim import SGD
from torchrec_recstore.options import Expiry, TableOptions
from torchrec_recstore.planner import RecStoreConstraints, RecStorePlanner

ADAM = EmbOptimType.ADAM
# those of models.batch
IDS = torch.randint(-(2**62), 2**62, (40,), generator=torch.Generator().manual_seed(1))


def make(
    kind: str,
    frozen: tuple[str, ...] = ("user",),
    *,
    by_parameter: bool = False,
    optimizer: EmbOptimType = ADAM,
    **more: Any,
) -> DistributedModelParallel:
    """The model of tests/checkpoint/models.py with frozen tables, by their options or
    by their parameter.
    """
    torch.manual_seed(0)
    model, world = models.Model(), dist.get_world_size()
    sharding_type = "row_wise" if kind == "hash" else kind
    if by_parameter:
        for name in frozen:
            model.sparse.embedding_bags[name].weight.requires_grad_(False)
    sharders = [
        RecStoreSharder(fused_params={"optimizer": optimizer, "learning_rate": 0.1})
    ]
    constraints = {
        name: RecStoreConstraints(
            sharding_types=[sharding_type],
            min_partition=(
                4
                if sharding_type in ("column_wise", "table_column_wise", "grid_shard")
                else None
            ),
            options=TableOptions(
                routing="hash" if kind == "hash" else "block",
                frozen=name in frozen and not by_parameter,
                **more,
            ),
        )
        for name in models.TABLES
    }
    planner = RecStorePlanner(
        topology=Topology(
            world_size=world, local_world_size=world, compute_device="cpu"
        ),
        constraints=constraints,
        debug=False,
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    return DistributedModelParallel(
        model, plan=plan, sharders=sharders, device=torch.device("cpu")
    )


def of_table(rows: Rows, name: str) -> Rows:
    return {key: row for key, row in rows.items() if key[0] == name}


def shards(model: DistributedModelParallel, name: str) -> list[Any]:
    return [shard.table for shard in model.module.sparse.recstore_state.shards[name]]


def weights(model: DistributedModelParallel, name: str) -> dict[int, Tensor]:
    return {
        key[1]: row["weight"] for key, row in whole(model).items() if key[0] == name
    }


def assert_equal(one: dict[int, Tensor], other: dict[int, Tensor]) -> None:
    assert one.keys() == other.keys()
    for identity, row in one.items():
        assert torch.equal(row, other[identity])


def assert_frozen(
    model: DistributedModelParallel, before: Rows, state: list[Any], name: str = "user"
) -> None:
    """Nothing of the table has changed."""
    rows = of_table(whole(model), name)
    assert rows.keys() == before.keys()
    for key, row in rows.items():
        # no state of an optimizer
        assert row.keys() == {"weight", "last_step", "frequency"}
        for part, value in row.items():
            assert torch.equal(value, before[key][part])
    assert clocks(model, name) == state


def clocks(model: DistributedModelParallel, name: str = "user") -> list[Any]:
    return [
        (table.steps, table.optimizer_steps, table.stats().lookups, len(table))
        for table in shards(model, name)
    ]


def batches(count: int) -> Iterator[KeyedJaggedTensor]:
    for step in range(count):
        yield models.batch(100 * dist.get_rank() + step)


def train_one(rank: int, world_size: int, *, path: str, kinds: tuple[str, ...]) -> None:
    """A frozen table does not change, and the other one is trained as if its rows were
    constant.
    """
    for kind in kinds:
        for by_parameter in (False, True):
            model = make(kind, by_parameter=by_parameter)
            load_checkpoint(model, f"{path}/trained", strict=False)
            before = of_table(whole(model), "user")
            assert before
            state, item = clocks(model), weights(model, "item")
            for batch in batches(4):
                model(batch).sum().backward()
            assert_frozen(model, before, state)
            assert weights(model, "item").keys() > item.keys() or any(
                not torch.equal(row, item[identity])
                for identity, row in weights(model, "item").items()
            )
            # The trained table learns what it learns beside a table that is trained,
            # because the loss is a sum.
            trained = make(kind, frozen=())
            load_checkpoint(trained, f"{path}/trained")
            for batch in batches(4):
                trained(batch).sum().backward()
            assert_equal(weights(model, "item"), weights(trained, "item"))
            parameters = dict(model.named_parameters())
            (frozen,) = [
                parameter for name, parameter in parameters.items() if "user" in name
            ]
            assert not frozen.requires_grad
    dist.barrier()


@pytest.fixture
def trained(one_rank: None, tmp_path: Path) -> DistributedModelParallel:
    """A trained model, whose checkpoint is ``tmp_path / "trained"``."""
    model = make("table_wise", frozen=())
    models.train(model, steps=2, distinct=20)
    save_checkpoint(model, tmp_path / "trained")
    return model


def test_one_rank(trained: DistributedModelParallel, tmp_path: Path) -> None:
    train_one(0, 1, path=str(tmp_path), kinds=KINDS)


@pytest.mark.slow
def test_two_ranks(trained: DistributedModelParallel, tmp_path: Path) -> None:
    run_on_ranks(2, partial(train_one, path=str(tmp_path), kinds=KINDS))


def test_frozen_and_trained_tables_are_not_grouped(one_rank: None) -> None:
    model = make("table_wise")
    groups = {
        kernel.frozen: kernel.config.table_names()
        for kernel in model.module.sparse.recstore_kernels()
    }
    assert groups == {True: ["user"], False: ["item"]}
    for table in shards(model, "user"):
        assert isinstance(table.optimizer, SGD)
        assert table.options.frozen
    both = make("table_wise", frozen=("user", "item"))
    (kernel,) = both.module.sparse.recstore_kernels()
    assert kernel.frozen


@pytest.mark.parametrize("missing", ["zeros", "init"])
def test_ids_without_a_row(one_rank: None, missing: str) -> None:
    model = make("table_wise", ("user", "item"), missing=missing)
    out = model.module.sparse(models.batch(3)).wait().values()
    assert bool(out.any()) is (missing == "init")
    assert not whole(model)
    out.sum().backward()
    assert not whole(model)
    assert all(stats.steps == 0 for stats in table_stats(model).values())


@pytest.mark.parametrize(
    "pipeline", [TrainPipelineSparseDist, RecStorePrefetchPipeline]
)
def test_in_a_pipeline(
    trained: DistributedModelParallel, tmp_path: Path, pipeline: Any
) -> None:
    class WithLoss(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.inner = model

        def forward(self, batch: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
            out = self.inner(batch)
            return out.sum(), out

    torch.manual_seed(0)
    sharder = RecStoreSharder(fused_params={"optimizer": ADAM, "learning_rate": 0.1})
    options = {
        name: RecStoreConstraints(options=TableOptions(frozen=name == "user"))
        for name in models.TABLES
    }
    planner = RecStorePlanner(
        topology=Topology(world_size=1, compute_device="cpu"),
        constraints=options,
        debug=False,
    )
    wrapped = WithLoss(models.Model())
    plan = planner.collective_plan(wrapped, [sharder], dist.group.WORLD)
    model = DistributedModelParallel(
        wrapped, plan=plan, sharders=[sharder], device=torch.device("cpu")
    )
    load_checkpoint(model, tmp_path / "trained", tables=["user", "item"])
    state = model.module.inner.sparse.recstore_state
    (user,), (item,) = (
        [shard.table for shard in state.shards[name]] for name in ("user", "item")
    )
    rows, rows_of_item = (
        user.read_rows(user.ids()),
        item.read_rows(item.ids())["weight"],
    )
    dense = torch.optim.SGD(model.module.inner.over.parameters(), lr=0.1)
    steps = pipeline(model, dense, torch.device("cpu"))
    data = batches(6)
    for _ in range(6):
        steps.progress(data)
    assert user.steps == 2
    for key, value in user.read_rows(user.ids()).items():
        assert torch.equal(value, rows[key])
    assert len(item) > len(rows_of_item)


def test_checkpoints_of_frozen_tables(
    trained: DistributedModelParallel, tmp_path: Path
) -> None:
    model = make("table_wise")
    load_checkpoint(model, tmp_path / "trained")
    assert_equal(weights(model, "user"), weights(trained, "user"))
    # The table does not have the base's states.
    with pytest.raises(ValueError, match="neither saved nor loaded"):
        save_checkpoint(model, tmp_path / "delta", delta_of=tmp_path / "trained")
    save_checkpoint(model, tmp_path / "frozen")
    models.train(model, steps=2)
    save_checkpoint(model, tmp_path / "delta", delta_of=tmp_path / "frozen")
    again = make("row_wise")
    load_checkpoint(again, tmp_path / "delta")
    for (key, row), (other_key, other) in zip(
        whole(again).items(), whole(model).items(), strict=False
    ):
        if key == other_key:
            assert all(torch.equal(row[name], other[name]) for name in row)
    assert whole(again).keys() == whole(model).keys()
    # A model that trains the table again starts with new states.
    thawed = make("table_wise", frozen=())
    with pytest.raises(ValueError, match="optimizer=False"):
        load_checkpoint(thawed, tmp_path / "frozen")
    load_checkpoint(thawed, tmp_path / "frozen", optimizer=False)
    assert_equal(weights(thawed, "user"), weights(trained, "user"))
    models.train(thawed, steps=1)


def test_a_delta_of_the_trainer(
    trained: DistributedModelParallel, tmp_path: Path
) -> None:
    model = make("column_wise")
    load_checkpoint(model, tmp_path / "trained")
    models.train(trained, steps=2)
    save_checkpoint(trained, tmp_path / "delta", delta_of=tmp_path / "trained")
    apply_delta(model, tmp_path / "delta")
    assert_equal(weights(model, "user"), weights(trained, "user"))


def test_states_and_distributed_checkpoints(
    trained: DistributedModelParallel, tmp_path: Path
) -> None:
    import torch.distributed.checkpoint as dcp

    def saved(of: DistributedModelParallel, name: str) -> Path:
        state = {"model": of.state_dict(), "optimizer": of.fused_optimizer.state_dict()}
        dcp.save(state, checkpoint_id=tmp_path / name)
        return tmp_path / name

    model = make("row_wise")
    load_distributed_checkpoint(model, saved(trained, "dcp"))
    assert_equal(weights(model, "user"), weights(trained, "user"))
    rows, state = of_table(whole(model), "user"), clocks(model)
    models.train(model, steps=2)
    assert_frozen(model, rows, state)
    again = make("table_wise")
    load_distributed_checkpoint(again, saved(model, "frozen dcp"))
    assert_frozen(again, rows, clocks(again))
    copied = make("row_wise")
    copied.load_state_dict(model.state_dict())
    copied.fused_optimizer.load_state_dict(model.fused_optimizer.state_dict())
    assert_frozen(copied, rows, clocks(copied))


def test_reshard(trained: DistributedModelParallel, tmp_path: Path) -> None:
    for by_parameter in (False, True):
        model = make("table_wise", by_parameter=by_parameter)
        load_checkpoint(model, tmp_path / "trained")
        rows = of_table(whole(model), "user")
        reshard(model, make("column_wise", by_parameter=by_parameter).plan)
        models.train(model, steps=2)
        assert of_table(whole(model), "user").keys() == rows.keys()
        assert_equal(
            weights(model, "user"), {key[1]: row["weight"] for key, row in rows.items()}
        )
    with pytest.raises(
        ValueError, match="table 'user' is trained, and would be frozen"
    ):
        reshard(trained, make("column_wise").plan)
    with pytest.raises(
        ValueError, match="table 'user' is frozen, and would be trained"
    ):
        reshard(make("table_wise"), make("column_wise", frozen=()).plan)


def test_rows_do_not_expire(trained: DistributedModelParallel, tmp_path: Path) -> None:
    model = make("table_wise", expiry=Expiry(steps=1))
    load_checkpoint(model, tmp_path / "trained")
    rows, state = of_table(whole(model), "user"), clocks(model)
    models.train(model, steps=6)
    assert_frozen(model, rows, state)


def test_a_sharded_parameter_cannot_change(one_rank: None) -> None:
    model = make("table_wise")
    parameters = {
        name.split(".")[-2]: parameter
        for name, parameter in model.named_parameters()
        if "sparse" in name
    }
    with pytest.raises(
        RuntimeError,
        match=r"table 'item' is trained, .* cannot become frozen: .*frozen=True",
    ):
        model.requires_grad_(False)
    with pytest.raises(
        RuntimeError,
        match=r"table 'user' is frozen, .* cannot become trained: .*frozen=False",
    ):
        parameters["user"].requires_grad_(True)
    parameters["user"].requires_grad_(False)
    parameters["item"].requires_grad = True
    assert [parameters[name].requires_grad for name in ("user", "item")] == [
        False,
        True,
    ]
    frozen = make("table_wise", ("user", "item"))
    frozen.requires_grad_(False)


def test_sequences(one_rank: None) -> None:
    configs = [
        EmbeddingConfig(
            name=name, embedding_dim=4, num_embeddings=100, feature_names=[name]
        )
        for name in ("a", "b")
    ]
    collection = EmbeddingCollection(tables=configs, device=torch.device("meta"))
    constraints = {
        "a": RecStoreConstraints(options=TableOptions(frozen=True, missing="init"))
    }
    sharder = RecStoreEmbeddingCollectionSharder(optimizer=SGD(lr=0.1))
    planner = RecStorePlanner(
        topology=Topology(world_size=1, compute_device="cpu"),
        constraints=constraints,
        debug=False,
    )
    plan = planner.collective_plan(collection, [sharder], dist.group.WORLD)
    model = DistributedModelParallel(
        collection, plan=plan, sharders=[sharder], device=torch.device("cpu")
    )
    batch = KeyedJaggedTensor(
        ["a", "b"], values=torch.tensor([1, 2, 3, 4]), lengths=torch.tensor([2, 2])
    )
    out = model(batch)
    assert out["a"].values().any()
    (out["a"].values().sum() + out["b"].values().sum()).backward()
    assert {name: stats.rows for name, stats in table_stats(model).items()} == {
        "a": 0,
        "b": 2,
    }


def test_the_planner_counts_no_states(one_rank: None) -> None:
    def planned_bytes(**arguments: Any) -> int:
        torch.manual_seed(0)
        model = models.Model()
        if arguments.pop("by_parameter", False):
            model.requires_grad_(False)
        constraint = RecStoreConstraints(
            sharding_types=["table_wise"], options=TableOptions(**arguments)
        )
        planner = RecStorePlanner(
            topology=Topology(world_size=1, compute_device="cpu"),
            constraints=dict.fromkeys(models.TABLES, constraint),
            debug=False,
        )
        planner.plan(model, [RecStoreSharder(fused_params={"optimizer": ADAM})])
        return sum(
            shard.storage.ddr
            for option in planner._best_plan
            for shard in option.shards
        )

    trained_bytes = planned_bytes()
    assert (
        planned_bytes(frozen=True)
        == planned_bytes(by_parameter=True)
        == trained_bytes - 2 * 100 * 2 * 8 * 4
    )
