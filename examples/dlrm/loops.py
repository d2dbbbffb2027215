"""The loops over a model's steps: an epoch of training, and an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from batches import Step
from common.run_log import RunLog
from progress import Progress
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAUROC
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer
from tqdm import tqdm

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
