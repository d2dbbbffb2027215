"""The functions of torch.distributed.checkpoint.state_dict, whole and sharded, carry
the rows or name what to call.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

from tests.distributed.workers import run_on_ranks
from tests.sharders.models import batch, sequence, sequences, sharded, tables
from torchrec_recstore.sharders import layout

from . import models

FULL = StateDictOptions(full_state_dict=True)
REFUSED = (
    r"RecStore table 'user': full_state_dict=True gathers .*: save"
    r" .*load_distributed_checkpoint\(model, "
)


def trained(**more: Any) -> Any:
    model = models.recstore(**more)
    models.train(model)
    return model


@pytest.mark.parametrize(
    "options", [StateDictOptions(), FULL, StateDictOptions(cpu_offload=True)]
)
def test_rows_of_any_ids_are_carried(one_rank: None, options: StateDictOptions) -> None:
    model, other = trained(), models.recstore()
    state = get_model_state_dict(model.module, options=options)
    assert (
        isinstance(state["sparse.embedding_bags.user.weight"], layout.RowTensor)
        != options.full_state_dict
    )
    set_model_state_dict(other.module, state, options=options)
    for (_, _, ids, rows), (_, _, loaded, loaded_rows) in zip(
        models.shards(model), models.shards(other), strict=True
    ):
        assert torch.equal(ids, loaded)
        assert torch.equal(rows["weight"], loaded_rows["weight"])


def test_sequences(one_rank: None) -> None:
    model, other = (sharded(sequences(sequence("t", ["f"]))) for _ in range(2))
    model(batch(f=[[2**50, -1]]))["f"].values().sum().backward()
    set_model_state_dict(
        other.module, get_model_state_dict(model.module, options=FULL), options=FULL
    )
    ids = torch.tensor([-1, 2**50])
    assert torch.equal(tables(model)["t"].lookup(ids), tables(other)["t"].lookup(ids))
    assert tables(other)["t"].ids().tolist() == ids.tolist()


def test_no_rows_and_rows_in_pieces_are_not_gathered(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ZeroDivisionError):  # torch's own
        get_model_state_dict(models.recstore().module, options=FULL)
    monkeypatch.setattr(layout, "PIECE_ROWS", 8)
    with pytest.raises(ValueError, match=REFUSED):
        get_model_state_dict(trained().module, options=FULL)


def test_all_but_flatten_works_on_the_first_of_several_shards(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "PIECE_ROWS", 8)
    weight = trained().state_dict()["sparse.embedding_bags.user.weight"]
    first, second, *_ = (shard.tensor for shard in weight.local_shards())
    for flatten in (torch.flatten, torch.Tensor.flatten):
        with pytest.raises(ValueError, match=REFUSED):
            flatten(first)
    assert second.flatten().shape == (8 * models.DIM,)
    assert type(first.reshape(-1)) is type(torch.cat([first, second])) is torch.Tensor
    pickled_shards, _ = weight.__reduce_ex__(4)[1]
    assert type(pickled_shards[0].tensor) is torch.Tensor


def copied_on_every_rank(rank: int, world_size: int) -> None:
    layout.PIECE_ROWS = 8  # several shards on each rank
    model = trained(sharding_type="row_wise")
    for state in (model.state_dict(), model.fused_optimizer.state_dict()):
        copied = copy.deepcopy(state)
        assert copied.keys() == state.keys()
    key = "sparse.embedding_bags.user.weight"
    original, copied_weight = model.state_dict()[key], copy.deepcopy(model.state_dict())
    rows = [shard.tensor for shard in original.local_shards()]
    copies = [shard.tensor for shard in copied_weight[key].local_shards()]
    for row, row_copy in zip(rows, copies, strict=True):
        assert torch.equal(row, row_copy)
    dist.destroy_process_group()
    assert len(original.local_shards()) == len(rows)
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1
    )  # run_on_ranks destroys it


def test_states_on_two_ranks_are_copied() -> None:
    run_on_ranks(2, copied_on_every_rank)


def refused_on_every_rank(rank: int, world_size: int) -> None:
    model = trained(sharding_type="row_wise")
    with pytest.raises(ValueError, match=REFUSED):
        get_model_state_dict(model.module, options=FULL)
    before = models.shards(model)
    weights, key = torch.ones(3, models.DIM), "sparse.embedding_bags.user.weight"
    whole = {key: weights, f"{key}_id": torch.tensor([7, 2**40, -1])}
    options = StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True, strict=False
    )
    with pytest.raises(ValueError, match="ranks load other entries of RecStore tables"):
        set_model_state_dict(model.module, whole if rank == 0 else {}, options=options)
    models.assert_holds(model, before)


def test_two_ranks() -> None:
    run_on_ranks(2, refused_on_every_rank)


def test_a_load_into_another_number_of_rows_is_refused(
    one_rank: None, tmp_path: Path
) -> None:
    model, other = trained(), models.recstore()
    saved = {
        "model": model.state_dict(),
        "optimizer": model.fused_optimizer.state_dict(),
    }
    dcp.save(saved, checkpoint_id=tmp_path / "1")
    dcp.load(saved, checkpoint_id=tmp_path / "1")
    for state in (
        {"model": other.state_dict()},
        {"optimizer": other.fused_optimizer.state_dict()},
    ):
        with pytest.raises(CheckpointException) as raised:
            dcp.load(state, checkpoint_id=tmp_path / "1")
        ((error, _),) = raised.value.failures.values()
        assert "Size mismatch between saved" in str(error)  # torch's own
