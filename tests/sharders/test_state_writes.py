"""Writes to the tensors that represent rows in a model's state: they work, or the error
names a function to use.
"""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.inference.state_dict_transform import state_dict_gather

from tests.checkpoint import models
from tests.distributed.workers import run_on_ranks
from torchrec_recstore import (
    export_dense_weights,
    load_checkpoint,
    load_dense_weights,
    load_distributed_checkpoint,
    save_checkpoint,
)
from torchrec_recstore.inference import export_for_inference
from torchrec_recstore.table_parameter import TableParameter

USER = "sparse.embedding_bags.user.weight"
ITEM = "sparse.embedding_bags.item.weight"
COPY = (
    r"table 'user': a tensor of state_dict\(\) has been written"
    r" to.*load_state_dict.*load_dense_weights"
)


def trained() -> DistributedModelParallel:
    model = models.recstore()
    models.train(model)
    return model


def fill(state: dict[str, Any], key: str = USER, value: float = 7.0) -> None:
    for shard in state[key].local_shards():
        shard.tensor[1:].fill_(value)


@pytest.mark.parametrize(
    "use",
    [
        lambda model, path: model(models.batch(1)),
        lambda model, path: model.eval()(models.batch(1)),
        lambda model, path: model.state_dict(),
        lambda model, path: save_checkpoint(model, path),
        lambda model, path: export_dense_weights(model, "user", 3),
        lambda model, path: export_for_inference(model),
    ],
)
def test_a_write_to_a_copy_is_told_at_the_next_use(
    one_rank: None, tmp_path: Path, use: Callable[[DistributedModelParallel, Path], Any]
) -> None:
    model = trained()
    before = models.shards(model)
    fill(model.state_dict())  # The tensors of this state are freed at once.
    with pytest.raises(RuntimeError, match=COPY):
        use(model, tmp_path / "saved")
    models.assert_holds(model, before)
    # The error has been raised once and is not raised again.
    use(model, tmp_path / "saved")


def test_copies_of_empty_tables_and_of_optimizer_state(one_rank: None) -> None:
    model = models.recstore()
    for shard in model.state_dict()[USER].local_shards():
        # TorchRec's copy_state_dict does the same.
        shard.tensor.copy_(torch.zeros(100, models.DIM)[: len(shard.tensor)])
    with pytest.raises(RuntimeError, match=COPY):
        model(models.batch(1))
    models.train(model)
    states = model.fused_optimizer.state_dict()
    states["state"][ITEM]["rows"]["sum"].local_shards()[0].tensor.zero_()
    with pytest.raises(
        RuntimeError,
        match=r"'item': a tensor of fused_optimizer\.state_dict\(\).*load_state_dict",
    ):
        model(models.batch(1))


def test_what_is_written_and_loaded_is_there(one_rank: None, tmp_path: Path) -> None:
    model = trained()
    state, states = model.state_dict(), model.fused_optimizer.state_dict()
    before = models.shards(model)
    dcp.save({"model": state, "optimizer": states}, checkpoint_id=tmp_path / "saved")
    models.train(model, steps=1)
    again = {
        "model": model.state_dict(),
        "optimizer": model.fused_optimizer.state_dict(),
    }
    dcp.load(again, checkpoint_id=tmp_path / "saved")  # in place
    model.load_state_dict(again["model"])
    model.fused_optimizer.load_state_dict(again["optimizer"])
    models.train(model, steps=1)
    fill(state)
    model.load_state_dict(state)
    models.train(model, steps=1)
    for load in (
        lambda: load_distributed_checkpoint(model, tmp_path / "saved"),
        lambda: load_dense_weights(model, {"user": torch.ones(3, models.DIM)}),
    ):
        fill(model.state_dict())
        load()
        models.train(model, steps=1)
    save_checkpoint(model, tmp_path / "own")
    fill(model.state_dict())
    load_checkpoint(model, tmp_path / "own")
    load_distributed_checkpoint(model, tmp_path / "saved")
    models.assert_holds(model, before)


def test_what_a_state_is_used_for_is_no_write(one_rank: None, tmp_path: Path) -> None:
    model = trained()
    state = {
        "model": model.state_dict(),
        "optimizer": model.fused_optimizer.state_dict(),
    }
    copied = copy.deepcopy(state["model"])
    fill(copied)
    fill({USER: state["model"][USER].clone()})
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    fill(loaded["model"])
    assert type(loaded["model"][USER]).__module__.startswith("torch.")
    state["model"][USER].local_shards()[0].tensor.numpy()
    dcp.save(state, checkpoint_id=tmp_path / "saved")
    model(models.batch(1))
    copies = model.module.sparse.recstore_state.copies
    assert copies._copies
    del state
    gc.collect()
    model(models.batch(1))
    assert not copies._copies


