"""The loops over a model's steps: an epoch of training, and an evaluation; and the counts that a run resumes with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from common.run_log import RunLog
from sources import Step
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAUROC
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer
from tqdm import tqdm


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


LOSS_EVERY_STEPS = 20


@dataclass(frozen=True)
class Training:
    """A model in training.

    Attributes:
        model: from a ``Batch`` to (loss, (loss, logits, labels)).
        optimizer: of its dense part; the embeddings are updated in backward.
        progress: how far it has come.
    """

    model: DistributedModelParallel
    optimizer: CombinedOptimizer
    progress: Progress


def train_epoch(
    training: Training,
    scheduler: LRScheduler,
    steps: Iterator[Step],
    bar: tqdm[Any],
    after_step: Callable[[Training], None] = lambda training: None,
    log: RunLog | None = None,
) -> None:
    """Trains on every step once; collective.

    Args:
        training: what is trained; its progress counts the steps.
        scheduler: of the learning rates.
        steps: what is left of the epoch.
        bar: counts the samples.
        after_step: called after each step.
        log: sees each step.
    """
    model, optimizer, progress = training.model, training.optimizer, training.progress
    model.train()
    if log:
        log.wants_batch()
    for number, (batch, global_rows) in enumerate(steps):
        if log:
            log.has_batch()
        optimizer.zero_grad(set_to_none=True)
        loss, (_, logits, labels) = model(batch)
        loss.backward()
        optimizer.step()
        scheduler.step()
        progress.count(loss, global_rows)
        if log:
            log.step(global_rows, loss, logits, labels)
        if number % LOSS_EVERY_STEPS == 0:
            bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
        bar.update(global_rows)
        after_step(training)
        if log:
            log.wants_batch()
    if log:
        log.point()


@torch.no_grad()
def evaluate(model: nn.Module, steps: Iterator[Step], bar: tqdm[Any]) -> tuple[float | None, float | None]:
    """Computes AUC and logloss over all ranks; collective.

    Args:
        model: as in :class:`Training`.
        steps: of what is evaluated.
        bar: counts the samples.

    Returns:
        (AUC, logloss); the AUC is None where only one label occurs, both where there is no sample.
    """
    model.eval()
    auc, logloss, positives = BinaryAUROC(), MeanMetric(), MeanMetric()
    samples = 0
    for batch, global_rows in steps:
        _, (loss, logits, labels) = model(batch)
        # In double: float32's sigmoid makes ties of confident predictions.
        auc.update(torch.sigmoid(logits.double()), labels)
        logloss.update(loss.double(), len(labels))
        positives.update(labels.double())
        samples += global_rows
        bar.update(global_rows)
    if not samples:
        return None, None
    one_label = float(positives.compute()) in (0.0, 1.0)
    area = float(auc.compute())
    return None if one_label else area, float(logloss.compute())
