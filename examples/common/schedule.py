"""Schedules of learning rates."""

from __future__ import annotations

import math
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

LrSchedule = Literal["constant", "linear", "cosine"]


def lr_factor(
    schedule: LrSchedule,
    warmup_steps: int,
    total_steps: int,
    step: int,
) -> float:
    """Returns the factor by which the learning rate of a step is multiplied.

    The factor rises linearly during the first ``warmup_steps`` steps and reaches 1 in
    the last of them. Then it stays 1 (constant), falls linearly (linear), or falls as
    half a cosine wave (cosine). It would reach 0 in the step after the last one.

    Args:
        schedule: The shape of the schedule after the warm-up.
        warmup_steps: The number of warm-up steps.
        total_steps: The number of steps of the run.
        step: The number of the step, counted from 0.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    # A run that is resumed on fewer ranks may take one more step in each epoch; max
    # keeps the factor from falling below 0.
    remaining_steps = max(total_steps - step, 0)
    remaining = remaining_steps / max(total_steps - warmup_steps, 1)
    if schedule == "linear":
        return remaining
    return 0.5 * (1 - math.cos(math.pi * remaining))


def lr_scheduler(
    optimizer: Optimizer,
    schedule: LrSchedule,
    warmup_steps: int,
    total_steps: int,
    first_step: int = 0,
) -> LambdaLR:
    """Returns a scheduler of the learning rates.

    Call its ``step()`` after the optimizer's ``step()``.

    The number of the step is the whole state of the schedule, so a checkpoint holds
    only this number. ``LambdaLR.state_dict`` would also contain the rates of all
    parameter groups, and the number of parameter groups of a sharded model differs
    between ranks.

    Args:
        optimizer: A new optimizer. The factor multiplies the ``lr`` of each parameter
            group.
        schedule: See :func:`lr_factor`.
        warmup_steps: See :func:`lr_factor`.
        total_steps: The number of steps of the run.
        first_step: The number of the next step, counted from 0. Default: 0.
    """
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return LambdaLR(
        optimizer,
        lambda step: lr_factor(schedule, warmup_steps, total_steps, step),
        last_epoch=first_step - 1,
    )