def init_weights(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.data.uniform_(-1, 1)


WRITES: list[Callable[[nn.Parameter], Any]] = [
    lambda p: p.data.uniform_(-1, 1),
    lambda p: p.data.copy_(torch.zeros(5, models.DIM)),
    lambda p: p.data.mul_(0.9).add_(1),
    lambda p: p.data.__setitem__(slice(None), 1.0),
    lambda p: p.detach().zero_(),
    lambda p: setattr(p, "data", torch.zeros(5, models.DIM)),
    nn.init.normal_,
    nn.init.xavier_uniform_,
    nn.init.trunc_normal_,
    nn.init.zeros_,
]


def test_parameters_of_tables_refuse_to_be_written(one_rank: None) -> None:
    model = trained()
    before = models.shards(model)
    with pytest.raises(
        RuntimeError,
        match=(
            r"table 'user': uniform_ would.*TableOptions\(initializer.*load_dense_wei"
        ),
    ):
        model.apply(init_weights)
    for write in WRITES:
        parameter = model.module.sparse.embedding_bags["item"].weight
        with pytest.raises(
            RuntimeError, match=r"table 'item': \w+ would change no row"
        ):
            write(parameter)
        with torch.no_grad(), pytest.raises(RuntimeError, match="table 'item'"):
            write(parameter)
    models.assert_holds(model, before)


READS: list[Callable[[nn.Parameter], Any]] = [
    lambda p: p[3],
    lambda p: p.data[:, 0],
    lambda p: p.square().sum(),
    lambda p: p**2,
    lambda p: p.norm(),
    lambda p: p.detach().abs().mean(),
    lambda p: p.pow(2),
    lambda p: p.detach().cpu().numpy(),
]


def test_parameters_of_tables_refuse_to_be_read(one_rank: None) -> None:
    parameter = trained().module.sparse.embedding_bags["item"].weight
    for read in READS:
        with pytest.raises(
            RuntimeError,
            match=r"table 'item': \w+ would read no row.*export_dense_weights",
        ):
            read(parameter)
    assert repr(parameter).startswith("Parameter")


def test_parameters_of_tables_are_parameters(one_rank: None) -> None:
    model = trained()
    parameters = dict(model.named_parameters())
    assert parameters[USER].shape == (0, models.DIM)
    model.to(torch.float64).to(torch.float32).requires_grad_(True).zero_grad()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    models.train(model, steps=1)
    optimizer.step()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert isinstance(copy.deepcopy(parameters[USER]), TableParameter)
    buffer = io.BytesIO()
    torch.save(parameters[USER].data, buffer)
    buffer.seek(0)
    assert type(torch.load(buffer, weights_only=True)) is Tensor
    assert isinstance(parameters[USER], TableParameter)


def gathers(rank: int, world_size: int) -> None:
    for sharding, routing in (
        ("row_wise", "hash"),
        ("column_wise", "block"),
        ("table_wise", "block"),
    ):
        model = models.recstore(sharding, routing=routing)  # type: ignore[arg-type]
        torch.manual_seed(1)  # the same on every rank
        weights = {name: torch.randn(100, models.DIM) for name in models.TABLES}
        load_dense_weights(model, weights)
        unsharded = {key: torch.full((100, models.DIM), 9.0) for key in (USER, ITEM)}
        unsharded["over.bias"] = torch.zeros(1)
        state_dict_gather(model.state_dict(), unsharded)
        if rank == 0:
            assert torch.equal(unsharded[USER], weights["user"])
            assert torch.equal(unsharded[ITEM], weights["item"])
        assert torch.equal(unsharded["over.bias"], model.module.over.bias)
        larger = {USER: torch.full((120, models.DIM), 9.0)}
        state_dict_gather(model.state_dict(), larger)
        if rank == 0:
            assert torch.equal(larger[USER][:100], weights["user"])
            assert larger[USER][100:].count_nonzero() == 0
        smaller = {USER: torch.full((99, models.DIM), 9.0)}
        with pytest.raises(
            ValueError,
            match=r"table 'user' has 1 ids outside \[0, 99\).*stock_state_dict",
        ):
            state_dict_gather(model.state_dict(), smaller)
        assert bool((smaller[USER] == 9).all())
        with pytest.raises(
            ValueError,
            match=r"table 'user': out must have the shape \(rows, 8\), got \(100, 3\)",
        ):
            state_dict_gather(model.state_dict(), {USER: torch.zeros(100, 3)})
    empty = models.recstore("row_wise")
    unsharded = {USER: torch.full((100, models.DIM), 9.0)}
    state_dict_gather(empty.state_dict(), unsharded)
    assert rank != 0 or unsharded[USER].count_nonzero() == 0
    # One rank writes to a copy, and all ranks raise the error.
    state = empty.state_dict()
    models.train(empty)
    state = empty.state_dict()
    if rank == 1:
        fill(state)
    with pytest.raises(RuntimeError, match=COPY):
        empty.state_dict()
    dist.barrier()


def test_gather_one_rank(one_rank: None) -> None:
    model = trained()
    gathered = {USER: torch.zeros(100, models.DIM)}
    with pytest.raises(
        ValueError, match=r"table 'user' has \d+ ids outside \[0, 100\)"
    ):
        state_dict_gather(model.state_dict(), gathered)
    assert gathered[USER].count_nonzero() == 0


def test_gather_two_ranks() -> None:
    run_on_ranks(2, gathers)
