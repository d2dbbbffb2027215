"""A warning is given if the model has a RecStore sharder and its tables are on
TorchRec's kernels.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import (
    FeatureProcessedEmbeddingBagCollectionSharder,
)
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.shard import shard
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    data_parallel,
    get_default_sharders,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import KeyValueParams, ModuleSharder, ShardingPlan
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from torchrec_recstore import RecStoreWarning, TableOptions, reshard
from torchrec_recstore.planner import RecStoreConstraints, RecStorePlanner
from torchrec_recstore.sharders import (
    RecStoreEmbeddingCollectionSharder,
    RecStoreFeatureProcessedEmbeddingBagCollectionSharder,
    RecStoreParameterSharding,
    RecStoreSharder,
    table_stats,
)
from torchrec_recstore.sharders.plan_entries import OptionsInPlan

from .models import bag, collection, sequence, sequences, tables

pytestmark = pytest.mark.usefixtures("one_rank")


def warned(function: Callable[[], Any]) -> list[str]:
    """Returns the texts of our warnings.

    Each warning must point to a line of this file.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    ours = [
        warning for warning in caught if issubclass(warning.category, RecStoreWarning)
    ]
    assert all(warning.filename == __file__ for warning in ours)
    return [str(warning.message) for warning in ours]


def two_tables() -> nn.Module:
    return collection(bag("a", ["f"]), bag("b", ["g"]))


def processed() -> nn.Module:
    positions = PositionWeightedModuleCollection({"f": 3})
    return FeatureProcessedEmbeddingBagCollection(
        collection(bag("a", ["f"]), is_weighted=True), positions
    )


def topology() -> Topology:
    return Topology(world_size=1, compute_device="cpu")


def by_default(table: str) -> str:
    return (
        f"table {table!r} is planned on TorchRec's own kernel, since its sharding names"
        " none: pass compute_kernel='customized_kernel' to table_wise(...) or the"
        " other sharding function for RecStore, or pass the name of TorchRec's kernel"
    )


def test_a_plan_by_hand_without_kernels_warns_of_each_table_once() -> None:
    def plan_and_shard() -> None:
        module = two_tables()
        generators = {"a": table_wise(rank=0), "b": row_wise()}
        plan = construct_module_sharding_plan(
            module, generators, RecStoreSharder(), device_type="cpu"
        )
        assert {sharding.compute_kernel for sharding in plan.values()} == {"dense"}
        model = DistributedModelParallel(
            module, plan=ShardingPlan({"": plan}), sharders=[RecStoreSharder()]
        )
        assert table_stats(model) == {}

    assert warned(plan_and_shard) == [by_default("a"), by_default("b")]
    assert warned(
        lambda: shard(two_tables(), table_wise(rank=0), sharder=RecStoreSharder())
    ) == [
        by_default("a"),
        by_default("b"),
    ]


def test_a_plan_by_hand_that_names_kernels_warns_of_nothing() -> None:
    def plan_and_shard() -> None:
        module = two_tables()
        generators = {
            "a": table_wise(rank=0, compute_kernel="customized_kernel"),
            "b": data_parallel(),
        }
        plan = construct_module_sharding_plan(
            module, generators, RecStoreSharder(), device_type="cpu"
        )
        DistributedModelParallel(
            module, plan=ShardingPlan({"": plan}), sharders=[RecStoreSharder()]
        )
        generators = {
            "a": table_wise(rank=0, compute_kernel="dense"),
            "b": row_wise(compute_kernel="fused"),
        }
        construct_module_sharding_plan(
            module, generators, RecStoreSharder(), device_type="cpu"
        )

    assert warned(plan_and_shard) == []


KINDS = [
    (two_tables, RecStoreSharder, EmbeddingBagCollectionSharder, "'a', 'b'"),
    (
        lambda: sequences(sequence("a")),
        RecStoreEmbeddingCollectionSharder,
        EmbeddingCollectionSharder,
        "'a'",
    ),
    (
        processed,
        RecStoreFeatureProcessedEmbeddingBagCollectionSharder,
        FeatureProcessedEmbeddingBagCollectionSharder,
        "'a'",
    ),
]


@pytest.mark.parametrize(
    ("module", "ours", "theirs", "names"),
    KINDS,
    ids=["bags", "sequences", "processed"],
)
def test_a_later_sharder_that_overrides_ours_is_named_once(
    module: Callable[[], nn.Module],
    ours: type[ModuleSharder[Any]],
    theirs: type[ModuleSharder[Any]],
    names: str,
) -> None:
    def before() -> list[ModuleSharder[Any]]:
        return [ours(), *get_default_sharders()]

    def after() -> list[ModuleSharder[Any]]:
        return [*get_default_sharders(), ours()]

    said = [
        f"table(s) {names} are not in RecStore: {theirs.__name__}, which comes later"
        f" in the list of sharders, overrides {ours.__name__}: put {ours.__name__}"
        f" after it, or leave {theirs.__name__} out"
    ]
    for sharders, expected in ((before(), said), (after(), [])):
        planner = RecStorePlanner(topology=topology())
        assert warned(lambda p=planner, s=sharders: p.plan(module(), s)) == expected  # type: ignore[misc]


