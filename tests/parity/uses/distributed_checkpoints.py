"""Uses of ``torch.distributed.checkpoint`` and of its functions for state dicts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torchrec.distributed.types import ShardingEnv

from tests.checkpoint import models

from .use import Models, carried, check_equal, common, predictions, train, use


def model_carried(new: Models, options: StateDictOptions | None = None) -> Any:
    """Carries the module inside of DistributedModelParallel by get_model_state_dict and
    set_model_state_dict.
    """
    model, other = new().module, new(1).module
    train(other)
    state = get_model_state_dict(other, options=options)
    keys, expected = common(state), predictions(other)
    report = set_model_state_dict(model, state, options=options)
    check_equal(predictions(model), expected)
    return [keys, list(report.missing_keys), list(report.unexpected_keys), expected]


def all_carried(new: Models, options: StateDictOptions | None = None) -> Any:
    """Carries a model and its optimizer by get_state_dict and set_state_dict."""

    def carry(source: Any, target: Any) -> None:
        model_state, optimizer_state = get_state_dict(
            source[0].module, source[1], options=options
        )
        set_state_dict(
            target[0].module,
            target[1],
            model_state_dict=model_state,
            optim_state_dict=optimizer_state,
            options=options,
        )

    return carried(new, carry)


def plain_carried(new: Models, options: StateDictOptions | None = None) -> Any:
    """As all_carried, with torch's own optimizer of the dense parameters."""
    made = []
    for seed in (0, 1):
        model = new(seed).module
        made.append((model, torch.optim.Adam(model.over.parameters(), lr=0.01)))
    source, target = made
    train(*source)
    model_state, optimizer_state = get_state_dict(*source, options=options)
    set_state_dict(
        *target,
        model_state_dict=model_state,
        optim_state_dict=optimizer_state,
        options=options,
    )
    train(*target, first=3, steps=1)
    return predictions(target[0])


@use
def get_and_set_model_state(new: Models) -> Any:
    """`get_model_state_dict` and `set_model_state_dict` of the module inside of
    `DistributedModelParallel`
    """
    return model_carried(new)


@use
def full_model_state(new: Models) -> Any:
    """`get_model_state_dict` and `set_model_state_dict` with `full_state_dict=True`"""
    return model_carried(new, StateDictOptions(full_state_dict=True))


@use
def full_model_state_on_cpu(new: Models) -> Any:
    """`get_model_state_dict` and `set_model_state_dict` with `full_state_dict=True,
    cpu_offload=True`
    """
    return model_carried(new, StateDictOptions(full_state_dict=True, cpu_offload=True))


@use
def model_state_on_cpu(new: Models) -> Any:
    """`get_model_state_dict` and `set_model_state_dict` with `cpu_offload=True`"""
    return model_carried(new, StateDictOptions(cpu_offload=True))


@use
def model_state_without_frozen(new: Models) -> Any:
    """`get_model_state_dict` with `ignore_frozen_params=True` and a frozen layer, and a
    load with `strict=False`
    """
    model, other = new().module, new(1).module
    other.over.bias.requires_grad_(False)
    options = StateDictOptions(ignore_frozen_params=True, strict=False)
    state = get_model_state_dict(other, options=options)
    keys = common(state)
    set_model_state_dict(model, state, options=options)
    return [keys, predictions(model)]


@use
def model_state_not_strict(new: Models) -> Any:
    """`set_model_state_dict` with `strict=False` of a state without a layer"""
    model, other = new().module, new(1).module
    state = get_model_state_dict(other)
    del state["over.bias"]
    report = set_model_state_dict(model, state, options=StateDictOptions(strict=False))
    return [list(report.missing_keys), list(report.unexpected_keys), predictions(model)]


@use
def full_state_into_sharded(new: Models) -> Any:
    """`set_model_state_dict` with `full_state_dict=True` of plain tensors, a row for
    each id
    """
    model = new().module
    torch.manual_seed(3)
    shapes = {key: tuple(value.size()) for key, value in model.state_dict().items()}
    state = {key: torch.randn(shapes[key]) for key in common(shapes)}
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
    return predictions(model)


@use
def broadcast_model_state(new: Models) -> Any:
    """`get_model_state_dict` and `set_model_state_dict` with `full_state_dict=True,
    broadcast_from_rank0=True`
    """
    return model_carried(
        new, StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )


@use
def state_of_a_submodule(new: Models) -> Any:
    """`get_model_state_dict` with `submodules={model.sparse}`"""
    model = new().module
    return common(get_model_state_dict(model, submodules={model.sparse}))


@use
def model_state_of_the_wrapper(new: Models) -> Any:
    """`get_model_state_dict` of the `DistributedModelParallel` itself"""
    return common(get_model_state_dict(new()))


