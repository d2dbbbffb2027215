"""States with RecStore tables are loaded by load planners that check neither keys nor
sizes.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torchrec import EmbeddingBagCollection
from torchrec.distributed import DistributedModelParallel

from tests.distributed.workers import run_on_ranks
from torchrec_recstore import MinFrequency, TableOptions, load_distributed_state

from . import models
from .test_forgotten import WhatFits

ADAGRAD = EmbOptimType.EXACT_ADAGRAD
ITEM = "sparse.embedding_bags.item.weight"


def save(model: DistributedModelParallel, path: Path) -> None:
    """Saves the model and its optimizer in a folder each."""
    dcp.save(model.state_dict(), checkpoint_id=path / "model")
    dcp.save(model.fused_optimizer.state_dict(), checkpoint_id=path / "optimizer")


def restore(model: DistributedModelParallel, path: Path) -> None:
    for module, name in ((model, "model"), (model.fused_optimizer, "optimizer")):
        state: dict[str, Any] = module.state_dict()
        load_distributed_state(state, checkpoint_id=path / name, planner=WhatFits())
        module.load_state_dict(state)


def saves(rank: int, world_size: int, *, path: Path) -> None:
    model = models.recstore("row_wise", ADAGRAD)
    models.train(model)
    models.write_down(model, path)
    save(model, path)


def loads(rank: int, world_size: int, *, path: Path, sharding: str) -> None:
    model = models.recstore(sharding, ADAGRAD)
    models.train(model, steps=1, distinct=30)
    restore(model, path)
    expected, held = models.whole_tables(path), 0
    for name, columns, ids, rows in models.shards(model):
        held += len(ids) * (columns.start == 0)
        for i, identity in enumerate(ids.tolist()):
            row = expected[name][identity]
            for key, of_row in (("weight", "weight"), ("sum", "state")):
                assert torch.equal(
                    rows[key][i], row[of_row][columns.start : columns.stop]
                )
            assert all(
                torch.equal(rows[key][i], row[key])
                for key in ("last_step", "frequency")
            )
    everywhere = torch.tensor(held)
    torch.distributed.all_reduce(everywhere)
    assert everywhere == sum(map(len, expected.values()))
    models.train(model, steps=1)


@pytest.mark.slow
def test_any_world_size(one_rank: None, tmp_path: Path) -> None:
    run_on_ranks(2, partial(saves, path=tmp_path))
    loads(0, 1, path=tmp_path, sharding="table_wise")
    run_on_ranks(2, partial(loads, path=tmp_path, sharding="column_wise"))


def test_one_dict_with_both(one_rank: None, tmp_path: Path) -> None:
    """The keys of a dict within the state are those that a checkpoint has with dots."""
    options = TableOptions(admission=MinFrequency(2))
    model, other = models.recstore(options=options), models.recstore()
    models.train(model)
    state = {
        "model": model.state_dict(),
        "optim": {"fused": model.fused_optimizer.state_dict()},
        "step": 7,
    }
    dcp.save(state, checkpoint_id=tmp_path)
    models.train(other, steps=1, distinct=30)
    state = {
        "model": other.state_dict(),
        "optim": {"fused": other.fused_optimizer.state_dict()},
        "step": 0,
    }
    load_distributed_state(
        state, checkpoint_id=tmp_path, storage_reader=FileSystemReader(tmp_path)
    )
    other.load_state_dict(state["model"])
    other.fused_optimizer.load_state_dict(state["optim"]["fused"])
    models.assert_holds(other, models.shards(model))
    assert state["step"] == 7


def test_a_table_that_the_checkpoint_lacks_stays(
    one_rank: None, tmp_path: Path
) -> None:
    model = models.recstore()
    models.train(model)
    batch = models.batch(3)
    before = model.eval()(batch)
    dcp.save({"over.bias": torch.ones(1)}, checkpoint_id=tmp_path / "model")
    dcp.save({"other": torch.ones(1)}, checkpoint_id=tmp_path / "optimizer")
    change = 1 - model.module.over.bias.detach()
    restore(model, tmp_path)
    torch.testing.assert_close(model(batch), before + change)


def of_stock_tables(path: Path) -> tuple[DistributedModelParallel, Tensor]:
    """A model with stock tables that is saved in a checkpoint, and its result for a
    batch.
    """
    stock = models.stock()
    models.train(stock, low=0, high=100)
    save(stock, path)
    return stock, stock.eval()(models.batch(3, low=0, high=100))


def test_rows_of_stock_tables(one_rank: None, tmp_path: Path) -> None:
    _, expected = of_stock_tables(tmp_path)
    model = models.recstore()
    models.train(model, steps=1)
    restore(model, tmp_path)
    assert [len(ids) for _, _, ids, _ in models.shards(model)] == [100, 100]
    assert torch.equal(model.eval()(models.batch(3, low=0, high=100)), expected)


@pytest.mark.parametrize("sharded", [False, True])
def test_rows_for_stock_tables(sharded: bool, one_rank: None, tmp_path: Path) -> None:
    """Also an export: it loads into the unsharded model, and an id without a row reads
    as zeros there.
    """
    model = models.recstore()
    models.train(model, low=0, high=100, distinct=30)
    save(model, tmp_path)
    if sharded:
        loaded: Any = models.stock()
    else:
        loaded = models.Model()
        loaded.sparse = EmbeddingBagCollection(loaded.sparse.embedding_bag_configs())
    state = loaded.state_dict()
    load_distributed_state(state, checkpoint_id=tmp_path / "model", planner=WhatFits())
    loaded.load_state_dict(state)
    for seed in range(3):
        batch = models.batch(seed, low=0, high=100, distinct=60)
        torch.testing.assert_close(
            loaded.eval()(batch), model.eval()(batch), atol=1e-6, rtol=1e-6
        )


def test_ids_outside_of_a_stock_table(one_rank: None, tmp_path: Path) -> None:
    model = models.recstore()
    models.train(model)
    save(model, tmp_path)
    state = models.stock().state_dict()
    before = state[ITEM].local_shards()[0].tensor.clone()
    with pytest.raises(
        ValueError,
        match=(
            rf"{ITEM}: the checkpoint has \d+ ids outside \[0, 100\), and row i is id i"
        ),
    ):
        load_distributed_state(
            state, checkpoint_id=tmp_path / "model", planner=WhatFits()
        )
    assert torch.equal(state[ITEM].local_shards()[0].tensor, before)
