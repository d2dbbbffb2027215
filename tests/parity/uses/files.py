"""Uses of ``torch.save``, ``torch.load``, ``pickle`` and safetensors with the state of
a model and of its optimizer.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from .use import Models, carried, local_tensors, predictions, train, use


def through_file(new: Models, **load: Any) -> Any:
    """Carries the states of a model and its optimizer by torch.save, and by torch.load
    with these arguments.
    """

    def carry(source: Any, target: Any) -> None:
        path = new.folder / "state.pt"
        torch.save(
            {"model": source[0].state_dict(), "optimizer": source[1].state_dict()}, path
        )
        state = torch.load(path, **load)
        target[0].load_state_dict(state["model"])
        target[1].load_state_dict(state["optimizer"])

    return carried(new, carry)


@use
def saved_state(new: Models) -> Any:
    """`torch.save` and `torch.load(..., weights_only=False)` of the `state_dict` of a
    model and of its optimizer
    """
    return through_file(new, weights_only=False)


@use
def saved_state_of_a_new_model(new: Models) -> Any:
    """`torch.load(..., weights_only=False)` of both states in a model that has not been
    trained
    """
    source = new()
    train(source)
    path = new.folder / "state.pt"
    torch.save([source.state_dict(), source.fused_optimizer.state_dict()], path)
    target = new(fresh=True)
    for each, state in zip(
        (target, target.fused_optimizer),
        torch.load(path, weights_only=False),
        strict=True,
    ):
        each.load_state_dict(state)
    train(target, first=3)
    return predictions(target)


@use
def saved_state_weights_only(new: Models) -> Any:
    """`torch.save` and `torch.load(...)` of both states, where `weights_only=True` is
    the default
    """
    return through_file(new)


@use
def saved_state_location_name(new: Models) -> Any:
    """`torch.load(..., weights_only=False, map_location="cpu")` of both states"""
    return through_file(new, weights_only=False, map_location="cpu")


@use
def saved_state_location_device(new: Models) -> Any:
    """`torch.load(..., weights_only=False, map_location=torch.device("cpu"))` of both
    states
    """
    return through_file(new, weights_only=False, map_location=torch.device("cpu"))


@use
def saved_state_location_dict(new: Models) -> Any:
    """`torch.load(..., weights_only=False, map_location={"cuda:0": "cpu"})` of both
    states
    """
    return through_file(new, weights_only=False, map_location={"cuda:0": "cpu"})


@use
def saved_state_location_function(new: Models) -> Any:
    """`torch.load(..., weights_only=False, map_location=lambda storage, location:
    storage)` of both states
    """
    location: Callable[[Any, str], Any] = lambda storage, location: storage  # noqa: E731
    return through_file(new, weights_only=False, map_location=location)


@use
def saved_state_mapped(new: Models) -> Any:
    """`torch.load(..., weights_only=False, mmap=True)` of both states"""
    return through_file(new, weights_only=False, mmap=True)


@use
def pickled_state(new: Models) -> Any:
    """`pickle.dumps` of the states of a model and its optimizer"""

    def carry(source: Any, target: Any) -> None:
        state = pickle.loads(pickle.dumps([each.state_dict() for each in source]))
        for each, of_each in zip(target, state, strict=True):
            each.load_state_dict(of_each)

    return carried(new, carry)


@use
def saved_optimizer_state(new: Models) -> Any:
    """`torch.save` of `fused_optimizer.state_dict()` alone"""
    model = new()
    train(model)
    path = new.folder / "optimizer.pt"
    torch.save(model.fused_optimizer.state_dict(), path)
    train(model, steps=1, first=5)
    model.fused_optimizer.load_state_dict(torch.load(path, weights_only=False))
    train(model, first=3)
    return predictions(model)


@use
def saved_as_safetensors(new: Models) -> Any:
    """`safetensors.torch.save_file` of a `state_dict`"""
    model, path = new(), new.folder / "model.safetensors"
    save_file(new(1).state_dict(), path)
    model.load_state_dict(load_file(path))
    return predictions(model)


@use
def local_shards_as_safetensors(new: Models) -> Any:
    """`safetensors.torch.save_file` of the local shards of a `state_dict`"""
    state, path = new(1).state_dict(), new.folder / "model.safetensors"
    local = {key: local_tensors(value)[0] for key, value in state.items()}
    save_file(local, path)
    model = new()
    model.load_state_dict(load_file(path))
    return predictions(model)
