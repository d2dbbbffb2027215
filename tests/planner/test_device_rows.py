"""Plans of tables with rows in the memory of an accelerator."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.types import CacheParams, ParameterSharding, ShardingPlan

from torchrec_recstore.optim import SGD, Adam, Ftrl, Optimizer
from torchrec_recstore.options import Servers, TableOptions
from torchrec_recstore.planner import (
    RecStoreConstraints,
    RecStoreEnumerator,
    RecStorePlanner,
    TableStatistics,
)
from torchrec_recstore.planner.device_choice import chosen_device_rows
from torchrec_recstore.sharders import RECSTORE_KERNEL, RecStoreSharder
from torchrec_recstore.sharders.plan_entries import with_options

DIM = 64
ROWS = 1000


def collection() -> EmbeddingBagCollection:
    table = EmbeddingBagConfig(
        name="t", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["f"]
    )
    return EmbeddingBagCollection([table], device=torch.device("meta"))


def plan(
    constraint: ParameterConstraints,
    *,
    device: str = "cuda",
    optimizer: Optimizer | None = None,
    **more: Any,
) -> ShardingPlan:
    topology = Topology(world_size=2, local_world_size=2, compute_device=device)
    planner = RecStorePlanner(topology=topology, constraints={"t": constraint}, **more)
    return planner.plan(collection(), [RecStoreSharder(optimizer=optimizer)])


def device_rows(planned: ShardingPlan) -> int | None:
    rows: int | None = planned.plan[""]["t"].options.device_rows
    return rows


CACHED = CacheParams(load_factor=0.1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (TableOptions(), 100),
        (TableOptions(expected_rows=505), 51),
        (TableOptions(max_rows=30), 3),
        (TableOptions(device_rows=7), 7),
        (TableOptions(device_rows=0), 0),
    ],
)
def test_a_load_factor_is_a_part_of_the_rows(
    options: TableOptions, expected: int
) -> None:
    constraint = RecStoreConstraints(options=options, cache_params=CACHED)
    assert device_rows(plan(constraint)) == expected


def test_a_load_factor_is_a_part_of_the_measured_rows() -> None:
    constraint = RecStoreConstraints(cache_params=CACHED)
    statistics = {"t": TableStatistics(rows=5000)}
    assert device_rows(plan(constraint, statistics=statistics)) == 500


def test_a_load_factor_of_torchrecs_own_constraints_and_planner() -> None:
    constraint = ParameterConstraints(
        compute_kernels=[RECSTORE_KERNEL], cache_params=CACHED
    )
    assert device_rows(plan(constraint)) == 100
    topology = Topology(world_size=2, local_world_size=2, compute_device="cuda")
    constraints = {"t": constraint}
    planner = EmbeddingShardingPlanner(
        topology=topology,
        constraints=constraints,
        enumerator=RecStoreEnumerator(topology, constraints=constraints),
    )
    module = collection()
    stock = planner.plan(module, [RecStoreSharder()]).plan[""]
    parameters = RecStoreSharder().shardable_parameters(module)
    assert with_options(stock, parameters)["t"].options.device_rows == 100


@pytest.mark.parametrize("factor", [-0.1, 1.5, float("nan")])
def test_a_load_factor_that_is_no_part_is_refused(factor: float) -> None:
    message = r"table 't': CacheParams\.load_factor=.* is not from 0 to 1"
    constraint = RecStoreConstraints(cache_params=CacheParams(load_factor=factor))
    with pytest.raises(ValueError, match=message):
        plan(constraint)


def test_tables_on_servers_have_no_load_factor() -> None:
    entry = ParameterSharding(
        sharding_type="table_wise",
        compute_kernel=RECSTORE_KERNEL,
        ranks=[0],
        cache_params=CACHED,
    )
    parameters = RecStoreSharder().shardable_parameters(collection())
    assert with_options({"t": entry}, parameters)["t"].options.device_rows == 100
    remote = RecStoreConstraints(
        options=TableOptions(servers=Servers(["h:1"])), cache_params=CACHED
    )
    assert device_rows(plan(remote)) is None


@pytest.mark.parametrize(
    ("optimizer", "row_bytes"), [(SGD(lr=0.1), 4 * DIM), (Adam(lr=0.1), 12 * DIM)]
)
@pytest.mark.parametrize("sharding_type", ["table_wise", "row_wise", "column_wise"])
def test_rows_on_a_device_are_counted_there(
    sharding_type: str, optimizer: Optimizer, row_bytes: int
) -> None:
    def memory(rows: int, device: str) -> tuple[int, int]:
        constraints = {
            "t": RecStoreConstraints(
                options=TableOptions(device_rows=rows),
                sharding_types=[sharding_type],
                min_partition=32,
            )
        }
        topology = Topology(world_size=2, local_world_size=2, compute_device=device)
        enumerator = RecStoreEnumerator(topology, constraints=constraints)
        (option,) = enumerator.enumerate(
            collection(), [RecStoreSharder(optimizer=optimizer)]
        )
        return option.total_storage.hbm, option.total_storage.ddr

    (hbm, ddr), (without_hbm, without_ddr) = memory(500, "cuda"), memory(0, "cuda")
    assert hbm - without_hbm == 500 * row_bytes
    # Each column shard knows the places of its rows.
    shards = 2 if sharding_type == "column_wise" else 1
    assert ddr - without_ddr == shards * (16 * 500 + 4 * ROWS)
    assert memory(500, "cpu") == memory(0, "cpu")


def test_a_plan_says_how_many_rows_are_on_the_device(
    caplog: pytest.LogCaptureFixture,
) -> None:
    constraint = RecStoreConstraints(cache_params=CACHED)
    with caplog.at_level(logging.INFO):
        plan(constraint)
    assert "table 't': 1,000 resident rows assumed" in caplog.text
    assert ", 100 of them on cuda; rank" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO):
        plan(constraint, device="cpu")
    assert "of them" not in caplog.text


def test_rows_that_do_not_fit_on_the_device_are_an_error() -> None:
    topology = Topology(
        world_size=1, compute_device="cuda", hbm_cap=2**20, local_world_size=1
    )
    constraint = RecStoreConstraints(options=TableOptions(device_rows=2**20))
    planner = RecStorePlanner(topology=topology, constraints={"t": constraint})
    with pytest.raises(PlannerError, match=r"memory of cuda \(HBM\)"):
        planner.plan(collection(), [RecStoreSharder()])


HOT = TableStatistics(rows=5000, hot_share=0.8)
BATCHES = TableStatistics(
    rows=5120, hot_share=0.8, ids_per_sample=(2.0,), unique_share=0.25
)


@pytest.mark.parametrize(
    ("constraint", "statistics", "more", "expected"),
    [
        (RecStoreConstraints(), HOT, {}, 500),
        (RecStoreConstraints(), HOT, {"device": "cpu"}, None),
        (RecStoreConstraints(), HOT, {"device": "mtia"}, None),
        (RecStoreConstraints(), TableStatistics(rows=5000), {}, None),
        # 2 ranks, 512 samples of 2 ids, of which a quarter is distinct
        (RecStoreConstraints(), BATCHES, {"batch_size": 512}, 512),
        (RecStoreConstraints(), BATCHES, {"batch_size": 513}, None),
        (RecStoreConstraints(), TableStatistics(rows=5000, hot_share=0.4), {}, None),
        (RecStoreConstraints(options=TableOptions(device_rows=0)), HOT, {}, 0),
        (RecStoreConstraints(options=TableOptions(frozen=True)), HOT, {}, None),
        (RecStoreConstraints(options=TableOptions(max_rows=50)), HOT, {}, 5),
        (RecStoreConstraints(), HOT, {"optimizer": Ftrl(lr=1.0, lr_power=-0.4)}, None),
    ],
)
def test_the_planner_chooses_a_tenth_of_hot_rows(
    constraint: RecStoreConstraints,
    statistics: TableStatistics,
    more: dict[str, Any],
    expected: int | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        planned = plan(constraint, statistics={"t": statistics}, **more)
    assert device_rows(planned) == expected
    said = "chosen to be on cuda, where 80% of the distinct ids of a batch were" in (
        caplog.text
    )
    assert said is bool(expected)


@pytest.mark.parametrize(("free_rows", "expected"), [(1001, 500), (990, None)])
def test_the_choice_leaves_half_of_the_free_memory(
    free_rows: int, expected: int | None
) -> None:
    hbm = 4 * DIM * free_rows
    topology = Topology(
        world_size=1, local_world_size=1, compute_device="cuda", hbm_cap=2**30
    )
    constraints = {"t": RecStoreConstraints()}
    enumerator = RecStoreEnumerator(
        topology, constraints=constraints, statistics={"t": HOT}
    )
    (option, *_) = enumerator.enumerate(
        collection(), [RecStoreSharder(optimizer=SGD(lr=0.1))]
    )
    (shard,) = option.shards
    shard.rank = 0
    before = shard.storage.hbm
    topology.devices[0].storage.hbm = before + hbm
    chosen = chosen_device_rows(
        [option], topology, constraints, enumerator.statistics, enumerator.sharder_map
    )
    assert chosen.get((option.path, "t")) == expected
    assert shard.storage.hbm - before == 4 * DIM * (expected or 0)
