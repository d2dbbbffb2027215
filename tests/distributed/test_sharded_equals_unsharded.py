"""The main test: sharded training and unsharded training give the same results, on one
rank and on two ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingPlan, ShardingType
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from torchrec_recstore.optim import SGD, Adagrad, Optimizer, RowWiseAdagrad
from torchrec_recstore.options import TableOptions, UniformInit
from torchrec_recstore.planner import RecStoreConstraints, RecStorePlanner
from torchrec_recstore.sharders import (
    RecStoreEmbeddingCollectionSharder,
    RecStoreParameterSharding,
    RecStoreSharder,
    table_stats,
)

from .reference import Case, Unsharded, loss, outputs
from .workers import run_on_ranks

ROW, TABLE, COLUMN = (
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_WISE.value,
    ShardingType.COLUMN_WISE.value,
)
TABLE_ROW, GRID = ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value
TYPES = {
    SGD: EmbOptimType.EXACT_SGD,
    Adagrad: EmbOptimType.EXACT_ADAGRAD,
    RowWiseAdagrad: EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}


SHARDERS = (RecStoreSharder, RecStoreEmbeddingCollectionSharder)


def fused_params(optimizer: Optimizer) -> dict[str, Any]:
    params = {"optimizer": TYPES[type(optimizer)], "learning_rate": optimizer.lr}
    return params if isinstance(optimizer, SGD) else {**params, "eps": optimizer.eps}


def three_tables(pooling: PoolingType = PoolingType.SUM) -> list[EmbeddingBagConfig]:
    """Tables with different dims, several features, a shared feature, and
    ``num_embeddings`` of 2**40.
    """
    return [
        EmbeddingBagConfig(
            name="many",
            num_embeddings=2**40,
            embedding_dim=8,
            feature_names=["f0", "f1"],
            pooling=pooling,
        ),
        EmbeddingBagConfig(
            name="few",
            num_embeddings=7,
            embedding_dim=4,
            feature_names=["f2"],
            pooling=pooling,
        ),
        EmbeddingBagConfig(
            name="also",
            num_embeddings=1000,
            embedding_dim=16,
            feature_names=["f2", "f3"],
            pooling=pooling,
        ),
    ]


def constant(name: str, features: list[str]) -> EmbeddingBagConfig:
    """Returns a stock table with known initial rows."""
    return EmbeddingBagConfig(
        name=name,
        num_embeddings=10,
        embedding_dim=8,
        feature_names=features,
        init_fn=partial(nn.init.constant_, val=0.05),
    )


def plan_of(
    module: nn.Module, constraints: Mapping[str, ParameterConstraints], world_size: int
) -> ShardingPlan:
    """Returns the plan, which rank 0 makes and sends to the other ranks."""
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    topology = Topology(
        world_size=world_size, local_world_size=local_world_size, compute_device="cpu"
    )
    planner = RecStorePlanner(
        topology=topology, constraints=dict(constraints), debug=False
    )
    return planner.collective_plan(
        module, [sharder() for sharder in SHARDERS], dist.group.WORLD
    )


def train_and_compare(
    case: Case,
    constraints: Mapping[str, ParameterConstraints] | None,
    rank: int,
    world_size: int,
) -> DistributedModelParallel:
    """Trains sharded and unsharded models and compares outputs, rows and statistics."""
    module = case.collection(case.tables, "meta")
    sharders = [
        sharder(fused_params=fused_params(case.optimizer)) for sharder in SHARDERS
    ]
    plan = None if constraints is None else plan_of(module, constraints, world_size)
    model = DistributedModelParallel(
        nn.Sequential(module) if plan is None else module, plan=plan, sharders=sharders
    )
    dense_parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
    data_parallel = [
        n for n, c in (constraints or {}).items() if c.compute_kernels == ["dense"]
    ]
    assert [name.split(".")[-2] for name in dense_parameters] == data_parallel
    dense = [
        KeyedOptimizerWrapper(
            {name: parameter}, partial(torch.optim.SGD, lr=case.optimizer.lr)
        )
        for name, parameter in dense_parameters.items()
    ]
    unsharded = Unsharded(case, world_size)
    for step in range(case.steps):
        expected = unsharded.train_step(step)[rank]
        pooled = outputs(model(case.sharded_batch(step, rank)).wait())
        assert pooled.keys() == expected.keys()
        for key, value in pooled.items():
            torch.testing.assert_close(
                value,
                expected[key],
                atol=1e-6,
                rtol=0,
                msg=lambda m, k=key: f"{k}: {m}",
            )
        model.zero_grad()
        loss(pooled).backward()
        for optimizer in dense:
            optimizer.step()
    compare_rows(model, unsharded, world_size)
    dynamic = [config for config in case.tables if config.name not in case.stock]
    # Each RecStore table also has weight_id and weight_rows.
    assert len(model.state_dict()) == len(case.tables) + 2 * len(dynamic)
    model.fused_optimizer.state_dict()
    return model


def compare_rows(
    model: DistributedModelParallel, unsharded: Unsharded, world_size: int
) -> None:
    """Checks that every trained id has its row on exactly one rank, and that it equals
    the unsharded row.
    """
    (sharded,) = [m for m in model.modules() if hasattr(m, "recstore_tables")]
    held: dict[tuple[str, int], torch.Tensor] = {}
    for table in sharded.recstore_tables():
        ids = table.ids()
        columns = table.columns
        held[table.name, columns.start] = ids
        where = torch.searchsorted(unsharded.vocabulary[table.name], ids)
        expected = unsharded.weights(table.name).detach()[
            where, columns.start : columns.stop
        ]
        torch.testing.assert_close(table.lookup(ids), expected, atol=1e-5, rtol=0)
    gathered: list[dict[tuple[str, int], torch.Tensor]] = [{}] * world_size
    dist.all_gather_object(gathered, held)
    stats = table_stats(model)
    for name in sharded.recstore_table_names():
        vocabulary = unsharded.vocabulary[name]
        for first in {
            first for ranks in gathered for table, first in ranks if table == name
        }:
            union = torch.cat(
                [ranks[name, first] for ranks in gathered if (name, first) in ranks]
            )
            assert torch.equal(union.sort().values, vocabulary), (
                f"{name}: an id on two ranks, or lost"
            )
        assert (
            stats[name].rows
            == stats[name].inserts
            == stats[name].misses
            == len(vocabulary)
        )
        assert stats[name].steps == unsharded.case.steps
    for name in unsharded.case.stock:
        weight = (
            sharded.embeddings if unsharded.case.sequential else sharded.embedding_bags
        )[name].weight.detach()
        if weight.numel():
            torch.testing.assert_close(
                weight, unsharded.weights(name).detach(), atol=1e-5, rtol=0
            )


def recstore(*sharding_types: str, **options: Any) -> RecStoreConstraints:
    return RecStoreConstraints(
        sharding_types=list(sharding_types), options=TableOptions(**options)
    )


def row_wise(rank: int, world_size: int) -> None:
    for optimizer in (RowWiseAdagrad(lr=0.05), Adagrad(lr=0.05), SGD(lr=0.1)):
        case = Case(three_tables(), optimizer)
        model = train_and_compare(
            case, {t.name: recstore(ROW) for t in case.tables}, rank, world_size
        )
        assert all(
            s.sharding_type == ROW for s in model.plan.get_plan_for_module("").values()
        )


def table_wise(rank: int, world_size: int) -> None:
    for optimizer in (RowWiseAdagrad(lr=0.05), SGD(lr=0.1)):
        case = Case(three_tables(), optimizer)
        train_and_compare(
            case, {t.name: recstore(TABLE) for t in case.tables}, rank, world_size
        )


def mean(rank: int, world_size: int) -> None:
    case = Case(three_tables(PoolingType.MEAN))
    for sharding_type in (ROW, TABLE):
        train_and_compare(
            case,
            {t.name: recstore(sharding_type) for t in case.tables},
            rank,
            world_size,
        )
    # Row-wise means together with table-wise means and sums. torchrec 1.8.0 itself
    # divides them twice.
    tables = three_tables(PoolingType.MEAN)
    tables[0].feature_names, tables[2].feature_names = ["f0", "f1"], ["f3"]
    tables[2].pooling = PoolingType.SUM
    train_and_compare(
        Case(tables),
        {"many": recstore(ROW), "few": recstore(TABLE), "also": recstore(TABLE)},
        rank,
        world_size,
    )
    # A feature of a table with a row-wise mean and of a table with a sum. torchrec
    # 1.8.0 computes two means.
    tables = three_tables(PoolingType.MEAN)
    tables[2].pooling = PoolingType.SUM
    for other in (ROW, TABLE):
        beside = {
            "many": recstore(other),
            "few": recstore(ROW),
            "also": recstore(other),
        }
        train_and_compare(Case(tables), beside, rank, world_size)


def weighted(rank: int, world_size: int) -> None:
    case = Case(three_tables(), RowWiseAdagrad(lr=0.05), weighted=True)
    train_and_compare(
        case,
        {"many": recstore(ROW), "few": recstore(TABLE), "also": recstore(ROW)},
        rank,
        world_size,
    )


def beside_stock_tables(rank: int, world_size: int) -> None:
    tables = [
        *three_tables(),
        constant("fused", ["s0", "s1"]),
        constant("replicated", ["s2"]),
    ]
    options = {
        "many": TableOptions(initializer=UniformInit(-0.1, 0.2), seed=3),
        "also": TableOptions(expected_rows=100),
    }
    case = Case(
        tables, SGD(lr=0.1), stock=frozenset({"fused", "replicated"}), options=options
    )
    constraints = {
        "many": RecStoreConstraints(sharding_types=[ROW], options=options["many"]),
        "few": recstore(TABLE),
        "also": RecStoreConstraints(sharding_types=[TABLE], options=options["also"]),
        "fused": ParameterConstraints(
            sharding_types=[TABLE], compute_kernels=[EmbeddingComputeKernel.FUSED.value]
        ),
        "replicated": ParameterConstraints(
            sharding_types=[ShardingType.DATA_PARALLEL.value],
            compute_kernels=[EmbeddingComputeKernel.DENSE.value],
        ),
    }
    model = train_and_compare(case, constraints, rank, world_size)
    plan = model.plan.get_plan_for_module("")
    assert {
        name
        for name, sharding in plan.items()
        if isinstance(sharding, RecStoreParameterSharding)
    } == {
        "many",
        "few",
        "also",
    }
    assert plan["many"].options == options["many"]
    assert set(table_stats(model)) == {"many", "few", "also"}
    # The options differ, and there is still one kernel for each sharding: the tables
    # stay in one group.
    for lookup, kernel in zip(
        model.module._lookups, model.module._sharding_types, strict=True
    ):
        if kernel == TABLE and rank == 0 and world_size == 1:
            assert [g.table_names() for g in lookup.grouped_configs] == [
                ["few", "also"],
                ["fused"],
            ]


def rows_in_a_node(rank: int, world_size: int) -> None:
    tables = [t for t in three_tables() if t.name != "few"]
    grid = {t.name: recstore(GRID) for t in tables}
    for constraint in grid.values():
        constraint.min_partition = 4
    table_row = {t.name: recstore(TABLE_ROW) for t in tables}
    train_and_compare(
        Case(tables, RowWiseAdagrad(lr=0.05), weighted=True),
        table_row,
        rank,
        world_size,
    )
    train_and_compare(Case(tables, SGD(lr=0.1)), grid, rank, world_size)
    # Means together with a sum. torchrec 1.8.0 itself returns sums instead of means for
    # grid shards.
    tables = [t for t in three_tables(PoolingType.MEAN) if t.name != "few"]
    tables.append(
        EmbeddingBagConfig(
            name="sum", num_embeddings=1000, embedding_dim=8, feature_names=["f4"]
        )
    )
    mixed = {**grid, "also": recstore(TABLE_ROW), "sum": recstore(TABLE)}
    train_and_compare(Case(tables), mixed, rank, world_size)


def hash_routing(rank: int, world_size: int) -> None:
    tables = [t for t in three_tables() if t.name != "few"]
    options = {t.name: TableOptions(routing="hash") for t in tables}
    for sharding_type in (ROW, TABLE_ROW, GRID, TABLE):
        train_and_compare(
            Case(tables, SGD(lr=0.1), options=options),
            {t.name: recstore(sharding_type, routing="hash") for t in tables},
            rank,
            world_size,
        )
    beside = {"many": recstore(ROW, routing="hash"), "also": recstore(ROW)}
    train_and_compare(
        Case(tables, RowWiseAdagrad(lr=0.05), weighted=True), beside, rank, world_size
    )
    sequences = [t for t in sequence_tables() if t.name != "few"]
    train_and_compare(
        Case(sequences),
        {"many": recstore(ROW, routing="hash"), "also": recstore(ROW)},
        rank,
        world_size,
    )


def sequence_tables() -> list[EmbeddingConfig]:
    return [
        EmbeddingConfig(t.num_embeddings, 8, t.name, feature_names=t.feature_names)
        for t in three_tables()
    ]


def sequences(rank: int, world_size: int) -> None:
    tables = sequence_tables()
    for sharding_type, optimizer in (
        (ROW, RowWiseAdagrad(lr=0.05)),
        (TABLE, Adagrad(lr=0.05)),
        (COLUMN, SGD(lr=0.1)),
    ):
        constraints = {t.name: recstore(sharding_type) for t in tables}
        for constraint in constraints.values():
            constraint.min_partition = 4
        train_and_compare(
            Case(tables, optimizer, empty=(1, 3)), constraints, rank, world_size
        )
    fused = EmbeddingConfig(
        10,
        8,
        "fused",
        feature_names=["s0"],
        init_fn=partial(nn.init.constant_, val=0.05),
    )
    stock = ParameterConstraints(
        sharding_types=[TABLE], compute_kernels=[EmbeddingComputeKernel.FUSED.value]
    )
    beside = {
        "many": recstore(ROW),
        "few": recstore(TABLE),
        "also": recstore(TABLE),
        "fused": stock,
    }
    train_and_compare(
        Case([*tables, fused], SGD(lr=0.1), stock=frozenset({"fused"})),
        beside,
        rank,
        world_size,
    )
    train_and_compare(Case(tables), None, rank, world_size)


def empty_batches_and_idle_ranks(rank: int, world_size: int) -> None:
    """One table on one rank. With two ranks, the other rank has no shard."""
    table = EmbeddingBagConfig(
        name="many", num_embeddings=2**40, embedding_dim=8, feature_names=["f0"]
    )
    row = EmbeddingConfig(2**40, 8, "many", feature_names=["f0"])
    for weighted in (False, True):
        case = Case(
            [table], RowWiseAdagrad(lr=0.05), weighted=weighted, empty=(0, 1, 3)
        )
        for sharding_type in (TABLE, ROW):
            train_and_compare(case, {"many": recstore(sharding_type)}, rank, world_size)
    train_and_compare(
        Case([row], empty=(0, 1, 3)), {"many": recstore(TABLE)}, rank, world_size
    )


def varying_batches(rank: int, world_size: int) -> None:
    # With row-wise sharding on two ranks, TorchRec's distribution of these batches
    # fails on gloo (torchrec 1.8.0).
    for sharding_type in (TABLE, COLUMN, ROW) if world_size == 1 else (TABLE, COLUMN):
        tables = [t for t in three_tables() if t.name != "few"]
        constraints = {t.name: recstore(sharding_type) for t in tables}
        for constraint in constraints.values():
            constraint.min_partition = 4
        train_and_compare(
            Case(tables, SGD(lr=0.1), varying=True), constraints, rank, world_size
        )
        if sharding_type != COLUMN:
            case = Case(
                three_tables(PoolingType.MEAN), RowWiseAdagrad(lr=0.05), varying=True
            )
            train_and_compare(
                case,
                {t.name: recstore(sharding_type) for t in case.tables},
                rank,
                world_size,
            )
    stock = ParameterConstraints(
        sharding_types=[TABLE], compute_kernels=[EmbeddingComputeKernel.FUSED.value]
    )
    beside = {**{t.name: recstore(TABLE) for t in three_tables()}, "fused": stock}
    tables = [*three_tables(), constant("fused", ["s0", "s1"])]
    train_and_compare(
        Case(tables, stock=frozenset({"fused"}), varying=True), beside, rank, world_size
    )


def without_a_plan(rank: int, world_size: int) -> None:
    train_and_compare(
        Case(three_tables(), RowWiseAdagrad(lr=0.05)), None, rank, world_size
    )


def column_wise(rank: int, world_size: int) -> None:
    tables = [t for t in three_tables() if t.name != "few"]
    for sharding_type in (COLUMN, ShardingType.TABLE_COLUMN_WISE.value):
        constraints = {t.name: recstore(sharding_type) for t in tables}
        for constraint in constraints.values():
            constraint.min_partition = 4
        train_and_compare(Case(tables, SGD(lr=0.1)), constraints, rank, world_size)


SCENARIOS = [
    row_wise,
    table_wise,
    mean,
    weighted,
    beside_stock_tables,
    without_a_plan,
    column_wise,
    rows_in_a_node,
    hash_routing,
    sequences,
    empty_batches_and_idle_ranks,
    varying_batches,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.usefixtures("one_rank")
def test_one_rank(scenario: Any) -> None:
    scenario(0, 1)


def narrow_ids(rank: int, world_size: int) -> None:
    """Row-wise int32 ids above ``num_embeddings``, for which TorchRec's input
    distribution alone is wrong.
    """
    table = EmbeddingBagConfig(
        name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"]
    )
    model = DistributedModelParallel(
        EmbeddingBagCollection(tables=[table], device=torch.device("meta")),
        plan=plan_of(
            EmbeddingBagCollection([table], device=torch.device("meta")),
            {"t": recstore(ROW)},
            world_size,
        ),
        sharders=[RecStoreSharder()],
    )
    ids = torch.tensor([-7, 3, 9, 10, 12345, -(2**31), 2**31 - 1], dtype=torch.int32)
    model(
        KeyedJaggedTensor.from_lengths_sync(["f"], ids, torch.tensor([3, 4]))
    ).values().sum().backward()
    held: list[list[int]] = [[]] * world_size
    dist.all_gather_object(
        held,
        [i for shard in model.module.recstore_tables() for i in shard.ids().tolist()],
    )
    assert sorted(i for ranks in held for i in ranks) == sorted(ids.tolist())


def refusals_reach_every_rank(rank: int, world_size: int) -> None:
    """The table is on one rank only.

    The other rank must raise the error as well, and not wait.
    """
    good = EmbeddingBagConfig(
        name="good", num_embeddings=10, embedding_dim=4, feature_names=["f"]
    )
    quantized = EmbeddingBagConfig(
        name="quantized",
        num_embeddings=10,
        embedding_dim=4,
        feature_names=["g"],
        data_type=DataType.INT4,
    )
    ebc = EmbeddingBagCollection(tables=[good, quantized], device=torch.device("meta"))
    plan = plan_of(
        ebc, {"good": recstore(ROW), "quantized": recstore(TABLE)}, world_size
    )
    with pytest.raises(ValueError, match=r"'quantized'.*INT4"):
        DistributedModelParallel(ebc, plan=plan, sharders=[RecStoreSharder()])


def two_rank_scenarios(rank: int, world_size: int) -> None:
    for scenario in (*SCENARIOS, narrow_ids, refusals_reach_every_rank):
        scenario(rank, world_size)


@pytest.mark.slow
def test_two_ranks() -> None:
    run_on_ranks(2, two_rank_scenarios)


def two_nodes(rank: int, world_size: int) -> None:
    """See ``rows_in_a_node``.

    Each rank is a node, and grid shards split columns over the nodes.
    """
    os.environ.update(LOCAL_WORLD_SIZE="1", LOCAL_RANK="0", GROUP_RANK=str(rank))
    rows_in_a_node(rank, world_size)


def test_two_nodes() -> None:
    run_on_ranks(2, two_nodes)
