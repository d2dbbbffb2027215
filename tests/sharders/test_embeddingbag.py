from __future__ import annotations

import gc
import itertools
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.distributed.optim import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor, PoolingType
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DataType

from torchrec_recstore.checkpoint import load_dense_weights
from torchrec_recstore.optim import SGD
from torchrec_recstore.options import ConstantInit, TableOptions, UniformInit
from torchrec_recstore.planner import RecStoreConstraints
from torchrec_recstore.sharders import RecStoreSharder, table_stats

from .models import bag, batch, collection, sequence, sequences, sharded, tables

pytestmark = pytest.mark.usefixtures("one_rank")

INT64 = torch.iinfo(torch.int64)


@pytest.mark.parametrize("sharding_type", ["table_wise", "row_wise", "column_wise"])
def test_training_makes_rows_and_evaluation_changes_nothing(sharding_type: str) -> None:
    model = sharded(collection(bag(dim=8, rows=2**40)), sharding_type=sharding_type)
    raw = [[1, -1], [INT64.max, INT64.min, 1]]
    pooled = model(batch(f=raw)).values()
    pooled.sum().backward()
    stats = table_stats(model)["t"]
    assert (stats.rows, stats.inserts, stats.misses, stats.steps) == (4, 4, 4, 1)
    assert stats.bytes > 0
    assert sorted(tables(model)["t"].ids().tolist()) == [INT64.min, -1, 1, INT64.max]

    model.eval()
    rows = tables(model)["t"].lookup(torch.tensor([1, INT64.min]))
    out = model(batch(f=[[1, 77], [78]])).values()
    assert out.requires_grad
    if sharding_type != "column_wise":
        assert torch.equal(out[0], rows[0])
    assert torch.equal(out[1], torch.zeros(8))
    assert table_stats(model)["t"] == stats

    model.train()
    with torch.no_grad():
        model(batch(f=[[79], []])).values()
    assert table_stats(model)["t"].rows == 4
    model(batch(f=[[79], []])).values().sum().backward()
    assert table_stats(model)["t"].rows == 5


def test_one_step_a_forward_however_many_features() -> None:
    model = sharded(collection(bag("a", ["f", "g"]), bag("b", ["h"], dim=8)))
    for step in range(3):
        kjt = batch(f=[[step], [1]], g=[[1], [9]], h=[[], []])
        model(kjt).values().sum().backward()
    stats = table_stats(model)
    assert (stats["a"].steps, stats["a"].rows) == (3, 4)
    assert (stats["b"].steps, stats["b"].rows) == (3, 0)


