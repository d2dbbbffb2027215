"""Plans for accelerators: rows of RecStore tables are in host memory, FUSED tables in
HBM, and copies cross the bus.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
    ShardingOption,
)
from torchrec.modules.embedding_configs import DataType

from torchrec_recstore import RecStoreWarning
from torchrec_recstore.options import TableOptions
from torchrec_recstore.planner import (
    RecStoreConstraints,
    RecStoreEnumerator,
    RecStorePlanner,
)
from torchrec_recstore.sharders import RecStoreParameterSharding, RecStoreSharder

DIM, WORLD, BATCH, LENGTH = 64, 2, 512, 10
MIB, GIB = 2**20, 2**30


def collection(**rows: int) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=name,
                embedding_dim=DIM,
                num_embeddings=n,
                feature_names=[f"f_{name}"],
            )
            for name, n in rows.items()
        ],
        device=torch.device("meta"),
    )


def topology(device: str = "cuda", **more: Any) -> Topology:
    return Topology(
        world_size=WORLD, local_world_size=WORLD, compute_device=device, **more
    )


def in_recstore(expected_rows: int, **more: Any) -> RecStoreConstraints:
    return RecStoreConstraints(
        options=TableOptions(expected_rows=expected_rows),
        pooling_factors=[float(LENGTH)],
        **more,
    )


FUSED = ParameterConstraints(
    compute_kernels=["fused"],
    sharding_types=["table_wise"],
    pooling_factors=[float(LENGTH)],
)


def option(
    where: Topology, sharding_type: str, fused_params: dict[str, Any] | None = None
) -> ShardingOption:
    constraints: Any = {"a": in_recstore(1000, sharding_types=[sharding_type])}
    sharder = RecStoreSharder(fused_params=fused_params)
    (found,) = RecStoreEnumerator(where, BATCH, constraints).enumerate(
        collection(a=2**40), [sharder]
    )
    return found


@pytest.mark.parametrize("device", ["cuda", "mtia"])
def test_a_mixed_plan_puts_each_table_into_its_own_memory(device: str) -> None:
    # The rows of either kind of table are too many for the other memory.
    where = topology(device, hbm_cap=GIB, ddr_cap=4 * GIB)
    constraints: Any = {"big": in_recstore(20_000_000), "small": FUSED, "tiny": FUSED}
    model = collection(big=2**40, small=2_000_000, tiny=2_000_000)
    plan = RecStorePlanner(topology=where, constraints=constraints, debug=False).plan(
        model, [RecStoreSharder()]
    )
    shardings = plan.plan[""]
    assert isinstance(shardings["big"], RecStoreParameterSharding)
    assert {name: each.compute_kernel for name, each in shardings.items()} == {
        "big": "customized_kernel",
        "small": "fused",
        "tiny": "fused",
    }
    assert shardings["big"].sharding_type == "row_wise"  # 5.3 GiB
    # 0.48 GiB each, of 0.85
    assert sorted([shardings["small"].ranks, shardings["tiny"].ranks]) == [[0], [1]]


def test_host_memory_holds_the_rows_and_both_memories_the_batch() -> None:
    for_host, for_cuda = (
        option(topology(device), "table_wise").total_storage
        for device in ("cpu", "cuda")
    )
    assert for_cuda.ddr == for_host.ddr
    assert for_host.hbm == 0
    assert for_cuda.hbm == BATCH * WORLD * (LENGTH * 8 + DIM * 4)


@pytest.mark.parametrize(
    "sharding_type", ["table_wise", "column_wise", "row_wise", "table_row_wise"]
)
def test_the_bus_costs_its_bytes_over_its_bandwidth(sharding_type: str) -> None:
    slow, fast = 1e6, 2e6  # bytes/ms
    perfs = [
        option(topology(hbm_to_ddr_mem_bw=bandwidth), sharding_type).shards[0].perf
        for bandwidth in (slow, fast)
    ]
    split = WORLD if "row" in sharding_type else 1
    ids, rows = BATCH * WORLD * (LENGTH * 8 / split + 8), BATCH * WORLD * DIM * 4
    assert perfs[0].fwd_compute - perfs[1].fwd_compute == pytest.approx(
        (ids + rows) * (1 / slow - 1 / fast)
    )
    assert perfs[0].bwd_compute - perfs[1].bwd_compute == pytest.approx(
        rows * (1 / slow - 1 / fast)
    )
    on_cpu = [
        option(topology("cpu", hbm_to_ddr_mem_bw=bandwidth), sharding_type)
        .shards[0]
        .perf
        for bandwidth in (slow, fast)
    ]
    assert on_cpu[0] == on_cpu[1]
    assert perfs[0].fwd_compute == pytest.approx(
        on_cpu[0].fwd_compute + (ids + rows) / slow
    )


def test_results_in_16_bits_halve_the_bytes_of_rows() -> None:
    bandwidth = 1e6
    wide, narrow = (
        option(topology(hbm_to_ddr_mem_bw=bandwidth), "table_wise", params)
        for params in (None, {"output_dtype": DataType.FP16})
    )
    assert narrow.output_dtype is None  # the plan leaves the dtype to the sharder
    saved = BATCH * WORLD * DIM * 2
    assert wide.total_storage.hbm - narrow.total_storage.hbm == saved
    assert wide.shards[0].perf.bwd_compute - narrow.shards[
        0
    ].perf.bwd_compute == pytest.approx(saved / bandwidth)


def test_hbm_does_not_limit_recstore_tables_and_fused_estimates_do_not_change() -> None:
    constraints: Any = {"a": in_recstore(10_000_000), "b": FUSED}
    sharders = [RecStoreSharder()]
    found = {
        o.name: o
        for o in RecStoreEnumerator(topology(), BATCH, constraints).enumerate(
            collection(a=2**40, b=1000), sharders
        )
    }
    fast = {
        o.name: o
        for o in RecStoreEnumerator(
            topology(hbm_to_ddr_mem_bw=1e9), BATCH, constraints
        ).enumerate(collection(a=2**40, b=1000), sharders)
    }
    assert found["b"].total_perf == fast["b"].total_perf
    assert found["a"].total_perf > fast["a"].total_perf


@pytest.mark.parametrize(
    ("caps", "said"),
    [
        (
            {"ddr_cap": 2 * GIB},
            (
                "table 'big' needs at least 2.682 GiB of host memory (DDR) on a rank,"
                " and a rank has 2.000 GiB"
            ),
        ),
        (
            {"hbm_cap": 500 * MIB},
            (
                "table 'small' needs at least 0.477 GiB of memory of cuda (HBM) on a"
                " rank, and a rank has 0.41"
            ),
        ),
    ],
)
def test_an_error_names_what_does_not_fit_and_where(
    caps: dict[str, Any], said: str
) -> None:
    constraints: Any = {"big": in_recstore(20_000_000), "small": FUSED}
    model = collection(big=2**40, small=2_000_000)
    planner = RecStorePlanner(
        topology=topology(**caps), constraints=constraints, debug=False
    )
    with pytest.raises(PlannerError) as error:
        planner.plan(model, [RecStoreSharder()])
    assert str(error.value).startswith(said)
    assert "Unable to find a plan for this model" in str(error.value)
    assert error.value.error_type in (
        PlannerErrorType.INSUFFICIENT_STORAGE,
        PlannerErrorType.STRICT_CONSTRAINTS,
    )


def test_an_error_names_the_sum_that_does_not_fit() -> None:
    # 2.68 GiB each
    constraints: Any = {name: in_recstore(10_000_000) for name in "abc"}
    planner = RecStorePlanner(
        topology=topology(ddr_cap=3 * GIB), constraints=constraints, debug=False
    )
    with pytest.raises(PlannerError) as error:
        planner.plan(collection(a=2**40, b=2**40, c=2**40), [RecStoreSharder()])
    assert str(error.value).startswith(
        "the tables need at least 8.048 GiB of host memory (DDR), and all 2 rank(s)"
        " together have 6.000 GiB"
    )


def test_an_error_names_the_memory_that_shards_do_not_share() -> None:
    # 0.31 GiB each, of 0.5 GiB on a rank
    constraints: Any = dict.fromkeys("abc", FUSED)
    planner = RecStorePlanner(
        topology=topology(hbm_cap=600 * MIB), constraints=constraints, debug=False
    )
    with pytest.raises(PlannerError) as error:
        planner.plan(
            collection(a=1_300_000, b=1_300_000, c=1_300_000), [RecStoreSharder()]
        )
    assert str(error.value).startswith(
        "each table fits, but the shards do not fit next to each other into the memory"
        " of cuda (HBM) of 2 rank(s) "
    )
    assert error.value.error_type == PlannerErrorType.STRICT_CONSTRAINTS


def test_the_plan_tells_the_bytes_of_each_rank_over_the_bus(
    caplog: pytest.LogCaptureFixture,
) -> None:
    constraints: Any = {
        "a": in_recstore(1000, sharding_types=["table_wise"]),
        "b": FUSED,
    }
    for device in ("cpu", "cuda"):
        planner = RecStorePlanner(
            topology(device), BATCH, constraints=constraints, debug=False
        )
        caplog.clear()
        with caplog.at_level(logging.INFO, "torchrec.distributed.planner.stats"):
            planner.plan(collection(a=2**40, b=100), [RecStoreSharder()])
        said = [line for line in caplog.messages if "copy in a step" in line]
        assert len(said) == (device == "cuda")
    assert said[0].endswith(
        "copy in a step 0.336 MiB to the host and 0.250 MiB to cuda"
    )


def test_torchrecs_planner_with_our_enumerator_plans_the_same() -> None:
    where = topology(hbm_cap=GIB, ddr_cap=4 * GIB)
    constraints: Any = {"big": in_recstore(20_000_000), "small": FUSED}
    enumerator = RecStoreEnumerator(where, constraints=constraints)
    stock = EmbeddingShardingPlanner(
        topology=where, enumerator=enumerator, constraints=constraints, debug=False
    )
    ours = RecStorePlanner(topology=where, constraints=constraints, debug=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RecStoreWarning)
        plans = [
            each.plan(collection(big=2**40, small=2_000_000), [RecStoreSharder()]).plan[
                ""
            ]
            for each in (stock, ours)
        ]
    of_stock, of_ours = (
        {n: (s.sharding_type, s.compute_kernel, s.ranks) for n, s in plan.items()}
        for plan in plans
    )
    assert of_stock == of_ours
    assert of_ours["big"][:2] == ("row_wise", "customized_kernel")


def test_torchrecs_planner_alone_warns_of_what_it_does_not_do() -> None:
    constraints: Any = {"a": in_recstore(20_000_000)}
    planner = EmbeddingShardingPlanner(
        topology=topology(), constraints=constraints, debug=False
    )
    text = "counts the rows of RecStore tables as memory of 'cuda'"
    with pytest.warns(RecStoreWarning, match=text):
        planner.plan(collection(a=2**40), [RecStoreSharder()])