@use
def get_and_set_state(new: Models) -> Any:
    """`get_state_dict` and `set_state_dict` of a model and its `CombinedOptimizer`"""
    return all_carried(new)


@use
def get_and_set_fused_state(new: Models) -> Any:
    """`get_optimizer_state_dict` and `set_optimizer_state_dict` of
    `model.fused_optimizer`
    """
    source, target = new(), new(1)
    train(source)
    target.load_state_dict(source.state_dict())
    state = get_optimizer_state_dict(source.module, source.fused_optimizer)
    set_optimizer_state_dict(target.module, target.fused_optimizer, state)
    train(target, first=3)
    return predictions(target)


@use
def get_and_set_dense_state(new: Models) -> Any:
    """`get_state_dict` and `set_state_dict` of a model and of torch's optimizer of its
    dense part
    """
    return plain_carried(new)


@use
def flat_optimizer_state(new: Models) -> Any:
    """`get_state_dict` and `set_state_dict` with `flatten_optimizer_state_dict=True`"""
    return plain_carried(new, StateDictOptions(flatten_optimizer_state_dict=True))


@use
def full_optimizer_state(new: Models) -> Any:
    """`get_state_dict` and `set_state_dict` with `full_state_dict=True`"""
    return plain_carried(new, StateDictOptions(full_state_dict=True))


@use
def full_optimizer_state_on_cpu(new: Models) -> Any:
    """`get_state_dict` and `set_state_dict` with `full_state_dict=True,
    cpu_offload=True`
    """
    return plain_carried(new, StateDictOptions(full_state_dict=True, cpu_offload=True))


@use
def state_of_all_parameters(new: Models) -> Any:
    """`get_state_dict` and `set_state_dict(strict=False)` with
    `torch.optim.Adam(model.parameters())`
    """
    made = [
        (model, torch.optim.Adam(model.parameters(), lr=0.01))
        for model in (new().module, new(1).module)
    ]
    source, target = made
    train(*source)
    model_state, optimizer_state = get_state_dict(*source)
    options = StateDictOptions(strict=False)
    set_state_dict(
        *target,
        model_state_dict=model_state,
        optim_state_dict=optimizer_state,
        options=options,
    )
    train(*target, first=3, steps=1)
    return predictions(target[0])


@use
def saved_and_loaded(new: Models) -> Any:
    """`dcp.save` and `dcp.load` of the `state_dict` of a model and of its optimizer"""

    def carry(source: Any, target: Any) -> None:
        dcp.save(
            {"model": source[0].state_dict(), "optimizer": source[1].state_dict()},
            checkpoint_id=new.folder / "1",
        )
        state = {"model": target[0].state_dict(), "optimizer": target[1].state_dict()}
        dcp.load(state, checkpoint_id=new.folder / "1")
        target[0].load_state_dict(state["model"])
        target[1].load_state_dict(state["optimizer"])

    return carried(new, carry)


@use
def saved_by_state_functions(new: Models) -> Any:
    """`dcp.save` and `dcp.load` of what `get_model_state_dict` returns"""
    model, other = new().module, new(1).module
    dcp.save({"model": get_model_state_dict(other)}, checkpoint_id=new.folder / "1")
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=new.folder / "1")
    set_model_state_dict(model, state["model"])
    return predictions(model)


