"""``reshard`` moves the rows of a model to another plan, as a save and a load into a
model with that plan do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DataType

from tests.checkpoint import models
from torchrec_recstore import (
    LFU,
    LRU,
    Expiry,
    MinFrequency,
    RocksDBStore,
    TableOptions,
    load_checkpoint,
    reshard,
    save_checkpoint,
    set_time,
    table_stats,
)

from .workers import run_on_ranks

KINDS = (
    "table_wise",
    "row_wise",
    "hash",
    "column_wise",
    "table_column_wise",
    "table_row_wise",
    "grid_shard",
)


def build(
    kind: str,
    optimizer: EmbOptimType = EmbOptimType.EXACT_ADAGRAD,
    options: TableOptions | None = None,
    data_type: DataType = DataType.FP32,
) -> DistributedModelParallel:
    """The model of another module's tests with all tables of one sharding type."""
    options = replace(
        options or TableOptions(), routing="hash" if kind == "hash" else "block"
    )
    return models.recstore(
        "row_wise" if kind == "hash" else kind,
        optimizer,
        options=options,
        data_type=data_type,
    )


def assert_equal(
    model: DistributedModelParallel, expected: DistributedModelParallel
) -> None:
    """Checks that two models of one plan hold the same on this rank: rows, states,
    bookkeeping and counts.
    """
    held, wanted = models.shards(model), models.shards(expected)
    assert len(held) == len(wanted)
    for (name, columns, ids, rows), (other, its_columns, its_ids, its_rows) in zip(
        held, wanted, strict=True
    ):
        assert (name, columns) == (other, its_columns)
        assert torch.equal(ids, its_ids)
        assert rows.keys() == its_rows.keys()
        assert all(torch.equal(rows[key], its_rows[key]) for key in rows)
    for name, shards in model.module.sparse.recstore_state.shards.items():
        for shard, other in zip(
            shards, expected.module.sparse.recstore_state.shards[name], strict=True
        ):
            assert shard.routing == other.routing
            assert shard.table.options == other.table.options
            assert (shard.table.steps, shard.table.optimizer_steps) == (
                other.table.steps,
                other.table.optimizer_steps,
            )
            assert shard.table.state().times == other.table.state().times
            mine, its = shard.table.state().tensors(), other.table.state().tensors()
            assert mine.keys() == its.keys()
            assert all(
                torch.equal(mine[key], its[key])
                for key in mine
                if key.startswith("sighting_")
            )
    for stats, wanted_stats in zip(
        table_stats(model).values(), table_stats(expected).values(), strict=True
    ):
        for count in ("rows", "cold_rows", "bytes", "steps"):
            assert getattr(stats, count) == getattr(wanted_stats, count), count


def tour(
    rank: int, world_size: int, *, path: str, kinds: Sequence[str], **more: Any
) -> None:
    """Reshards one model from each sharding type to each other one."""
    loaded = {kind: build(kind, **more) for kind in kinds}
    model = build(kinds[0], **more)
    ways = [way for a, b in combinations(kinds, 2) for way in ((a, b), (b, a))]
    at = kinds[0]
    for seed, (before, after) in enumerate(ways):
        if at != before:
            reshard(model, loaded[before].plan)
        # The models must not read the system's clock at different times.
        set_time(model, 1000.0 + 100 * seed)
        models.train(model, steps=2, distinct=40 + 2 * seed)
        save_checkpoint(model, f"{path}/{world_size}", overwrite=True)
        load_checkpoint(loaded[after], f"{path}/{world_size}")
        reshard(model, loaded[after].plan)
        assert model.plan.plan["sparse"] == loaded[after].plan.plan["sparse"]
        assert_equal(model, loaded[after])
        assert all(
            stats.inserts == stats.lookups == 0 for stats in table_stats(model).values()
        )
        if seed % 5 == 0:  # The resharded model trains as the loaded one.
            for trained in (model, loaded[after]):
                set_time(trained, 1050.0 + 100 * seed)
                models.train(trained, steps=2, distinct=150)
            assert_equal(model, loaded[after])
        at = after


ALL = [
    pytest.param(world_size, KINDS, marks=pytest.mark.slow) for world_size in (1, 2, 4)
]


@pytest.mark.parametrize(
    ("world_size", "kinds"), [(2, ("table_wise", "row_wise")), *ALL]
)
def test_every_sharding_to_every_other(
    tmp_path: Path, world_size: int, kinds: Sequence[str]
) -> None:
    run_on_ranks(world_size, partial(tour, path=str(tmp_path), kinds=kinds))


OPTIONS = {
    "bounded": TableOptions(max_rows=48, eviction=LFU(half_life_steps=10)),
    "aged": TableOptions(
        max_rows=64, eviction=LRU(), expiry=Expiry(steps=50), admission=MinFrequency(2)
    ),
    "timed": TableOptions(expiry=Expiry(seconds=1000), admission=MinFrequency(3)),
}


def options_and_optimizers(rank: int, world_size: int, *, path: str) -> None:
    kinds = ("table_wise", "hash", "grid_shard")
    for name, optimizer in (
        ("bounded", EmbOptimType.ADAM),
        ("aged", EmbOptimType.EXACT_ROWWISE_ADAGRAD),
        ("timed", EmbOptimType.PARTIAL_ROWWISE_LAMB),
    ):
        tour(
            rank,
            world_size,
            path=f"{path}-{name}",
            kinds=kinds,
            optimizer=optimizer,
            options=OPTIONS[name],
        )
    cold = TableOptions(max_rows=48, cold_store=RocksDBStore(f"{path}/cold"))
    tour(rank, world_size, path=f"{path}-cold", kinds=kinds, options=cold)


@pytest.mark.slow
def test_bookkeeping_and_cold_rows_move(tmp_path: Path) -> None:
    run_on_ranks(2, partial(options_and_optimizers, path=str(tmp_path)))


def row_types(rank: int, world_size: int, *, path: str) -> None:
    for data_type in (DataType.FP16, DataType.BF16, DataType.INT8):
        tour(
            rank,
            world_size,
            path=f"{path}-{data_type}",
            kinds=("table_wise", "hash"),
            data_type=data_type,
        )


@pytest.mark.slow
def test_rows_of_other_types_move(tmp_path: Path) -> None:
    run_on_ranks(2, partial(row_types, path=str(tmp_path)))


def mixed(rank: int, world_size: int, *, path: str) -> None:
    plans = {kind: build(kind).plan.plan["sparse"] for kind in KINDS}
    model, expected = build("table_wise"), build("grid_shard")
    models.train(model)
    save_checkpoint(model, f"{path}/saved")
    load_checkpoint(expected, f"{path}/saved")
    for of_user, of_item in (
        ("row_wise", "table_wise"),
        ("column_wise", "hash"),
        ("grid_shard", "column_wise"),
    ):
        plan = {"user": plans[of_user]["user"], "item": plans[of_item]["item"]}
        reshard(model, ShardingPlan({"sparse": plan}))
        assert model.module.sparse.module_sharding_plan == plan
    reshard(model, expected.plan)
    assert_equal(model, expected)


@pytest.mark.slow
def test_tables_of_one_collection_with_different_shardings(tmp_path: Path) -> None:
    run_on_ranks(2, partial(mixed, path=str(tmp_path)))
