"""Tests of ``reset_rows``: the tables are as new, together or not at all, and the clock
goes on.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel

from torchrec_recstore import (
    LRU,
    Expiry,
    MinFrequency,
    RecStoreEmbeddingBag,
    RocksDBStore,
    TableOptions,
    load_checkpoint,
    reset_rows,
    save_checkpoint,
    set_time,
    table_stats,
)
from torchrec_recstore.sharders.model_tables import recstore_tables

from ..checkpoint import models
from ..distributed.workers import run_on_ranks


def batch(seed: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.full((3 * 8,), 2)
    return KeyedJaggedTensor(
        ["u", "i", "j"],
        torch.randint(0, 40, (48,), generator=generator),
        lengths=lengths,
    )


def step(model: DistributedModelParallel, seed: int) -> Tensor:
    loss = model(batch(seed)).square().mean()
    loss.backward()
    return loss.detach()


def rows_of(model: DistributedModelParallel) -> list[dict[str, Tensor]]:
    shards = [shard.table for table in recstore_tables(model) for shard in table.shards]
    return [{"id": table.ids(), **table.read_rows(table.ids())} for table in shards]


def assert_same_rows(
    one: DistributedModelParallel, other: DistributedModelParallel
) -> None:
    for rows, others in zip(rows_of(one), rows_of(other), strict=True):
        assert rows.keys() == others.keys()
        for name in rows.keys() - {"last_step"}:
            assert torch.equal(rows[name], others[name]), name


def check_as_new(sharding: str, rank: int, world_size: int) -> None:
    options = TableOptions(
        admission=MinFrequency(2), routing="hash" if sharding == "row_wise" else "block"
    )
    used, new = (
        models.recstore(sharding, options=options),
        models.recstore(sharding, options=options),
    )
    for seed in (1, 1, 2):
        step(used, seed + 10 * rank)
    assert sum(stats.rows for stats in table_stats(used).values()) > 0
    pending = used(batch(7 + rank))
    reset_rows(used)
    pending.sum().backward()  # of a forward before the reset: no row changes
    assert {name: stats.rows for name, stats in table_stats(used).items()} == {
        "user": 0,
        "item": 0,
    }
    assert {stats.steps for stats in table_stats(used).values()} == {4}
    assert all(
        shard.table.optimizer_steps == 0
        for table in recstore_tables(used)
        for shard in table.shards
    )
    for seed in (3, 3, 4):
        assert torch.equal(step(used, seed + 10 * rank), step(new, seed + 10 * rank))
    assert_same_rows(used, new)
    dist.barrier()


@pytest.mark.usefixtures("one_rank")
def test_tables_are_as_new_and_the_dense_part_stays() -> None:
    check_as_new("table_wise", 0, 1)


def on_ranks(folder: Path, rank: int, world_size: int) -> None:
    check_as_new("row_wise", rank, world_size)
    check_as_new("column_wise", rank, world_size)
    # One rank cannot make its new tables: no rank resets its tables.
    model = models.recstore("row_wise", options=TableOptions(routing="hash"))
    step(model, rank)
    before = table_stats(model)
    if rank == 1:
        table = next(
            shard.table for table in recstore_tables(model) for shard in table.shards
        )
        table.empty_copy = refuse  # type: ignore[method-assign]
    with pytest.raises(MemoryError, match="no more"):
        reset_rows(model)
    assert table_stats(model) == before


def refuse() -> None:
    raise MemoryError("no more")


@pytest.mark.slow
def test_all_ranks_or_none(tmp_path: Path) -> None:
    run_on_ranks(2, partial(on_ranks, tmp_path))


@pytest.mark.usefixtures("one_rank")
def test_a_checkpoint_has_the_rows_before_or_after(tmp_path: Path) -> None:
    model, other = models.recstore(), models.recstore()
    step(model, 1)
    save_checkpoint(model, tmp_path / "before")
    table = recstore_tables(model)[1].shards[0].table
    before = table_stats(model)
    with (
        table.snapshot(),
        pytest.raises(
            ValueError, match=f"table '{table.name}': the table is being saved already"
        ),
    ):
        reset_rows(model)
    assert table_stats(model) == before
    expected = rows_of(model)
    reset_rows(model)
    with pytest.raises(ValueError, match="no longer known"):
        save_checkpoint(model, tmp_path / "delta", delta_of=tmp_path / "before")
    step(model, 2)
    save_checkpoint(model, tmp_path / "after")
    load_checkpoint(other, tmp_path / "after")
    assert_same_rows(model, other)
    load_checkpoint(other, tmp_path / "before")
    for rows, others in zip(expected, rows_of(other), strict=True):
        assert all(torch.equal(rows[name], others[name]) for name in rows)


@pytest.mark.usefixtures("one_rank")
def test_cold_rows_go_too_and_the_time_of_the_events_goes_on(tmp_path: Path) -> None:
    options = TableOptions(
        max_rows=64,
        eviction=LRU(),
        expiry=Expiry(seconds=100),
        cold_store=RocksDBStore(str(tmp_path / "cold")),
    )
    model = models.recstore(options=options)
    set_time(model, 1000.0)
    for seed in range(5):
        step(model, seed)
    tables = [shard.table for table in recstore_tables(model) for shard in table.shards]
    times = [table.state().times for table in tables]
    reset_rows(model)
    assert all(
        stats.rows == stats.cold_rows == 0 for stats in table_stats(model).values()
    )
    assert [table.state().times for table in tables] == times
    set_time(model, 1050.0)  # not refused: the time is not that of the system's clock
    step(model, 1)
    assert sum(stats.rows for stats in table_stats(model).values()) > 0


def test_eager_modules() -> None:
    bag = RecStoreEmbeddingBag(2**40, 8)
    bag(torch.tensor([[1, 2]])).sum().backward()
    reset_rows(bag)
    assert len(bag.table) == 0
