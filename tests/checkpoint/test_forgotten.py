"""``state_dict`` and torch.distributed.checkpoint keep what admission has counted and
when rows expire.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import _create_read_items
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel

from torchrec_recstore import (
    load_checkpoint,
    load_distributed_checkpoint,
    save_checkpoint,
    set_time,
    table_stats,
)
from torchrec_recstore.options import Expiry, MinFrequency, TableOptions

from . import models


def build(
    options: TableOptions, sharding: str = "table_wise"
) -> DistributedModelParallel:
    return models.recstore(sharding, options=options)


def see(model: DistributedModelParallel, *ids: int) -> None:
    """Looks ids up in each table, in a training step."""
    values = torch.tensor(ids * 3, dtype=torch.int64)
    lengths = torch.full((3,), len(ids))
    model(
        KeyedJaggedTensor(keys=["u", "i", "j"], values=values, lengths=lengths)
    ).sum().backward()


def rows(model: DistributedModelParallel) -> int:
    return table_stats(model)["user"].rows


def through_state_dict(
    model: DistributedModelParallel, fresh: DistributedModelParallel, path: Path
) -> None:
    fresh.load_state_dict(model.state_dict())
    fresh.fused_optimizer.load_state_dict(model.fused_optimizer.state_dict())


def through_dcp(
    model: DistributedModelParallel, fresh: DistributedModelParallel, path: Path
) -> None:
    dcp.save(
        {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()},
        checkpoint_id=path,
    )
    load_distributed_checkpoint(fresh, path)


def through_checkpoint(
    model: DistributedModelParallel, fresh: DistributedModelParallel, path: Path
) -> None:
    save_checkpoint(model, path)
    load_checkpoint(fresh, path)


ROADS = [through_state_dict, through_dcp, through_checkpoint]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("road", ROADS)
def test_an_id_that_was_seen_twice_gets_its_row_when_it_is_seen_again(
    road: object, tmp_path: Path
) -> None:
    options = TableOptions(admission=MinFrequency(3))
    model, fresh = build(options), build(options)
    see(model, 7, 8)
    see(model, 7)
    road(model, fresh, tmp_path / "saved")  # type: ignore[operator]
    see(fresh, 7, 8)
    assert [
        table.ids().tolist() for table in fresh.module.sparse.recstore_tables()
    ] == [[7], [7]]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("road", ROADS)
def test_rows_of_a_run_that_is_resumed_often_expire(
    road: object, tmp_path: Path
) -> None:
    """Each resume comes before the rows expire, so that their age must count on."""
    options = TableOptions(expiry=Expiry(seconds=100))
    model = build(options)
    set_time(model, 1000.0)
    see(model, *range(50))
    for resume in range(5):
        for second in range(0, 60, 5):
            set_time(model, 1000.0 + 60 * resume + second)
            see(model, 99)
        fresh = build(options)
        road(model, fresh, tmp_path / str(resume))  # type: ignore[operator]
        model = fresh
    assert rows(model) == 1


class WhatFits(DefaultLoadPlanner):
    """A planner that reads as much of each tensor as the model's has room for, as that
    of TorchEasyRec does.
    """

    def create_local_plan(self) -> LoadPlan:
        """Returns a plan without DCP's checks of sizes and keys."""
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        return LoadPlan(
            [
                item
                for key, value in self.state_dict.items()
                if key in saved
                for item in _create_read_items(key, saved[key], value)
            ]
        )


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("rows_before", [0, 5, 100])
def test_a_planner_of_ones_own_does_not_lose_rows_in_silence(
    rows_before: int, tmp_path: Path
) -> None:
    model, other = build(TableOptions()), build(TableOptions())
    see(model, *range(40))
    state = {
        "model": model.state_dict(),
        "optimizer": model.fused_optimizer.state_dict(),
    }
    dcp.save(state, checkpoint_id=tmp_path / "saved")
    see(other, *range(1000, 1000 + rows_before))
    before = models.shards(other)
    state = {
        "model": other.state_dict(),
        "optimizer": other.fused_optimizer.state_dict(),
    }
    dcp.load(state, checkpoint_id=tmp_path / "saved", planner=WhatFits())
    with pytest.raises(
        ValueError,
        match=r"'user'.* saved with 40 rows.*load_distributed_checkpoint\(model",
    ):
        other.load_state_dict(state["model"])
    with pytest.raises(
        ValueError, match=r"saved with 40 rows.*load_distributed_checkpoint\(model"
    ):
        other.fused_optimizer.load_state_dict(state["optimizer"])
    with pytest.raises(
        RuntimeError, match=r"a tensor of state_dict\(\) has been written to"
    ):
        see(other, 1)  # once, whoever goes on after the error
    models.assert_holds(other, before)
    load_distributed_checkpoint(other, tmp_path / "saved")
    models.assert_holds(other, models.shards(model))


@pytest.mark.usefixtures("one_rank")
def test_a_planner_of_ones_own_loads_into_the_same_rows(tmp_path: Path) -> None:
    model = build(TableOptions())
    see(model, *range(40))
    saved = models.shards(model)
    state = {
        "model": model.state_dict(),
        "optimizer": model.fused_optimizer.state_dict(),
    }
    dcp.save(state, checkpoint_id=tmp_path / "saved")
    see(model, *range(40))
    state = {
        "model": model.state_dict(),
        "optimizer": model.fused_optimizer.state_dict(),
    }
    dcp.load(state, checkpoint_id=tmp_path / "saved", planner=WhatFits())
    model.load_state_dict(state["model"])
    model.fused_optimizer.load_state_dict(state["optimizer"])
    models.assert_holds(model, saved)
