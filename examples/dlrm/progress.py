"""How far a run has come: what, beside the model and the dense optimizer, it needs to go on as if never stopped."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def _zero() -> Tensor:
    return torch.zeros((), dtype=torch.float64)


@dataclass
class Progress:
    """Counts of a run; the same on every rank, but for the loss.

    Attributes:
        step: steps taken.
        samples: samples of those steps, over all ranks.
        epoch: the epoch under way, counted from 0.
        epoch_steps: steps taken in it, which is also the place in the data.
        epoch_samples: samples of those steps, over all ranks.
        loss_sum: () float64; this rank's loss of each step in the epoch times the step's samples, summed.
    """

    step: int = 0
    samples: int = 0
    epoch: int = 0
    epoch_steps: int = 0
    epoch_samples: int = 0
    loss_sum: Tensor = field(default_factory=_zero)

    def count(self, loss: Tensor, samples: int) -> None:
        """Counts a step: this rank's mean loss, () float32, and the samples of all ranks."""
        self.loss_sum += loss.detach() * samples
        self.step += 1
        self.samples += samples
        self.epoch_steps += 1
        self.epoch_samples += samples

    def next_epoch(self) -> None:
        """Begins another epoch."""
        self.epoch += 1
        self.epoch_steps = self.epoch_samples = 0
        self.loss_sum = _zero()

    def mean_loss(self) -> float:
        """Mean loss of the epoch's samples over all ranks, NaN where there are none; collective."""
        total = self.loss_sum.clone()
        dist.all_reduce(total)
        return float(total) / (self.epoch_samples * dist.get_world_size()) if self.epoch_samples else float("nan")

    def state(self) -> dict[str, Any]:
        """The counts for a checkpoint, the same on every rank; collective."""
        loss_sums = [_zero() for _ in range(dist.get_world_size())]
        dist.all_gather(loss_sums, self.loss_sum)
        return vars(self) | {"loss_sum": torch.stack(loss_sums)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Progress:
        """What ``state`` was made of; on another number of ranks each takes the mean of their losses."""
        loss_sums: Tensor = state["loss_sum"]
        same = len(loss_sums) == dist.get_world_size()
        return cls(**state | {"loss_sum": (loss_sums[dist.get_rank()] if same else loss_sums.mean()).clone()})
