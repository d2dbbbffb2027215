from __future__ import annotations

import logging
import pickle
import re
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.proposers import (
    GreedyProposer,
    GridSearchProposer,
    UniformProposer,
)
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
    HeuristicalStorageReservation,
    InferenceStorageReservation,
)
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
)
from torchrec.distributed.types import ParameterSharding, ShardingPlan

from torchrec_recstore.options import TableOptions
from torchrec_recstore.planner import RecStoreConstraints, RecStorePlanner
from torchrec_recstore.sharders import (
    RecStoreEmbeddingCollectionSharder,
    RecStoreParameterSharding,
    RecStoreSharder,
)

GiB = 2**30


def collection(**rows: int) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name,
                num_embeddings=n,
                embedding_dim=64,
                feature_names=[f"f_{name}"],
            )
            for name, n in rows.items()
        ],
        device=torch.device("meta"),
    )


def planner(
    world_size: int = 2, constraints: dict[str, Any] | None = None, **topology: Any
) -> RecStorePlanner:
    shape = {
        "world_size": world_size,
        "local_world_size": world_size,
        "compute_device": "cpu",
        **topology,
    }
    return RecStorePlanner(
        topology=Topology(**shape), constraints=constraints, debug=False
    )


def planned(plan: ShardingPlan, path: str = "") -> dict[str, ParameterSharding]:
    return dict(plan.get_plan_for_module(path))


def test_tables_without_constraints_are_in_recstore_with_default_options() -> None:
    plan = planned(planner().plan(collection(a=1000, b=2**40), [RecStoreSharder()]))
    for sharding in plan.values():
        assert isinstance(sharding, RecStoreParameterSharding)
        assert sharding.compute_kernel == "customized_kernel"
        assert sharding.options == TableOptions()


@pytest.mark.parametrize("sharding_type", ["table_wise", "row_wise", "column_wise"])
def test_shards_have_the_declared_shape(sharding_type: str) -> None:
    constraints = {
        "a": RecStoreConstraints(sharding_types=[sharding_type], min_partition=32)
    }
    sharding = planned(
        planner(4, constraints).plan(collection(a=2**40), [RecStoreSharder()])
    )["a"]
    assert sharding.sharding_type == sharding_type
    sizes = [shard.shard_sizes for shard in sharding.sharding_spec.shards]
    assert {
        "table_wise": [[2**40, 64]],
        "row_wise": [[2**38, 64]] * 4,
        "column_wise": [[2**40, 32]] * 2,
    }[sharding_type] == sizes


def test_options_travel_in_the_plan_and_stock_tables_stay_stock() -> None:
    options = TableOptions(seed=7, expected_rows=123)
    constraints = {
        "a": RecStoreConstraints(options=options),
        "fused": ParameterConstraints(compute_kernels=["fused"]),
        "replicated": ParameterConstraints(sharding_types=["data_parallel"]),
        "also_replicated": ParameterConstraints(
            sharding_types=["data_parallel"], compute_kernels=["dense"]
        ),
        "options_without_effect": RecStoreConstraints(
            compute_kernels=["fused"], options=options
        ),
        "plain": ParameterConstraints(sharding_types=["row_wise"]),
        "named": ParameterConstraints(compute_kernels=["customized_kernel"]),
    }
    ebc = collection(**dict.fromkeys(constraints, 100))
    plan = pickle.loads(
        pickle.dumps(planner(2, constraints).plan(ebc, [RecStoreSharder()]))
    )
    shardings = planned(plan)
    assert {name: s.compute_kernel for name, s in shardings.items()} == {
        "a": "customized_kernel",
        "fused": "fused",
        "replicated": "dense",
        "also_replicated": "dense",
        "options_without_effect": "fused",
        "plain": "customized_kernel",
        "named": "customized_kernel",
    }
    assert shardings["a"].options == options
    assert shardings["plain"].options == shardings["named"].options == TableOptions()
    for name in ("fused", "replicated", "options_without_effect"):
        assert type(shardings[name]) is ParameterSharding


def test_stock_tables_are_never_row_wise_on_the_cpu() -> None:
    constraints = {
        "a": RecStoreConstraints(
            compute_kernels=["fused", "customized_kernel"], sharding_types=["row_wise"]
        )
    }
    assert (
        planned(planner(2, constraints).plan(collection(a=100), [RecStoreSharder()]))[
            "a"
        ].compute_kernel
        == "customized_kernel"
    )
    constraints["a"].compute_kernels = ["fused"]
    fix = (
        r"compute_kernels=\['fused'\]: set .* or compute_kernels to some of"
        r" \['customized_kernel'\]$"
    )
    with pytest.raises(PlannerError, match=fix) as error:
        planner(2, constraints).plan(collection(a=100), [RecStoreSharder()])
    assert error.value.error_type == PlannerErrorType.STRICT_CONSTRAINTS


