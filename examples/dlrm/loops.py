"""The training loop of an epoch, the evaluation loop, and the counts with which a run is resumed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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

from torchrec_recstore import RecStorePrefetchPipeline

LOSS_EVERY_STEPS = 20


def _zero() -> Tensor:
    return torch.zeros((), dtype=torch.float64)


@dataclass
class Progress:
    """The counts of a run. They are the same on every rank, except the loss.

    Attributes:
        step: The number of steps of the run.
        samples: The number of samples of these steps, over all ranks.
        epoch: The number of the current epoch, counted from 0.
        epoch_steps: The number of steps in the current epoch. It is also the position in the data.
        epoch_samples: The number of samples of these steps, over all ranks.
        loss_sum: () float64. The sum over the steps of the epoch of this rank's loss times the samples of the step.
    """

    step: int = 0
    samples: int = 0
    epoch: int = 0
    epoch_steps: int = 0
    epoch_samples: int = 0
    loss_sum: Tensor = field(default_factory=_zero)

    def count(self, loss: Tensor, samples: int) -> None:
        """Adds a step.

        Args:
            loss: () float32. The mean loss of this rank.
            samples: The number of samples of the step, over all ranks.
        """
        self.loss_sum += loss.detach() * samples
        self.step += 1
        self.samples += samples
        self.epoch_steps += 1
        self.epoch_samples += samples

    def next_epoch(self) -> None:
        """Begins the next epoch."""
        self.epoch += 1
        self.epoch_steps = self.epoch_samples = 0
        self.loss_sum = _zero()

    def mean_loss(self) -> float:
        """Returns the mean loss of the epoch's samples over all ranks, or NaN if there are no samples. Collective."""
        total = self.loss_sum.clone()
        dist.all_reduce(total)
        return float(total) / (self.epoch_samples * dist.get_world_size()) if self.epoch_samples else float("nan")

    def state(self) -> dict[str, Any]:
        """Returns the counts for a checkpoint. They are the same on every rank. Collective."""
        loss_sums = [_zero() for _ in range(dist.get_world_size())]
        dist.all_gather(loss_sums, self.loss_sum)
        return vars(self) | {"loss_sum": torch.stack(loss_sums)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Progress:
        """Returns the counts of a checkpoint. If the number of ranks has changed, each rank takes the mean loss sum."""
        loss_sums: Tensor = state["loss_sum"]
        same = len(loss_sums) == dist.get_world_size()
        return cls(**state | {"loss_sum": (loss_sums[dist.get_rank()] if same else loss_sums.mean()).clone()})


@dataclass(frozen=True)
class Training:
    """A model in training.

    Attributes:
        model: The sharded model. It takes a ``Batch`` and returns (loss, (loss, logits, labels)).
        optimizer: The optimizer of the dense part. The embeddings are updated in the backward pass.
        progress: The counts of the run.
    """

    model: DistributedModelParallel
    optimizer: CombinedOptimizer
    progress: Progress


class Trained(NamedTuple):
    """A step that has been made: the loss, logits and labels of this rank, and the samples over all ranks."""

    loss: Tensor
    logits: Tensor
    labels: Tensor
    global_rows: int


def plain_steps(training: Training, steps: Iterator[Step], log: RunLog | None = None) -> Iterator[Trained]:
    """Trains on each of the given steps. Collective."""
    for batch, global_rows in _logged(steps, log):
        training.optimizer.zero_grad(set_to_none=True)
        loss, (_, logits, labels) = training.model(batch)
        loss.backward()
        training.optimizer.step()
        yield Trained(loss, logits, labels, global_rows)


def prefetched_steps(training: Training, steps: Iterator[Step], log: RunLog | None = None) -> Iterator[Trained]:
    """Trains on each of the given steps, while the rows of the next step are read. Collective."""
    rows: deque[int] = deque()  # of the batches that the pipeline has taken

    def batches() -> Iterator[Any]:
        for batch, global_rows in _logged(steps, log):
            rows.append(global_rows)
            yield batch

    coming = batches()
    pipeline = RecStorePrefetchPipeline(training.model, training.optimizer, torch.device("cpu"))
    try:
        while True:
            try:
                loss, logits, labels = pipeline.progress(coming)
            except StopIteration:
                return
            yield Trained(loss, logits, labels, rows.popleft())
    finally:
        pipeline.detach()  # the evaluation calls the model itself


def _logged(steps: Iterator[Step], log: RunLog | None) -> Iterator[Step]:
    """Yields the steps, and tells the log how long each of them was waited for."""
    while True:
        if log:
            log.wants_batch()
        step = next(steps, None)
        if step is None:
            return
        if log:
            log.has_batch()
        yield step


def train_epoch(
    training: Training,
    scheduler: LRScheduler,
    steps: Iterator[Trained],
    bar: tqdm[Any],
    after_step: Callable[[Training], None] = lambda training: None,
    log: RunLog | None = None,
) -> None:
    """Trains on the given steps. Collective.

    Args:
        training: The model to train. Its progress counts the steps.
        scheduler: The scheduler of the learning rates.
        steps: The remaining steps of the epoch, from :func:`plain_steps` or :func:`prefetched_steps`.
        bar: The progress bar, which counts samples.
        after_step: A function that is called after each step.
        log: The log that records each step.
    """
    progress = training.progress
    training.model.train()
    for number, (loss, logits, labels, global_rows) in enumerate(steps):
        scheduler.step()
        progress.count(loss, global_rows)
        if log:
            log.step(global_rows, loss, logits, labels)
        if number % LOSS_EVERY_STEPS == 0:
            bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
        bar.update(global_rows)
        after_step(training)
    if log:
        log.point()


@torch.no_grad()
def evaluate(model: nn.Module, steps: Iterator[Step], bar: tqdm[Any]) -> tuple[float | None, float | None]:
    """Computes AUC and logloss over all ranks. Collective.

    Args:
        model: The model. See :class:`Training`.
        steps: The steps of the data to evaluate.
        bar: The progress bar, which counts samples.

    Returns:
        (AUC, logloss). The AUC is None if only one label occurs. Both are None if there are no samples.
    """
    model.eval()
    auc, logloss, positives = BinaryAUROC(), MeanMetric(), MeanMetric()
    samples = 0
    for batch, global_rows in steps:
        _, (loss, logits, labels) = model(batch)
        # In float64, because the float32 sigmoid of large logits is exactly 1, which would make ties.
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
