"""Uses that copy or pickle whole models, and averages of models."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

from .use import Models, common, local_tensors, predictions, train, use


@use
def deep_copy(new: Models) -> Any:
    """`copy.deepcopy(model)`"""
    model = new()
    copied = copy.deepcopy(model)
    train(model)
    return predictions(copied)


@use
def deep_copy_of_the_inside(new: Models) -> Any:
    """`copy.deepcopy(model.module)`"""
    model = new()
    copied = copy.deepcopy(model.module)
    train(model)
    return predictions(copied)


@use
def deep_copy_of_the_dense_part(new: Models) -> Any:
    """`copy.deepcopy(model.module.over)`, a layer beside the tables"""
    return copy.deepcopy(new().module.over).weight


@use
def pickled_model(new: Models) -> Any:
    """`pickle.dumps(model)`"""
    return predictions(pickle.loads(pickle.dumps(new())))


@use
def saved_model(new: Models) -> Any:
    """`torch.save(model)`"""
    file = io.BytesIO()
    torch.save(new(), file)
    file.seek(0)
    return predictions(torch.load(file, weights_only=False))


@use
def averaged_model(new: Models) -> Any:
    """`torch.optim.swa_utils.AveragedModel(model)`"""
    model = new()
    averaged = AveragedModel(model)
    train(model)
    averaged.update_parameters(model)
    return predictions(averaged)


@use
def averaged_dense_part(new: Models) -> Any:
    """`AveragedModel` of the dense part"""
    model, optimizer = new.with_optimizer()
    averaged = AveragedModel(model.module.over)
    for step in range(3):
        train(model, optimizer, steps=1, first=step)
        averaged.update_parameters(model.module.over)
    return averaged.module.weight


@use
def average_by_hand(new: Models) -> Any:
    """A moving average of all `named_parameters()`, copied into the model"""
    model, optimizer = new.with_optimizer()
    averages = {
        name: parameter.detach().clone() for name, parameter in model.named_parameters()
    }
    train(model, optimizer)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            averages[name].lerp_(parameter, 0.1)
        for name, parameter in model.named_parameters():
            parameter.copy_(averages[name])
    return predictions(model)


@use
def average_of_state_dicts(new: Models) -> Any:
    """The mean of the tensors of two `state_dict`s, loaded"""
    model, state, other = new(), new(1).state_dict(), new(2).state_dict()
    with torch.no_grad():
        for key in common(state):
            for ours, theirs in zip(
                local_tensors(state[key]), local_tensors(other[key]), strict=True
            ):
                ours.lerp_(theirs, 0.5)
    model.load_state_dict(state)
    return predictions(model)
