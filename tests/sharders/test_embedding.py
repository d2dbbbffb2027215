"""Tests ``EmbeddingCollection`` where it differs from ``EmbeddingBagCollection``."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingCollection, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import DataType

from torchrec_recstore.options import ConstantInit, TableOptions
from torchrec_recstore.planner import RecStoreConstraints, RecStorePlanner
from torchrec_recstore.sharders import (
    RecStoreEmbeddingCollectionSharder,
    RecStoreShardedEmbeddingCollection,
    RecStoreSharder,
    table_stats,
)
from torchrec_recstore.utils import RecStoreWarning

from .models import bag, batch, collection, sequence, sequences, sharded, tables

pytestmark = pytest.mark.usefixtures("one_rank")

INT64 = torch.iinfo(torch.int64)


@pytest.mark.parametrize("sharding_type", ["table_wise", "row_wise", "column_wise"])
def test_rows_come_in_the_order_of_the_batch(sharding_type: str) -> None:
    model = sharded(sequences(sequence(dim=8, rows=2**40)), sharding_type=sharding_type)
    ids = [INT64.max, 1, -1, INT64.min, 1]
    jagged = model(batch(f=[ids[:2], [], ids[2:]]))["f"]
    assert jagged.lengths().tolist() == [2, 0, 3]
    assert torch.equal(jagged.values()[1], jagged.values()[4])
    stats = table_stats(model)["t"]
    assert (stats.rows, stats.inserts, stats.misses, stats.steps) == (4, 4, 4, 1)
    jagged.values().sum().backward()

    model.eval()
    rows = model(batch(f=[ids]))["f"].values()
    if sharding_type != "column_wise":
        assert torch.equal(rows, tables(model)["t"].lookup(torch.tensor(ids)))
    assert torch.equal(
        rows, jagged.values().detach() - 0.01 * torch.tensor([1.0, 2, 1, 1, 2])[:, None]
    )
    missing = model(batch(f=[[1, 77]]))["f"].values()
    assert missing.requires_grad
    with pytest.warns(
        RecStoreWarning,
        match="tables t: backward of a lookup in evaluation mode updates no row",
    ):
        missing.sum().backward()
    assert torch.equal(missing[1], torch.zeros(8))
    assert table_stats(model)["t"].rows == 4

    model.train()
    with torch.no_grad():
        model(batch(f=[[79]]))["f"].values()
    assert table_stats(model)["t"].rows == 4


def test_several_tables_and_features_are_one_step_each() -> None:
    model = sharded(
        sequences(sequence("a", ["f", "g"]), sequence("b", ["g", "h"])),
        options={
            "a": TableOptions(initializer=ConstantInit(1.0)),
            "b": TableOptions(initializer=ConstantInit(2.0)),
        },
    )
    for _ in range(3):
        out = model(batch(f=[[1], [2, 3]], g=[[], [3]], h=[[], []]))
        assert {key: jagged.values().shape for key, jagged in out.items()} == {
            "f": (3, 4),
            "g@a": (1, 4),
            "g@b": (1, 4),
            "h": (0, 4),
        }
        sum(jagged.values().sum() for jagged in out.values()).backward()
    stats = table_stats(model)
    assert (stats["a"].steps, stats["a"].rows) == (3, 3)
    assert (stats["b"].steps, stats["b"].rows) == (3, 1)
    assert tables(model)["b"].lookup(torch.tensor([3]))[0, 0] == pytest.approx(1.97)


def test_empty_batches() -> None:
    model = sharded(
        sequences(sequence("a", ["f"]), sequence("b", ["g"])), sharding_type="row_wise"
    )
    out = model(batch(f=[[], []], g=[[], []]))
    assert out["f"].values().shape == (0, 4)
    (out["f"].values().sum() + out["g"].values().sum()).backward()
    assert table_stats(model)["a"].steps == 1


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_narrow_ids_are_the_same_ids(dtype: torch.dtype) -> None:
    model = sharded(sequences(sequence(rows=10)), sharding_type="row_wise")
    model(batch(dtype=dtype, f=[[-1, 3], [30000, -30000]]))[
        "f"
    ].values().sum().backward()
    assert tables(model)["t"].ids().tolist() == [-30000, -1, 3, 30000]


def test_batch_size_may_vary_by_feature_in_evaluation_alone() -> None:
    model = sharded(
        sequences(sequence("t", ["f", "g"])),
        options={"t": TableOptions(missing="init")},
    )
    kjt = KeyedJaggedTensor(
        keys=["f", "g"],
        values=torch.tensor([1, 2, 3, 4]),
        lengths=torch.tensor([2, 1, 1]),
        stride_per_key_per_rank=[[2], [1]],
        inverse_indices=(["f", "g"], torch.tensor([[0, 1, 0], [0, 0, 0]])),
    )
    with pytest.raises(NotImplementedError, match=r"'t'.*no gradient"):
        model(kjt)
    model.eval()
    with torch.no_grad():
        rows = model(kjt)
    assert torch.equal(
        rows["f"].values(), tables(model)["t"].lookup(torch.tensor([1, 2, 3, 1, 2]))
    )
    assert rows["g"].values().shape == (3, 4)


class Both(nn.Module):
    """A model with two collections of each kind."""

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            [collection(bag(name, [name]), device=device) for name in ("a", "b")]
        )
        self.rows = nn.ModuleList(
            [sequences(sequence(name, [name]), device=device) for name in ("c", "d")]
        )

    def forward(self, kjt: KeyedJaggedTensor) -> torch.Tensor:
        total = sum(bags(kjt).values().sum() for bags in self.bags)
        return total + sum(
            jagged.values().sum() for rows in self.rows for jagged in rows(kjt).values()
        )


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_several_collections_without_a_plan(device: str) -> None:
    model = DistributedModelParallel(
        Both(device),
        sharders=[RecStoreSharder(), RecStoreEmbeddingCollectionSharder()],
        device=torch.device("cpu"),
    )
    model(batch(a=[[1]], b=[[-2, 2]], c=[[3]], d=[[4, 4, 5]])).backward()
    assert {name: stats.rows for name, stats in table_stats(model).items()} == {
        "a": 1,
        "b": 2,
        "c": 1,
        "d": 2,
    }
    assert sum(parameter.numel() for parameter in model.parameters()) == 0
    # Each table has weight, weight_id and weight_rows.
    assert len(model.state_dict()) == 3 * 4
    model.load_state_dict(model.state_dict())


def test_tables_of_the_unsharded_module_beside_recstore_keep_their_weights() -> None:
    stock = ParameterConstraints(
        sharding_types=["table_wise"], compute_kernels=["fused"]
    )
    rows = sequences(
        sequence("stock", ["f"], rows=10), sequence("t", ["g"]), device="cpu"
    )
    weight = rows.embeddings["stock"].weight.detach().clone()
    constraints = {
        "stock": stock,
        "t": RecStoreConstraints(sharding_types=["table_wise"]),
    }
    model = sharded(rows, constraints=constraints)
    assert torch.equal(model(batch(f=[[3, 9]], g=[[-1]]))["f"].values(), weight[[3, 9]])
    assert set(table_stats(model)) == {"t"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"data_type": DataType.INT4}, "'t'.*data_type.*INT4"),
        ({"init_fn": partial(nn.init.normal_, std=0.1)}, "'t'.*init_fn"),
        ({"use_virtual_table": True}, "'t'.*use_virtual_table"),
    ],
)
def test_what_a_table_cannot_be_fails_when_sharding(
    more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sharded(sequences(sequence(**more)))


@pytest.mark.parametrize(
    "sharding_type", ["table_row_wise", "grid_shard", "table_column_wise"]
)
def test_sharding_types_that_torchrec_has_for_bags_alone_are_refused(
    sharding_type: str,
) -> None:
    plan = sharded(sequences(sequence())).plan
    plan.get_plan_for_module("")["t"].sharding_type = sharding_type
    with pytest.raises(
        ValueError, match=rf"'t'.*{sharding_type}.*EmbeddingCollection.*table_wise"
    ):
        DistributedModelParallel(
            sequences(sequence()),
            plan=plan,
            sharders=[RecStoreEmbeddingCollectionSharder()],
        )


def test_indices_with_hash_routing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"need_indices.*\['f'\]"):
        sharded(
            sequences(sequence(), need_indices=True),
            options={"t": TableOptions(routing="hash")},
            sharding_type="row_wise",
        )


def test_indices() -> None:
    model = sharded(sequences(sequence(), need_indices=True), sharding_type="row_wise")
    assert model(batch(f=[[-5, 7]]))["f"].weights().tolist() == [-5, 7]


@pytest.mark.parametrize("planner", [EmbeddingShardingPlanner, RecStorePlanner])
@pytest.mark.parametrize(
    "sharder",
    [
        RecStoreEmbeddingCollectionSharder(),
        RecStoreEmbeddingCollectionSharder().with_stock_kernels(),
    ],
)
def test_planners(
    planner: type[EmbeddingShardingPlanner], sharder: ModuleSharder[EmbeddingCollection]
) -> None:
    topology = Topology(world_size=2, compute_device="cpu")
    constraints = {"t": RecStoreConstraints(sharding_types=["row_wise"])}
    plan = planner(topology=topology, constraints=constraints).plan(
        sequences(sequence(rows=2**30)), [sharder]
    )
    (entry,) = plan.get_plan_for_module("").values()
    assert (entry.sharding_type, entry.compute_kernel) == (
        "row_wise",
        "customized_kernel",
    )
    assert sharder.sharded_module_type is RecStoreShardedEmbeddingCollection