NOT_FOR_RECSTORE = (
    r"^no sharding option is left for table 'a' with sharding_types=\['{}'\], .*: set"
    r" shard"
)


@pytest.mark.parametrize("constraint", [RecStoreConstraints, ParameterConstraints])
def test_a_sharding_type_that_does_not_exist_is_named(
    constraint: type[ParameterConstraints],
) -> None:
    constraints = {"a": constraint(sharding_types=["row_wyse"])}
    types = r"to some of \['table_wise', 'column_wise', .*'row_wise', [^\]]*\]$"
    with pytest.raises(
        PlannerError, match=NOT_FOR_RECSTORE.format("row_wyse") + f"ing_types {types}"
    ):
        planner(2, constraints).plan(collection(a=100), [RecStoreSharder()])


def test_recstore_is_never_data_parallel() -> None:
    constraints = {"a": RecStoreConstraints(sharding_types=["data_parallel"])}
    planning = planner(2, constraints)
    # The options of an earlier plan do not count as those that found no room.
    for _ in range(2):
        with pytest.raises(
            PlannerError, match=NOT_FOR_RECSTORE.format("data_parallel")
        ) as error:
            planning.plan(collection(a=100), [RecStoreSharder()])
        assert "data_parallel" not in str(error.value).partition(": set ")[2]
        assert str(error.value).endswith(" or compute_kernels to some of ['dense']")
        constraints["a"].sharding_types = ["row_wise"]
        planning.plan(collection(a=100), [RecStoreSharder()])
        constraints["a"].sharding_types = ["data_parallel"]


def test_between_kernels_the_planner_takes_the_one_that_fits() -> None:
    constraints = {
        "a": RecStoreConstraints(compute_kernels=["fused", "customized_kernel"])
    }
    big = planned(
        planner(2, constraints).plan(collection(a=2**40), [RecStoreSharder()])
    )["a"]
    assert isinstance(big, RecStoreParameterSharding)


def test_unknown_tables_are_named() -> None:
    constraints = {
        "a": RecStoreConstraints(),
        "a_typo": RecStoreConstraints(),
        "b_typo": ParameterConstraints(),
    }
    with pytest.raises(PlannerError, match=r"'a_typo', 'b_typo'.*'a', 'b'") as error:
        planner(2, constraints).plan(collection(a=10, b=10), [RecStoreSharder()])
    assert error.value.error_type == PlannerErrorType.INPUT_VALIDATION


def test_a_plan_that_does_not_fit_fails() -> None:
    constraints = {"a": RecStoreConstraints(options=TableOptions(expected_rows=10**9))}
    with pytest.raises(PlannerError, match="insufficient storage") as error:
        planner(2, constraints, ddr_cap=GiB).plan(
            collection(a=2**40), [RecStoreSharder()]
        )
    assert error.value.error_type == PlannerErrorType.INSUFFICIENT_STORAGE


def test_memory_decides_between_table_wise_and_row_wise() -> None:
    # 4M rows of 256 + 32 bytes take 1.1 GiB on one rank, or half of it on each of two
    # ranks.
    constraints = {
        "a": RecStoreConstraints(options=TableOptions(expected_rows=4 * 2**20))
    }
    sharding = planned(
        planner(2, constraints, ddr_cap=GiB).plan(
            collection(a=2**40), [RecStoreSharder()]
        )
    )["a"]
    assert sharding.sharding_type in ("row_wise", "column_wise")


def test_the_stock_planner_plans_recstore_tables_by_their_resident_rows() -> None:
    ebc = collection(a=2**40, b=100)
    stock = EmbeddingShardingPlanner(
        topology=Topology(world_size=2, compute_device="cpu"), debug=False
    )
    plan = planned(stock.plan(ebc, [RecStoreSharder()]))
    assert {sharding.compute_kernel for sharding in plan.values()} == {
        "customized_kernel"
    }
    assert sum(shard.shard_sizes[0] for shard in plan["a"].sharding_spec.shards) in (
        2**40,
        2**41,
    )
    with pytest.raises(PlannerError):
        stock.plan(ebc, [EmbeddingBagCollectionSharder()])


