"""The learning rate over the steps of a run: a factor of what was set, for embeddings and dense layers alike."""

from __future__ import annotations

import math

from common.settings import LrSchedule
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def lr_factor(schedule: LrSchedule, warmup_steps: int, total_steps: int, step: int) -> float:
    """The factor that a step's learning rate is multiplied by.

    It rises in equal parts over the first ``warmup_steps`` steps and reaches 1 with the last of them. From then on it
    is 1 (constant), or falls in equal parts (linear) or as half a cosine wave (cosine) to 0 behind the last step.

    Args:
        schedule: its shape after the warm-up.
        warmup_steps: steps before that.
        total_steps: steps of the run.
        step: counted from 0.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    # A run that goes on with fewer ranks may take a step an epoch more, and a rate is never below 0.
    left = max(total_steps - step, 0) / max(total_steps - warmup_steps, 1)
    return left if schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))


def lr_scheduler(
    optimizer: Optimizer, schedule: LrSchedule, warmup_steps: int, total_steps: int, first_step: int = 0
) -> LambdaLR:
    """Lets an optimizer's learning rates follow the schedule; its ``step()`` comes after the optimizer's.

    The schedule's only state is the number of the step. ``LambdaLR.state_dict`` also lists the rates of all parameter
    groups, and how many a sharded model has differs from rank to rank; so that is not what a checkpoint holds.

    Args:
        optimizer: new; each group's ``lr`` is the rate that the factor belongs to.
        schedule: see :func:`lr_factor`.
        warmup_steps: see :func:`lr_factor`.
        total_steps: steps of the run.
        first_step: the step that comes next, counted from 0.
    """
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return LambdaLR(
        optimizer,
        lambda step: lr_factor(schedule, warmup_steps, total_steps, step),
        last_epoch=first_step - 1,
    )
