"""A reshard that fails while rows move fails on every rank, and the model cannot be
used afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest
from torchrec.distributed import DistributedModelParallel

from tests.checkpoint import models
from torchrec_recstore import export_dense_weights, reshard, save_checkpoint
from torchrec_recstore.sharders import plan_change
from torchrec_recstore.store import Part, Table

from .workers import run_on_ranks

LOST = "have lost rows, because a reshard failed"


def assert_unusable(model: DistributedModelParallel, path: Path) -> None:
    """Checks that the model neither trains nor predicts, nor is saved or resharded, and
    names the reason.
    """
    uses: list[Callable[[], object]] = [
        lambda: models.train(model, steps=1),
        lambda: model.eval()(models.batch(1)),
        lambda: model.state_dict(),
        lambda: model.fused_optimizer.state_dict(),
        lambda: save_checkpoint(model, path / "checkpoint"),
        lambda: export_dense_weights(model, "user", 3),
        lambda: reshard(model, model.plan),
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match=LOST):
            use()


def no_memory_on_one_rank(rank: int, world_size: int, *, path: str) -> None:
    model, other = models.recstore("table_wise"), models.recstore("row_wise")
    models.train(model)
    plan_change._MESSAGE_BYTES = 1  # type: ignore[attr-defined]  # one row a round, so that rows have moved before the error
    write, calls = Table.write, []

    def failing(table: Table, part: Part) -> None:
        calls.append(len(part))
        if rank == 1 and len(calls) == 5:
            raise MemoryError("no memory on rank 1")
        write(table, part)

    Table.write = failing  # type: ignore[method-assign]
    with pytest.raises(MemoryError, match="no memory on rank 1"):
        reshard(model, other.plan)
    with pytest.raises(
        RuntimeError,
        match=f"{LOST} with MemoryError: no memory on rank 1: start the job again",
    ):
        model(models.batch(1))
    assert_unusable(model, Path(path))


def a_rank_dies(rank: int, world_size: int, *, path: str) -> None:
    model, other = models.recstore("table_wise"), models.recstore("row_wise")
    models.train(model)
    plan_change._MESSAGE_BYTES = 1  # type: ignore[attr-defined]
    write, calls = Table.write, []

    def dying(table: Table, part: Part) -> None:
        calls.append(len(part))
        if rank == world_size - 1 and len(calls) == 3:
            # As SIGKILL does, but the runner of these tests accepts only the status 0.
            os._exit(0)
        write(table, part)

    Table.write = dying  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="a rank of the job has died"):
        reshard(model, other.plan)
    with pytest.raises(
        RuntimeError, match=f"{LOST} with RuntimeError: a rank of the job has died"
    ):
        model(models.batch(1))
    leave()


def leave() -> NoReturn:
    """Ends the process without the runner's barrier, for which a rank is missing."""
    os._exit(0)


@pytest.mark.slow
def test_an_error_on_one_rank_stops_all(tmp_path: Path) -> None:
    run_on_ranks(2, partial(no_memory_on_one_rank, path=str(tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_other_ranks_raise_when_one_dies(tmp_path: Path, world_size: int) -> None:
    run_on_ranks(world_size, partial(a_rank_dies, path=str(tmp_path)))