@pytest.mark.parametrize(
    "constraint",
    [{"sharding_types": ["data_parallel"]}, {"compute_kernels": ["fused"]}],
    ids=str,
)
def test_the_stock_planner_says_who_plans_stock_tables(
    constraint: dict[str, list[str]],
) -> None:
    def stock(name: str) -> EmbeddingShardingPlanner:
        topology = Topology(world_size=2, compute_device="cpu")
        constraints = {name: ParameterConstraints(**constraint)}
        return EmbeddingShardingPlanner(
            topology=topology, constraints=constraints, debug=False
        )

    # TorchRec's own error
    with pytest.raises(RuntimeError, match=r"No available sharding type.* for a"):
        stock("a").plan(collection(a=100, b=100), [RecStoreSharder()])
    stock("c").plan(collection(a=100, b=100), [RecStoreSharder()])
    ours = planner(2, {"a": ParameterConstraints(**constraint)})
    plan = planned(ours.plan(collection(a=100, b=100), [RecStoreSharder()]))
    assert {plan["a"].compute_kernel, plan["b"].compute_kernel} <= {
        "dense",
        "fused",
        "customized_kernel",
    }
    assert plan["a"].compute_kernel != "customized_kernel"


def test_other_sharders_are_left_alone() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = collection(a=2**40)
            self.sequences = EmbeddingCollection(
                tables=[
                    EmbeddingConfig(
                        name="s",
                        num_embeddings=10,
                        embedding_dim=8,
                        feature_names=["f_s"],
                    )
                ],
                device=torch.device("meta"),
            )

    plan = planner(2, {"a": RecStoreConstraints()}).plan(
        Both(), [RecStoreSharder(), EmbeddingCollectionSharder()]
    )
    assert planned(plan, "bags")["a"].compute_kernel == "customized_kernel"
    assert planned(plan, "sequences")["s"].compute_kernel in ("fused", "dense")


def bags(dim: int, tables: int, weighted: bool = False) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"t{i}",
                num_embeddings=10**6,
                embedding_dim=dim,
                feature_names=[f"f{i}"],
            )
            for i in range(tables)
        ],
        device=torch.device("meta"),
        is_weighted=weighted,
    )


def sequences(dim: int) -> EmbeddingCollection:
    return EmbeddingCollection(
        tables=[
            EmbeddingConfig(
                name="t0", num_embeddings=1000, embedding_dim=dim, feature_names=["f0"]
            )
        ],
        device=torch.device("meta"),
    )


def sharding_types(
    kind: type[EmbeddingShardingPlanner], module: nn.Module, sharder: Any, ranks: int
) -> list[str]:
    topology = Topology(
        world_size=ranks, local_world_size=ranks, compute_device="cpu", ddr_cap=64 * GiB
    )
    plan = kind(topology=topology, debug=False).plan(module, [sharder])
    return [sharding.sharding_type for sharding in planned(plan).values()]


@pytest.mark.parametrize("dim", [4, 16, 32, 64, 128])
@pytest.mark.parametrize("kind", [RecStorePlanner, EmbeddingShardingPlanner])
def test_one_rank_is_table_wise(kind: type[EmbeddingShardingPlanner], dim: int) -> None:
    for weighted in (False, True):
        assert (
            sharding_types(kind, bags(dim, 2, weighted), RecStoreSharder(), 1)
            == ["table_wise"] * 2
        )
    assert sharding_types(
        kind, sequences(dim), RecStoreEmbeddingCollectionSharder(), 1
    ) == ["table_wise"]


@pytest.mark.parametrize(
    ("tables", "dim"),
    [
        (2, 16),
        (3, 128),
        (26, 16),
        *(
            pytest.param(tables, dim, marks=pytest.mark.slow)
            for tables, dim in [
                (2, 64),
                (2, 128),
                (3, 16),
                (3, 64),
                (5, 16),
                (5, 64),
                (5, 128),
                (26, 64),
                (26, 128),
            ]
        ),
    ],
)
def test_two_ranks_are_table_wise_where_stock_tables_are(dim: int, tables: int) -> None:
    stock = sharding_types(
        EmbeddingShardingPlanner, bags(dim, tables), EmbeddingBagCollectionSharder(), 2
    )
    assert stock == ["table_wise"] * tables
    assert (
        sharding_types(RecStorePlanner, bags(dim, tables), RecStoreSharder(), 2)
        == stock
    )


def test_a_table_too_many_for_the_ranks_is_split() -> None:
    found = sharding_types(RecStorePlanner, bags(16, 5), RecStoreSharder(), 4)
    assert sorted(found) == ["row_wise", *["table_wise"] * 4]
    assert sharding_types(RecStorePlanner, bags(16, 1), RecStoreSharder(), 8) == [
        "row_wise"
    ]


