"""Uses of learning rates, schedules and TorchRec's optimizers around optimizers."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)
from torch.optim.swa_utils import SWALR
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from .use import Models, dense_optimizer, loss_of, predictions, train, use


def scheduled(new: Models, make: Any, combined: bool = False, **step: Any) -> Any:
    """Trains with a schedule of the fused optimizer, or of all optimizers."""
    model, optimizer = new.with_optimizer()
    schedule = make(optimizer if combined else model.fused_optimizer)
    rates = []
    for number in range(4):
        train(model, optimizer, steps=1, first=number)
        schedule.step(**step)
        rates.append(next(group["lr"] for group in model.fused_optimizer.param_groups))
    return [
        rates,
        predictions(model),
        json.dumps(sorted(schedule.state_dict()), default=str),
    ]


@use
def optimizer_in_backward(new: Models) -> Any:
    """`apply_optimizer_in_backward(RowWiseAdagrad, ...)` before sharding"""

    def prepare(whole: Any) -> None:
        apply_optimizer_in_backward(
            RowWiseAdagrad, whole.sparse.parameters(), {"lr": 0.02}
        )

    model = new(prepare=prepare)
    train(model, CombinedOptimizer([model.fused_optimizer, dense_optimizer(model)]))
    return [
        predictions(model),
        [group["lr"] for group in model.fused_optimizer.param_groups],
    ]


@use
def step_schedule(new: Models) -> Any:
    """`StepLR(model.fused_optimizer, ...)`"""
    return scheduled(new, lambda optimizer: StepLR(optimizer, step_size=1, gamma=0.5))


@use
def cosine_schedule(new: Models) -> Any:
    """`CosineAnnealingLR(model.fused_optimizer, ...)`"""
    return scheduled(new, lambda optimizer: CosineAnnealingLR(optimizer, T_max=4))


@use
def lambda_schedule_of_all(new: Models) -> Any:
    """`LambdaLR` of a `CombinedOptimizer`"""
    return scheduled(
        new,
        lambda optimizer: LambdaLR(optimizer, lambda step: 0.5**step),
        combined=True,
    )


@use
def plateau_schedule(new: Models) -> Any:
    """`ReduceLROnPlateau(model.fused_optimizer)`"""
    return scheduled(
        new, lambda optimizer: ReduceLROnPlateau(optimizer, patience=0), metrics=1.0
    )


@use
def averaging_schedule(new: Models) -> Any:
    """`torch.optim.swa_utils.SWALR(model.fused_optimizer)`"""
    return scheduled(
        new, lambda optimizer: SWALR(optimizer, swa_lr=0.01, anneal_epochs=2)
    )


@use
def cycle_schedule(new: Models) -> Any:
    """`OneCycleLR(model.fused_optimizer, ...)`"""
    return scheduled(
        new, lambda o: OneCycleLR(o, max_lr=0.5, total_steps=6, cycle_momentum=False)
    )


@use
def resumed_schedule(new: Models) -> Any:
    """The `state_dict` of a schedule, loaded with those of the model and its optimizer"""
    found = []
    for seed in (0, 1):
        model, optimizer = new.with_optimizer(seed)
        found.append(
            (model, optimizer, StepLR(model.fused_optimizer, step_size=1, gamma=0.5))
        )
    for step in range(2):
        train(*found[0][:2], steps=1, first=step)
        found[0][2].step()
    train(*found[1][:2], steps=1)
    for source, target in zip(found[0], found[1], strict=True):
        target.load_state_dict(source.state_dict())
    train(*found[1][:2], first=2)
    found[1][2].step()
    return [predictions(found[1][0]), found[1][2].get_last_lr()]


@use
def edited_rate(new: Models) -> Any:
    """`group["lr"] = ...` of `model.fused_optimizer.param_groups`"""
    model, optimizer = new.with_optimizer()
    for step, rate in enumerate((0.5, 0.0, 0.01)):
        for group in model.fused_optimizer.param_groups:
            group["lr"] = rate
        train(model, optimizer, steps=1, first=step)
    return predictions(model)


@use
def warmed_up(new: Models) -> Any:
    """`WarmupOptimizer` around a `CombinedOptimizer`"""
    model, optimizer = new.with_optimizer()
    stages = [
        WarmupStage(WarmupPolicy.LINEAR, max_iters=3, value=0.1),
        WarmupStage(WarmupPolicy.POLY, max_iters=4),
    ]
    warm = WarmupOptimizer(optimizer, stages, lr=0.2)
    train(model, warm, steps=5)
    return [predictions(model), [group["lr"] for group in warm.param_groups]]


@use
def resumed_warm_up(new: Models) -> Any:
    """The `state_dict` of a `WarmupOptimizer`"""
    found = []
    for seed in (0, 1):
        model, optimizer = new.with_optimizer(seed)
        stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=6, value=0.1)]
        found.append((model, WarmupOptimizer(optimizer, stages, lr=0.2)))
        train(*found[-1], steps=3 if seed == 0 else 1)
    for source, target in zip(*found, strict=True):
        target.load_state_dict(source.state_dict())
    train(*found[1], first=3)
    return predictions(found[1][0])


@use
def clipping_optimizer(new: Models) -> Any:
    """`GradientClippingOptimizer` of the dense optimizer, in a `CombinedOptimizer` with
    the fused one
    """
    model = new()
    clipped = GradientClippingOptimizer(
        dense_optimizer(model), clipping=GradientClipping.NORM, max_gradient=0.1
    )
    train(model, CombinedOptimizer([model.fused_optimizer, clipped]))
    return predictions(model)


@use
def clipping_of_all(new: Models) -> Any:
    """`GradientClippingOptimizer` of a `CombinedOptimizer`"""
    model, optimizer = new.with_optimizer()
    train(
        model,
        GradientClippingOptimizer(
            optimizer, clipping=GradientClipping.VALUE, max_gradient=0.1
        ),
    )
    return predictions(model)


@use
def optimizer_of_all_parameters(new: Models) -> Any:
    """`torch.optim.SGD(model.parameters())`, with the tables' parameters"""
    model = new()
    train(model, torch.optim.SGD(model.parameters(), lr=0.01))
    return predictions(model)


