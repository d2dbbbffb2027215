"""RecStore tables through torch.distributed.checkpoint, from any world size and sharding to any other."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from tests.distributed.workers import run_on_ranks
from torchrec_recstore.checkpoint import load_distributed_checkpoint

from . import models


def save(rank: int, world_size: int, *, path: str, sharding: str, optimizer: EmbOptimType) -> None:
    model = models.recstore(sharding, optimizer)
    models.train(model)
    models.write_down(model, path)
    dcp.save(
        {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}, checkpoint_id=f"{path}/saved"
    )


def load(rank: int, world_size: int, *, path: str, sharding: str, optimizer: EmbOptimType, exact: bool) -> None:
    model = models.recstore(sharding, optimizer)
    models.train(model, steps=1)  # rows that must be gone afterwards
    load_distributed_checkpoint(model, f"{path}/saved")
    expected = models.whole_tables(path)
    held: dict[str, set[int]] = {name: set() for name in expected}
    for name, columns, ids, rows in models.shards(model):
        held[name].update(ids.tolist())
        states = rows.get("sum", torch.zeros(len(ids)))
        for i, identity in enumerate(ids.tolist()):
            row = expected[name][identity]
            cut = slice(columns.start, columns.stop)
            assert torch.equal(rows["weight"][i], row["weight"][cut])
            state = row["state"][cut] if states.dim() == 2 else row["state"][cut].double().mean().float()
            if exact or states.dim() == 2:
                assert torch.equal(states[i], state if states.dim() == 2 else row["state"][columns.start])
            else:
                torch.testing.assert_close(states[i], state)
    everywhere: list[Any] = [None] * world_size
    dist.all_gather_object(everywhere, held)
    assert {name: set().union(*(h[name] for h in everywhere)) for name in expected} == {
        name: set(rows) for name, rows in expected.items()
    }


ROW, TABLE, COLUMN = "row_wise", "table_wise", "column_wise"
RW, ELEMENT, NONE = EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_SGD


@pytest.mark.parametrize(
    ("saved_at", "saved_as", "loads"),
    [
        (2, ROW, [(1, TABLE, RW), (3, ROW, RW), (2, COLUMN, RW)]),
        (2, COLUMN, [(1, ROW, RW), (2, TABLE, RW)]),
        (1, TABLE, [(2, ROW, ELEMENT), (2, COLUMN, NONE)]),
        (2, "table_row_wise", [(2, "grid_shard", ELEMENT), (1, TABLE, ELEMENT)]),
        (2, "grid_shard", [(2, ROW, ELEMENT)]),
    ],
)
def test_any_world_size_and_sharding(
    tmp_path: Path, saved_at: int, saved_as: str, loads: list[tuple[int, str, EmbOptimType]]
) -> None:
    for optimizer in dict.fromkeys(optimizer for _, _, optimizer in loads):
        path = str(tmp_path / optimizer.value)
        Path(path).mkdir()
        run_on_ranks(saved_at, partial(save, path=path, sharding=saved_as, optimizer=optimizer))
        for world_size, sharding, wanted in loads:
            if wanted == optimizer:
                exact = saved_as != COLUMN or sharding == COLUMN  # only joined column shards average a row-wise state
                run_on_ranks(world_size, partial(load, path=path, sharding=sharding, optimizer=optimizer, exact=exact))


def test_async_save_and_training_on(one_rank: None, tmp_path: Path) -> None:
    model = models.recstore()
    models.train(model)
    state = {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}
    before = models.shards(model)
    # torch 2.13's default stager cannot copy a ShardedTensor, of whatever kernel.
    saving = dcp.async_save(state, checkpoint_id=tmp_path / "saved", async_stager=BlockingAsyncStager())
    models.train(model)
    saving.result()
    other = models.recstore()
    load_distributed_checkpoint(other, tmp_path / "saved")
    for (_, _, ids, rows), (_, _, other_ids, other_rows) in zip(before, models.shards(other), strict=True):
        assert torch.equal(ids, other_ids)
        assert torch.equal(rows["weight"], other_rows["weight"])
        assert torch.equal(rows["sum"], other_rows["sum"])


def test_model_state_alone(one_rank: None, tmp_path: Path) -> None:
    model = models.recstore()
    models.train(model)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "saved")
    other = models.recstore()
    load_distributed_checkpoint(other, tmp_path / "saved")
    batch = models.batch(3)
    assert torch.equal(model.eval()(batch), other.eval()(batch))


def test_stock_tables_come_and_go(one_rank: None, tmp_path: Path) -> None:
    stock = models.stock()
    models.train(stock, low=0, high=100)
    dcp.save({"model": stock.state_dict()}, checkpoint_id=tmp_path / "saved")
    model = models.recstore()
    load_distributed_checkpoint(model, tmp_path / "saved")
    batch = models.batch(3, low=0, high=100)
    assert torch.equal(stock.eval()(batch), model.eval()(batch))


def test_what_cannot_be_loaded_changes_nothing(one_rank: None, tmp_path: Path) -> None:
    model = models.recstore()
    models.train(model)
    before = models.shards(model)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_distributed_checkpoint(model, tmp_path / "nowhere")
    dcp.save({"model": {"over.weight": torch.zeros(1, 24)}}, checkpoint_id=tmp_path / "dense")
    with pytest.raises(ValueError, match="no RecStore table 'user'"):
        load_distributed_checkpoint(model, tmp_path / "dense")
    wide = {f"sparse.embedding_bags.{name}.weight": torch.zeros(3, 16) for name in models.TABLES}
    dcp.save({"model": wide}, checkpoint_id=tmp_path / "wide")
    with pytest.raises(ValueError, match=r"'user' is of shape \(3, 16\)"):
        load_distributed_checkpoint(model, tmp_path / "wide")
    for (_, _, ids, rows), (_, _, ids_now, rows_now) in zip(before, models.shards(model), strict=True):
        assert torch.equal(ids, ids_now)
        assert torch.equal(rows["weight"], rows_now["weight"])