class Training(Stateful):  # type: ignore[misc]
    """The wrapper of torch's tutorial of distributed checkpoints."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )


@use
def saved_stateful(new: Models) -> Any:
    """`dcp.save` and `dcp.load` of a `Stateful`, as in torch's tutorial, with an
    optimizer of the dense part
    """
    made = [
        (model, torch.optim.Adam(model.over.parameters()))
        for model in (new().module, new(1).module)
    ]
    train(*made[0])
    dcp.save({"app": Training(*made[0])}, checkpoint_id=new.folder / "1")
    dcp.load({"app": Training(*made[1])}, checkpoint_id=new.folder / "1")
    train(*made[1], steps=1)
    return predictions(made[1][0])


@use
def saved_in_the_background(new: Models) -> Any:
    """`dcp.async_save` with the default stager"""
    dcp.async_save(
        {"model": new(1).state_dict()}, checkpoint_id=new.folder / "1"
    ).result()
    return "saved"


@use
def saved_in_the_background_blocking(new: Models) -> Any:
    """`dcp.async_save` with `BlockingAsyncStager()`"""
    model, other = new(), new(1)
    stager = BlockingAsyncStager()
    dcp.async_save(
        {"model": other.state_dict()},
        checkpoint_id=new.folder / "1",
        async_stager=stager,
    ).result()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=new.folder / "1")
    model.load_state_dict(state["model"])
    return predictions(model)


@use
def made_a_file(new: Models) -> Any:
    """`dcp_to_torch_save` of a checkpoint, whose plain tensors are loaded"""
    model, other = new(), new(1)
    dcp.save(other.state_dict(), checkpoint_id=new.folder / "1")
    dcp_to_torch_save(new.folder / "1", new.folder / "model.pt")
    model.load_state_dict(torch.load(new.folder / "model.pt"))
    return predictions(model)


@use(
    differs=(
        "torch's error about a size mismatch, because a new RecStore table has no row:"
        " call `load_distributed_checkpoint`"
    )
)
def loaded_into_a_new_model(new: Models) -> Any:
    """`dcp.load` into the `state_dict` of a model that has not been trained"""
    dcp.save({"model": new(1).state_dict()}, checkpoint_id=new.folder / "1")
    model = new(fresh=True)
    state = {"model": model.state_dict()}
    try:
        dcp.load(state, checkpoint_id=new.folder / "1")
    except CheckpointException as error:
        if "Size mismatch between saved" not in str(error):
            raise
        return "size mismatch"
    model.load_state_dict(state["model"])
    return predictions(model)


def saved_and_loaded_by_ranks(new: Models, sharding: str) -> Any:
    def carry(source: Any, target: Any) -> None:
        path = new.folder / sharding
        dcp.save(
            {"model": source[0].state_dict(), "optimizer": source[1].state_dict()},
            checkpoint_id=path,
        )
        state = {"model": target[0].state_dict(), "optimizer": target[1].state_dict()}
        dcp.load(state, checkpoint_id=path)
        target[0].load_state_dict(state["model"])
        target[1].load_state_dict(state["optimizer"])

    return carried(new, carry, sharding)


@use(world_size=2)
def saved_by_two_ranks(new: Models) -> Any:
    """`dcp.save` and `dcp.load` on two ranks"""
    return [
        saved_and_loaded_by_ranks(new, sharding)
        for sharding in ("table_wise", "row_wise", "column_wise")
    ]


@use(world_size=2)
def other_sharding(new: Models) -> Any:
    """`dcp.save` and `dcp.load` into another sharding, on two ranks"""
    model, other = new(sharding="row_wise"), new(1, sharding="table_wise")
    dcp.save({"model": other.state_dict()}, checkpoint_id=new.folder / "1")
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=new.folder / "1")
    model.load_state_dict(state["model"])
    return predictions(model)


@use(world_size=2)
def to_one_rank(new: Models) -> Any:
    """`dcp.save` on two ranks and `dcp.load` into a model on one rank"""
    dcp.save(
        {"model": new(1, sharding="row_wise").state_dict()},
        checkpoint_id=new.folder / "1",
    )
    group = dist.new_group([0])
    if dist.get_rank():
        return None
    model = new(env=ShardingEnv.from_process_group(group))
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=new.folder / "1", process_group=group)
    model.load_state_dict(state["model"])
    return predictions(model)


def full_state_of_ranks(new: Models, sharding: str) -> Any:
    model, other = new(sharding=sharding).module, new(1, sharding=sharding).module
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(
        model, get_model_state_dict(other, options=options), options=options
    )
    check_equal(predictions(model), predictions(other))


@use(world_size=2)
def full_state_of_row_wise(new: Models) -> Any:
    """`get_model_state_dict` and `set_model_state_dict` with `full_state_dict=True`,
    row-wise on two ranks
    """
    full_state_of_ranks(new, "row_wise")


@use(world_size=2)
def full_state_of_table_wise(new: Models) -> Any:
    """`get_model_state_dict` and `set_model_state_dict` with `full_state_dict=True`,
    table-wise on two ranks
    """
    full_state_of_ranks(new, "table_wise")


@use(world_size=2)
def full_state_broadcast(new: Models) -> Any:
    """`set_model_state_dict` of an unsharded model's state, with
    `broadcast_from_rank0=True`, row-wise on two ranks
    """
    torch.manual_seed(5)
    whole, model = models.Model(), new(sharding="row_wise").module
    whole.sparse.to_empty(device="cpu")
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(5))
    state = whole.state_dict() if dist.get_rank() == 0 else {}
    set_model_state_dict(
        model,
        state,
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    check_equal(predictions(model), predictions(whole))


@use(world_size=2)
def saved_files_of_two_ranks(new: Models) -> Any:
    """`torch.save` and `torch.load` of each rank's `state_dict`, on two ranks"""

    def carry(source: Any, target: Any) -> None:
        path = new.folder / f"{dist.get_rank()}.pt"
        torch.save([each.state_dict() for each in source], path)
        for each, state in zip(
            target, torch.load(path, weights_only=False), strict=True
        ):
            each.load_state_dict(state)

    return carried(new, carry, "row_wise")