@use
def optimizer_with_state_of_all_parameters(new: Models) -> Any:
    """`torch.optim.AdamW(model.parameters())`, saved and loaded"""
    model, other = new(), new(1)
    optimizer, loaded = (
        torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, other)
    )
    train(model, optimizer)
    train(other, loaded, steps=1)
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(optimizer.state_dict())
    train(other, loaded, first=4)
    return other.module.over.weight


@use
def keyed_wrapper_of_all(new: Models) -> Any:
    """`KeyedOptimizerWrapper(dict(model.named_parameters()), ...)`, with the tables'
    parameters
    """
    model = new()
    train(
        model,
        KeyedOptimizerWrapper(
            dict(model.named_parameters()), lambda p: torch.optim.SGD(p, lr=0.01)
        ),
    )
    return predictions(model)


@use
def initialized_state(new: Models) -> Any:
    """`KeyedOptimizerWrapper.init_state()` before the first step, and of the fused
    optimizer
    """
    model = new()
    optimizer = CombinedOptimizer([model.fused_optimizer, dense_optimizer(model)])
    for _, each in optimizer.optimizers:
        each.init_state()
    train(model, optimizer)
    return predictions(model)


@use
def closure_of_a_step(new: Models) -> Any:
    """`optimizer.step(closure)` of the dense optimizer"""
    model = new()
    optimizer = torch.optim.SGD(model.module.over.parameters(), lr=0.01)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, 1)
        loss.backward()
        return loss

    return [optimizer.step(closure), predictions(model)]


@use
def hooks_of_steps(new: Models) -> Any:
    """`register_step_pre_hook` and `register_step_post_hook` of the optimizers"""
    model, optimizer = new.with_optimizer()
    seen: list[str] = []
    for each in (optimizer, model.fused_optimizer):
        each.register_step_pre_hook(lambda *args: seen.append("before"))
        each.register_step_post_hook(lambda *args: seen.append("after"))
    train(model, optimizer, steps=1)
    return seen


@use
def optimizer_steps(new: Models) -> Any:
    """`model.fused_optimizer.set_optimizer_step(...)`"""
    model = new()
    model.fused_optimizer.set_optimizer_step(10)
    train(model)
    return predictions(model)


@use
def added_group(new: Models) -> Any:
    """`add_param_group` of `model.fused_optimizer`"""
    new().fused_optimizer.add_param_group(
        {"params": [torch.nn.Parameter(torch.ones(1))]}
    )
    return "added"