@pytest.mark.parametrize(
    ("milliseconds", "says"),
    [
        (
            {"grid_shard": 1.0},
            "sharding_type_ms must have only table_wise and row_wise, got 'grid_shard'",
        ),
        (
            {"row_wise": -1.0},
            (
                r"sharding_type_ms\['row_wise'\] must be a finite number of at least 0,"
                r" got -1.0"
            ),
        ),
        (
            {"row_wise": True},
            (
                r"sharding_type_ms\['row_wise'\] must be a finite number of at least 0,"
                r" got True"
            ),
        ),
        (
            {"row_wise": 1.0},
            (
                "sharding_type_ms has no effect without the statistics of tables: pass"
                " statistics, too"
            ),
        ),
    ],
)
def test_the_time_of_a_sharding_type_is_checked(
    milliseconds: dict[str, float], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        RecStorePlanner(sharding_type_ms=milliseconds)


def test_planning_twice_gives_the_same_plan() -> None:
    twice, ebc, sharders = planner(2), collection(a=1000, b=1000), [RecStoreSharder()]
    assert planned(twice.plan(ebc, sharders)) == planned(twice.plan(ebc, sharders))


def test_a_model_without_tables_has_an_empty_plan() -> None:
    assert planner(2).plan(nn.Linear(2, 2), [RecStoreSharder()]).plan == {}


def test_constraints_hash_by_value_and_check_their_options() -> None:
    assert hash(RecStoreConstraints()) == hash(RecStoreConstraints())
    assert hash(RecStoreConstraints()) != hash(
        RecStoreConstraints(options=TableOptions(seed=1))
    )
    assert RecStoreConstraints().compute_kernels == ["customized_kernel"]
    with pytest.raises(TypeError, match="dict"):
        RecStoreConstraints(options={"seed": 1})  # type: ignore[arg-type]
    contexts = [
        planner(2, {"a": RecStoreConstraints(options=TableOptions(seed=seed))})
        for seed in (1, 1, 2)
    ]
    for context in contexts:
        context.plan(collection(a=10), [RecStoreSharder()])
    one, same, other = (
        context.hash_planner_context_inputs_str() for context in contexts
    )
    assert one == same != other


def test_the_plan_tells_the_rows_and_bytes_assumed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    constraints = {
        "a": RecStoreConstraints(
            options=TableOptions(expected_rows=3_000_000), sharding_types=["row_wise"]
        ),
        "b": ParameterConstraints(compute_kernels=["fused"]),
    }
    with caplog.at_level(logging.INFO, "torchrec.distributed.planner.stats"):
        planner(2, constraints).plan(
            collection(a=2**40, b=100, c=500), [RecStoreSharder()]
        )
    lines = [line for line in caplog.messages if line.startswith("RecStore table")]
    assert [line.partition(";")[0] for line in lines] == [
        "RecStore table 'a': 3,000,000 resident rows assumed (expected_rows)",
        (
            "RecStore table 'c': 500 resident rows assumed (no expected_rows:"
            " num_embeddings, at most 2**20)"
        ),
    ]
    # 1.5 million rows of 64 floats, and 32 bytes of index and bookkeeping for each row.
    # SGD has no state.
    gib = 1_500_000 * (64 * 4 + 32) / GiB
    for rank in (0, 1):
        said = re.search(rf"rank {rank}: (\S+) GiB", lines[0])
        assert said is not None
        assert float(said[1]) == pytest.approx(gib, rel=0.01)


@pytest.mark.parametrize(
    "more",
    [
        {"storage_reservation": FixedPercentageStorageReservation(0.2)},
        {"storage_reservation": HeuristicalStorageReservation(0.2)},
        {"storage_reservation": InferenceStorageReservation(0.2)},
        {"proposer": GreedyProposer()},
        {"proposer": UniformProposer()},
        {"proposer": GridSearchProposer()},
        {"stats": NoopEmbeddingStats()},
    ],
    ids=lambda more: type(next(iter(more.values()))).__name__,
)
@pytest.mark.parametrize(
    "stock", [False, True], ids=["recstore_planner", "stock_planner"]
)
def test_any_reservation_proposer_and_statistics(
    more: dict[str, Any], stock: bool
) -> None:
    kind = EmbeddingShardingPlanner if stock else RecStorePlanner
    topology = Topology(world_size=2, local_world_size=2, compute_device="cpu")
    plan = kind(topology=topology, debug=False, **more).plan(
        collection(a=2**40, b=1000), [RecStoreSharder()]
    )
    assert {sharding.compute_kernel for sharding in planned(plan).values()} == {
        "customized_kernel"
    }


def test_where_both_kernels_fit_the_faster_one_is_chosen() -> None:
    both = RecStoreConstraints(
        compute_kernels=["fused", "customized_kernel"], sharding_types=["table_wise"]
    )
    plan = planned(
        planner(1, {"a": both}).plan(collection(a=1000), [RecStoreSharder()])
    )
    assert plan["a"].compute_kernel == "customized_kernel"