def test_what_constraints_ask_for_is_not_warned_of() -> None:
    constraints: dict[str, ParameterConstraints] = {
        "a": RecStoreConstraints(compute_kernels=["fused"]),
        "b": ParameterConstraints(sharding_types=["data_parallel"]),
    }

    def plan_and_shard(sharders: list[ModuleSharder[Any]]) -> None:
        module = two_tables()
        planner = RecStorePlanner(topology=topology(), constraints=constraints)
        plan = planner.collective_plan(module, sharders, dist.group.WORLD)
        assert {s.compute_kernel for s in plan.plan[""].values()} <= {"fused", "dense"}
        DistributedModelParallel(module, plan=plan, sharders=sharders)

    assert warned(lambda: plan_and_shard([RecStoreSharder()])) == []
    assert (
        warned(lambda: plan_and_shard([RecStoreSharder(), *get_default_sharders()]))
        == []
    )
    del constraints["b"]
    (text,) = warned(
        lambda: plan_and_shard([RecStoreSharder(), *get_default_sharders()])
    )
    assert text.startswith("table(s) 'b' are not in RecStore")


def test_a_plan_that_was_made_with_other_sharders_is_warned_of() -> None:
    module = two_tables()
    plan = EmbeddingShardingPlanner(topology=topology()).plan(
        module, get_default_sharders()
    )
    assert warned(
        lambda: DistributedModelParallel(
            module, plan=plan, sharders=[RecStoreSharder()]
        )
    ) == [
        "table(s) 'a', 'b' are not in RecStore: the plan for RecStoreSharder has only"
        " TorchRec's own kernels: pass RecStoreSharder to the planner as well, or use"
        " TorchRec's sharder"
    ]


def test_a_model_without_tables_of_that_kind_is_not_warned_of() -> None:
    module = nn.Sequential(sequences(sequence("a")))
    planner = RecStorePlanner(topology=topology())
    sharders = [RecStoreSharder(), *get_default_sharders()]
    assert warned(lambda: planner.plan(module, sharders)) == []


def test_torchrecs_planner_brings_the_options_of_constraints() -> None:
    options = TableOptions(max_rows=7, missing="init")
    constraints = {
        "a": RecStoreConstraints(options=options),
        "b": RecStoreConstraints(options=TableOptions()),
    }
    module = two_tables()
    planner = EmbeddingShardingPlanner(topology=topology(), constraints=constraints)
    plan = planner.collective_plan(module, [RecStoreSharder()], dist.group.WORLD)
    assert not isinstance(plan.plan[""]["a"], RecStoreParameterSharding)
    model = DistributedModelParallel(module, plan=plan, sharders=[RecStoreSharder()])
    assert [tables(model)[name].options.max_rows for name in "ab"] == [7, None]
    assert [tables(model)[name].options.missing for name in "ab"] == ["init", "zeros"]
    assert model.module.module_sharding_plan["a"].key_value_params is None
    reshard(model, plan)
    assert tables(model)["a"].options.max_rows == 7


def test_options_travel_beside_what_is_set_for_torchrecs_kernels() -> None:
    of_torchrec = KeyValueParams(ssd_rocksdb_shards=3)
    constraint = RecStoreConstraints(
        options=TableOptions(max_rows=7), key_value_params=of_torchrec
    )
    module = two_tables()
    planner = EmbeddingShardingPlanner(
        topology=topology(), constraints=dict.fromkeys("ab", constraint)
    )
    plan = planner.collective_plan(module, [RecStoreSharder()], dist.group.WORLD)
    entry = plan.plan[""]["b"]
    plan.plan[""]["b"] = RecStoreParameterSharding(
        **{stock.name: getattr(entry, stock.name) for stock in fields(entry)},
        options=TableOptions(max_rows=99),
        row_name="of the user",
    )
    model = DistributedModelParallel(module, plan=plan, sharders=[RecStoreSharder()])
    max_rows = {name: table.options.max_rows for name, table in tables(model).items()}
    assert max_rows == {"a": 7, "of the user": 99}
    entry = model.module.module_sharding_plan["a"]
    assert entry.key_value_params == of_torchrec


def test_options_that_are_assigned_later_are_those_of_the_plan() -> None:
    constraint = RecStoreConstraints()
    constraint.options = TableOptions(max_rows=7)
    assert isinstance(constraint.key_value_params, OptionsInPlan)
    assert constraint.key_value_params.options.max_rows == 7
    constraint.options = TableOptions()
    assert constraint.key_value_params is None


def test_the_options_in_a_plan_change_neither_repr_nor_hash_of_constraints() -> None:
    options = TableOptions(max_rows=7)
    constraint = RecStoreConstraints(options=options)
    assert repr(constraint) == f"RecStoreConstraints(options={options!r})"
    plain = RecStoreConstraints(options=options)
    object.__setattr__(plain, "key_value_params", None)
    assert hash(constraint) == hash(plain)
    assert replace(constraint, options=TableOptions()).key_value_params is None
    changed = replace(constraint, options=TableOptions(max_rows=8)).key_value_params
    assert isinstance(changed, OptionsInPlan)
    assert changed.options.max_rows == 8
    of_torchrec = KeyValueParams(ssd_rocksdb_shards=3)
    constraint = RecStoreConstraints(options=options, key_value_params=of_torchrec)
    assert constraint.stock_key_value_params() is of_torchrec
    assert constraint.key_value_params.ssd_rocksdb_shards == 3
