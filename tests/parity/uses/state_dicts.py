"""Uses of ``state_dict`` and ``load_state_dict`` of models and optimizers, in memory."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torchrec.inference.state_dict_transform import state_dict_gather
from torchrec.optim.keyed import CombinedOptimizer

from tests.checkpoint import models

from .use import (
    Models,
    carried,
    check_equal,
    common,
    dense_optimizer,
    local_tensors,
    predictions,
    train,
    use,
    weight_key,
)


@use
def state_dict_to_another_model(new: Models) -> Any:
    """`load_state_dict` of the `state_dict` of another model, and of its optimizer"""

    def carry(source: Any, target: Any) -> None:
        for of_source, of_target in zip(source, target, strict=True):
            of_target.load_state_dict(of_source.state_dict())

    return carried(new, carry)


@use
def report_of_a_strict_load(new: Models) -> Any:
    """The missing and unexpected keys that `load_state_dict` returns"""
    model = new()
    report = model.load_state_dict(new(1).state_dict())
    return [report.missing_keys, report.unexpected_keys, predictions(model)]


@use
def load_that_is_not_strict(new: Models) -> Any:
    """`load_state_dict(..., strict=False)` without a table and with an unknown key"""
    model, state = new(), dict(new(1).state_dict())
    for key in [key for key in state if key.startswith(weight_key("user"))]:
        del state[key]
    state["unknown"] = torch.zeros(1)
    report = model.load_state_dict(state, strict=False)
    return [
        common(report.missing_keys),
        common(report.unexpected_keys),
        predictions(model),
    ]


@use
def strict_load_without_a_table(new: Models) -> Any:
    """`load_state_dict` without a table raises an error that names the key"""
    model, state = new(), dict(new(1).state_dict())
    for key in [key for key in state if key.startswith(weight_key("user"))]:
        del state[key]
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        return weight_key("user") in str(error)
    return "no error"


@use
def load_with_assign(new: Models) -> Any:
    """`load_state_dict(..., assign=True)` of the module inside of
    `DistributedModelParallel`
    """
    model, other = new(), new(1)
    model.module.load_state_dict(other.module.state_dict(), assign=True)
    check_equal(predictions(model), predictions(other))


@use
def state_dict_with_prefix(new: Models) -> Any:
    """`state_dict(prefix=...)`"""
    return common(new().state_dict(prefix="model."))


@use
def state_dict_into_a_destination(new: Models) -> Any:
    """`state_dict(destination)`"""
    destination: dict[str, Any] = {}
    new().state_dict(destination)
    return common(destination)


@use
def state_dict_with_variables(new: Models) -> Any:
    """`state_dict(keep_vars=True)`"""
    model, other = new(), new(1)
    model.load_state_dict(other.state_dict(keep_vars=True))
    return predictions(model)


@use
def state_dict_of_the_inner_module(new: Models) -> Any:
    """`state_dict` and `load_state_dict` of one sharded collection inside of the model"""
    model, other = new(), new(1)
    model.module.sparse.load_state_dict(other.module.sparse.state_dict())
    return [predictions(model), common(model.module.sparse.state_dict())]


@use
def weights_of_an_unsharded_model(new: Models) -> Any:
    """`load_state_dict` of the `state_dict` of an unsharded model"""
    torch.manual_seed(5)
    whole, model = models.Model(), new()
    whole.sparse.to_empty(device="cpu")
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter)
    model.load_state_dict(whole.state_dict())
    check_equal(predictions(model), predictions(whole))


@use
def best_weights(new: Models) -> Any:
    """`copy.deepcopy(model.state_dict())` of the best epoch, loaded after the last
    epoch
    """
    model, optimizer = new.with_optimizer()
    train(model, optimizer)
    best = copy.deepcopy(model.state_dict())
    train(model, optimizer)
    model.load_state_dict(best)
    return predictions(model)


@use
def cloned_state_dict(new: Models) -> Any:
    """`{key: value.clone() for ...}` of a `state_dict`, loaded later"""
    model, optimizer = new.with_optimizer()
    kept = {key: value.clone() for key, value in model.state_dict().items()}
    train(model, optimizer)
    model.load_state_dict(kept)
    return predictions(model)


@use
def state_dict_on_the_cpu(new: Models) -> Any:
    """`{key: value.cpu() for ...}` of a `state_dict`"""
    model = new()
    model.load_state_dict(
        {key: value.cpu() for key, value in new(1).state_dict().items()}
    )
    return predictions(model)


@use
def detached_state_dict(new: Models) -> Any:
    """`{key: value.detach() for ...}` of a `state_dict`"""
    model = new()
    model.load_state_dict(
        {key: value.detach() for key, value in new(1).state_dict().items()}
    )
    return predictions(model)


@use
def writes_to_a_state_dict(new: Models) -> Any:
    """Writes to the tensors of `state_dict()`, which change the weights of the model"""
    model = new()
    with torch.no_grad():
        for value in model.state_dict().values():
            for tensor in local_tensors(value):
                tensor.mul_(2)
    return predictions(model)


@use
def combined_optimizer_with_groups(new: Models) -> Any:
    """`CombinedOptimizer.state_dict()` with `save_param_groups(True)`"""
    source, target = new.with_optimizer(), new.with_optimizer(1)
    for _, optimizer in (source, target):
        optimizer.save_param_groups(True)
    train(*source)
    train(*target, steps=1)
    for group in source[1].param_groups:
        group["lr"] = 0.05
    for of_source, of_target in zip(source, target, strict=True):
        of_target.load_state_dict(of_source.state_dict())
    train(*target, first=5)
    return [predictions(target[0]), [group["lr"] for group in target[1].param_groups]]


@use
def optimizer_state_of_a_new_model(new: Models) -> Any:
    """`fused_optimizer.load_state_dict` into a model that has not been trained"""
    source = new()
    train(source)
    target = new(1)
    target.load_state_dict(source.state_dict())
    target.fused_optimizer.load_state_dict(source.fused_optimizer.state_dict())
    train(target, first=3)
    return predictions(target)


def state_of_a_combined_optimizer(new: Models, initialize: bool) -> Any:
    source = new.with_optimizer()
    train(*source)
    target = new.with_optimizer(1)
    if initialize:
        for _, optimizer in target[1].optimizers[1:]:
            optimizer.init_state()
    for of_source, of_target in zip(source, target, strict=True):
        of_target.load_state_dict(of_source.state_dict())
    train(*target, first=3)
    return predictions(target[0])


@use
def combined_state_of_a_new_model(new: Models) -> Any:
    """`CombinedOptimizer.load_state_dict` before the first step"""
    return state_of_a_combined_optimizer(new, initialize=False)


@use
def combined_state_after_init_state(new: Models) -> Any:
    """`CombinedOptimizer.load_state_dict` after `init_state()` of the dense optimizer"""
    return state_of_a_combined_optimizer(new, initialize=True)


@use
def copied_optimizer_state(new: Models) -> Any:
    """`copy.deepcopy(optimizer.state_dict())`, loaded after further training"""
    model, optimizer = new.with_optimizer()
    train(model, optimizer)
    kept = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    train(model, optimizer)
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    train(model, optimizer, first=3)
    return predictions(model)


@use
def gathered_state(new: Models) -> Any:
    """TorchRec's `state_dict_gather` into the `state_dict` of an unsharded model"""
    model, whole = new(), models.Model()
    whole.sparse.to_empty(device="cpu")
    state = whole.state_dict()
    state_dict_gather(
        {key: value for key, value in model.state_dict().items() if key in state}, state
    )
    whole.load_state_dict(state)
    check_equal(predictions(whole), predictions(model))


@use(
    differs=(
        "a state of a RecStore table is `rows`, with the ids: call"
        " `stock_optimizer_state_dict`"
    )
)
def names_of_optimizer_states(new: Models) -> Any:
    """The names of a table's states in `fused_optimizer.state_dict()`"""
    return sorted(new().fused_optimizer.state_dict()["state"][weight_key("user")])


@use
def keys_of_an_optimizer_state(new: Models) -> Any:
    """The parameters that the `state_dict` of a `CombinedOptimizer` names"""
    model = new()
    optimizer = CombinedOptimizer(
        [("fused", model.fused_optimizer), ("dense", dense_optimizer(model))]
    )
    train(model, optimizer)
    return sorted(optimizer.state_dict()["state"])