@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
@pytest.mark.parametrize("sharding_type", ["table_wise", "row_wise"])
def test_pooling(pooling: PoolingType, sharding_type: str) -> None:
    model = sharded(
        collection(
            bag("a", ["f", "g"], pooling=pooling),
            bag("b", ["h"], dim=8, pooling=pooling),
        ),
        options={"a": TableOptions(initializer=ConstantInit(0.5))},
        sharding_type=sharding_type,
    )
    out = model(batch(f=[[1, 2], []], g=[[3], [4, 4, 4]], h=[[], [7]])).to_dict()
    scale = (
        {"f": (1.0, 0.0), "g": (0.5, 1.5)}
        if pooling == PoolingType.SUM
        else {"f": (0.5, 0.0), "g": (0.5, 0.5)}
    )
    for key, (first, second) in scale.items():
        torch.testing.assert_close(out[key], torch.tensor([[first] * 4, [second] * 4]))
    assert out["h"].shape == (2, 8)
    torch.testing.assert_close(
        out["h"][1], tables(model)["b"].lookup(torch.tensor([7]))[0]
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
@pytest.mark.parametrize("sharding_type", ["table_wise", "row_wise"])
def test_narrow_ids_are_the_same_ids(dtype: torch.dtype, sharding_type: str) -> None:
    ids = [[-1, 3], [30000, -30000]]
    wide, narrow = (
        sharded(collection(bag(rows=10)), sharding_type=sharding_type) for _ in range(2)
    )
    expected, out = (
        wide(batch(f=ids)).values(),
        narrow(batch(dtype=dtype, f=ids)).values(),
    )
    assert torch.equal(out, expected)
    out.sum().backward()
    assert tables(narrow)["t"].ids().tolist() == [-30000, -1, 3, 30000]


def test_ids_that_are_no_integers_are_refused() -> None:
    with pytest.raises(TypeError, match="float32"):
        sharded(collection(bag()))(batch(dtype=torch.float32, f=[[1]]))


def test_initial_rows_come_from_options_then_config_then_default() -> None:
    options = {"options": TableOptions(initializer=ConstantInit(3.0))}
    model = sharded(
        collection(
            bag("options", ["f"], weight_init_min=1.0, weight_init_max=2.0),
            bag("config", ["g"], weight_init_min=1.0, weight_init_max=2.0),
            bag("one_bound", ["h"], weight_init_max=0.5, rows=100),
            bag("hint", ["i"], rows=2**40, dim=64),
        ),
        options=options,
    )
    resolved = {
        name: table.options.initializer for name, table in tables(model).items()
    }
    assert resolved == {
        "options": ConstantInit(3.0),
        "config": UniformInit(1.0, 2.0),
        "one_bound": UniformInit(-0.1, 0.5),
        "hint": UniformInit(-(2.0**-10), 2.0**-10),
    }
    rows = model(batch(f=[[1]], g=[[1]], h=[[1]], i=[[1]])).to_dict()
    assert torch.equal(rows["f"], torch.full((1, 4), 3.0))
    assert (rows["g"] >= 1).all()
    assert rows["i"].std() > 2.0**-12


def test_missing_ids_read_as_the_tables_options_say() -> None:
    options = {"a": TableOptions(missing="init"), "b": TableOptions(missing="zeros")}
    model = sharded(
        collection(bag("a", ["f"]), bag("b", ["g"])), options=options
    ).eval()
    out = model(batch(f=[[5]], g=[[5]])).to_dict()
    assert out["f"].abs().sum() > 0
    assert out["g"].abs().sum() == 0
    assert [
        group.table_names() for group in model.module._lookups[0].grouped_configs
    ] == [["a", "b"]]


def test_without_a_plan_every_table_is_in_recstore() -> None:
    model = DistributedModelParallel(
        nn.Sequential(collection(bag("a", ["f"], rows=2**40), bag("b", ["g"]))),
        sharders=[RecStoreSharder()],
    )
    assert set(table_stats(model)) == {"a", "b"}
    assert {s.compute_kernel for s in model.plan.get_plan_for_module("0").values()} == {
        "customized_kernel"
    }


def test_the_unsharded_module_may_lie_on_the_cpu() -> None:
    model = DistributedModelParallel(
        collection(bag(rows=100), device="cpu"), sharders=[RecStoreSharder()]
    )
    model(batch(f=[[1000]])).values().sum().backward()
    assert tables(model)["t"].ids().tolist() == [1000]


def test_weights_of_an_unweighted_collection_are_ignored() -> None:
    model = sharded(
        collection(bag()), options={"t": TableOptions(initializer=ConstantInit(1.0))}
    )
    kjt = KeyedJaggedTensor.from_lengths_sync(
        ["f"], torch.tensor([1, 2]), torch.tensor([2]), torch.tensor([0.5, 0.25])
    )
    assert torch.equal(model(kjt).values(), torch.full((1, 4), 2.0))


@pytest.mark.parametrize("sharding_type", ["table_wise", "row_wise"])
def test_a_weighted_collection_refuses_a_batch_without_weights(
    sharding_type: str,
) -> None:
    options = {"t": TableOptions(initializer=ConstantInit(1.0))}
    model = sharded(
        collection(bag(), is_weighted=True),
        options=options,
        sharding_type=sharding_type,
    )
    ids = torch.tensor([1, 2])
    lengths = torch.tensor([2])
    for _ in range(2):  # A first batch, and a later one.
        without_weights = KeyedJaggedTensor.from_lengths_sync(["f"], ids, lengths)
        with pytest.raises(
            ValueError, match=r"is_weighted=True needs weights of the features \['f'\]"
        ):
            model(without_weights)
        with pytest.raises(ValueError, match="is_weighted=True needs weights"):
            model(TensorDict(without_weights.to_dict(), batch_size=[1]))
        assert not model.module.has_begun_batches()
        kjt = KeyedJaggedTensor.from_lengths_sync(
            ["f"], ids, lengths, torch.tensor([0.5, 0.25])
        )
        assert torch.equal(model(kjt).values(), torch.full((1, 4), 0.75))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"data_type": DataType.INT4}, "'t'.*data_type.*INT4"),
        ({"init_fn": partial(nn.init.normal_, std=0.1)}, "'t'.*init_fn"),
        ({"use_virtual_table": True}, "'t'.*use_virtual_table"),
        ({"weight_init_min": 2.0, "weight_init_max": 1.0}, "low"),
    ],
)
def test_what_a_table_cannot_be_fails_when_sharding(
    more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sharded(collection(bag(**more)))


def test_unsupported_sharding_types_in_a_plan_are_refused() -> None:
    model = sharded(collection(bag()))
    plan = model.plan
    plan.get_plan_for_module("")["t"].sharding_type = "data_parallel"
    with pytest.raises(ValueError, match=r"'t'.*data_parallel.*table_wise"):
        DistributedModelParallel(
            collection(bag()), plan=plan, sharders=[RecStoreSharder()]
        )


def test_plans_written_by_hand() -> None:
    ebc = collection(bag("a", ["f"]), bag("b", ["g"]), bag("c", ["h"], rows=10))
    generators = {
        "a": row_wise(compute_kernel="customized_kernel"),
        "b": table_wise(rank=0, compute_kernel="customized_kernel"),
        "c": table_wise(rank=0, compute_kernel="fused"),
    }
    offer = RecStoreSharder().with_stock_kernels()
    plan = construct_module_sharding_plan(
        ebc, generators, sharder=offer, world_size=1, local_size=1, device_type="cpu"
    )
    model = DistributedModelParallel(
        ebc, plan=ShardingPlan({"": plan}), sharders=[RecStoreSharder()]
    )
    model(batch(f=[[-5]], g=[[-6]], h=[[1]])).values().sum().backward()
    assert {name: table.ids().tolist() for name, table in tables(model).items()} == {
        "a": [-5],
        "b": [-6],
    }


@pytest.mark.parametrize(
    "pooling", itertools.product([PoolingType.SUM, PoolingType.MEAN], repeat=2)
)
@pytest.mark.parametrize(
    "sharding_types",
    itertools.product(["row_wise", "table_wise", "column_wise"], repeat=2),
)
def test_tables_of_any_pooling_and_sharding_share_features(
    pooling: tuple[PoolingType, ...], sharding_types: tuple[str, ...]
) -> None:
    names = ("a", "b")
    features = {"a": ["f", "g"], "b": ["g", "f"]}
    bags = [
        bag(name, features[name], pooling=pool)
        for name, pool in zip(names, pooling, strict=True)
    ]
    stock = EmbeddingBagCollection(bags)
    constraints = {
        name: RecStoreConstraints(sharding_types=[kind])
        for name, kind in zip(names, sharding_types, strict=True)
    }
    model = sharded(collection(*bags), constraints=constraints)
    for name in names:
        load_dense_weights(model, {name: stock.embedding_bags[name].weight.detach()})
    kjt = batch(f=[[1, 2], [], [3, 3, 4]], g=[[5], [6, 7, 8], []])
    out, expected = model(kjt).to_dict(), stock(kjt).to_dict()
    assert out.keys() == expected.keys()
    for key, pooled in expected.items():
        torch.testing.assert_close(out[key], pooled, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("sharding_type", ["table_wise", "row_wise"])
def test_batch_size_may_vary_by_feature(sharding_type: str) -> None:
    """The tables have two dims, so there are two kernels.

    TorchRec's own method cannot merge their outputs on CPU.
    """
    options = {
        "a": TableOptions(initializer=ConstantInit(1.0)),
        "b": TableOptions(initializer=ConstantInit(2.0)),
    }
    ebc = collection(bag("a", ["f"]), bag("b", ["g"], dim=8))
    apply_optimizer_in_backward(
        torch.optim.SGD, ebc.embedding_bags["b"].parameters(), {"lr": 0.5}
    )
    model = sharded(
        ebc, {"learning_rate": 0.25}, options=options, sharding_type=sharding_type
    )
    kjt = KeyedJaggedTensor(
        keys=["f", "g"],
        values=torch.tensor([1, 2, 3, 4]),
        lengths=torch.tensor([2, 1, 1]),
        stride_per_key_per_rank=[[2], [1]],
        inverse_indices=(["f", "g"], torch.tensor([[0, 1, 0], [0, 0, 0]])),
    )
    out = model(kjt).to_dict()
    assert torch.equal(out["f"], torch.tensor([2.0, 1.0, 2.0])[:, None].expand(3, 4))
    assert torch.equal(out["g"], torch.full((3, 8), 2.0))
    (out["f"].sum() + out["g"].sum()).backward()
    rows = tables(model)
    assert torch.equal(
        rows["a"].lookup(torch.tensor([1, 2, 3]))[:, 0], torch.tensor([0.5, 0.5, 0.75])
    )
    assert torch.equal(rows["b"].lookup(torch.tensor([4]))[0], torch.full((8,), 0.5))


def test_stock_tables_alone_under_the_sharder() -> None:
    stock = ParameterConstraints(
        sharding_types=["table_wise"], compute_kernels=["fused"]
    )
    model = sharded(collection(bag(rows=10)), constraints={"t": stock})
    model(batch(f=[[1, 9]])).values().sum().backward()
    assert table_stats(model) == {}
    assert model.module.embedding_bags["t"].weight.shape == (10, 4)


def test_rows_are_freed_with_the_model() -> None:
    model = sharded(collection(bag()))
    table = weakref.ref(tables(model)["t"])
    del model
    gc.collect()
    assert table() is None


def test_ids_beyond_the_hint_are_no_cause_for_warnings(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = sharded(
        collection(bag("t", ["f"], rows=10), bag("stock", ["g"], rows=10)),
        constraints={
            "t": RecStoreConstraints(sharding_types=["table_wise"]),
            "stock": ParameterConstraints(
                sharding_types=["table_wise"], compute_kernels=["fused"]
            ),
        },
    )
    with caplog.at_level("WARNING"):
        model(batch(f=[[-5, 10**12]], g=[[3, 4]])).wait()
    assert "range" not in caplog.text
    other = sharded(
        collection(bag("t", ["f"], rows=10)),
        constraints={
            "t": ParameterConstraints(
                sharding_types=["table_wise"], compute_kernels=["fused"]
            ),
        },
    )
    with caplog.at_level("WARNING"):
        other.module.input_dist(other.module.create_context(), batch(f=[[-5, 10**12]]))
    assert "Feature f has range" in caplog.text


@pytest.mark.parametrize("sharding_type", ["table_wise", "row_wise"])
@pytest.mark.parametrize("sequential", [False, True])
def test_a_first_batch_without_a_feature_is_refused_and_leaves_nothing(
    one_rank: None, sharding_type: str, sequential: bool
) -> None:
    make, config = (sequences, sequence) if sequential else (collection, bag)
    tables = [config("t", ["f", "g"]), config("u", ["f"]), config("v", ["g"])]
    model = sharded(make(*tables), sharding_type=sharding_type, optimizer=SGD(lr=0.1))
    for _ in range(2):
        with pytest.raises(
            ValueError,
            match=r"no feature 'f' of table 't', 'f' of table 'u': it has \['h', 'g'\]",
        ):
            model(batch(h=[[1]], g=[[2]]))
    out = model(batch(f=[[1]], h=[[1]], g=[[2]]))
    values = [each.values() for each in out.values()] if sequential else [out.values()]
    sum(each.sum() for each in values).backward()
    assert sum(len(table) for table in model.module.recstore_tables()) == 4
