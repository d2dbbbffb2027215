"""What a run writes down while it trains: curves over its training samples, for TensorBoard and for the report."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common.command import DataError
from common.curves import CurveWriter
from common.log_folder import add_result, describe
from common.machine import resident_bytes
from common.processes import on_rank_0
from common.report import since, total
from common.settings import RunSettings
from common.sharding import dense_part
from common.step_split import StepSplit
from common.words import ALL
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics.functional.classification import binary_auroc
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer

from torchrec_recstore import TableStats

AUC_SAMPLES = 2**20
"""The AUC of a point is of so many samples of each rank, the last ones before it, so that memory has a bound."""


class RunLog:
    """The curves of a run, a point every ``settings.log_every`` steps. Every method is collective, rank 0 writes.

    A point tells of the steps since the one before: the mean loss, the AUC of their predictions, and so on. Times are
    rank 0's.

    Args:
        folder: of the log, which the run has to itself; None writes nothing.
        example: the example's name.
        settings: of the run.
        shown: the settings as they may be written down.
        model: sharded.
        optimizer: with the tables' and the dense part's.
        table_stats: what the tables hold and have done, over all ranks; collective.
        steps: steps behind the run.
        samples: training samples of those, over all ranks.

    Raises:
        DataError: nothing can be written to the folder.
    """

    def __init__(
        self,
        folder: Path | None,
        example: str,
        settings: RunSettings,
        shown: dict[str, Any],
        model: DistributedModelParallel,
        optimizer: CombinedOptimizer,
        table_stats: Callable[[], Mapping[str, TableStats]],
        steps: int = 0,
        samples: int = 0,
    ) -> None:
        self._folder = folder
        self._on = folder is not None
        self._writer: CurveWriter | None = None
        self._steps, self._samples = steps, samples
        if folder is None:
            return
        self._every = settings.log_every
        self._optimizer, self._table_stats = optimizer, table_stats
        self._split = StepSplit(model)
        self._tables = table_stats()
        self._window = _Window()
        on_rank_0(lambda: self._begin(folder, example, shown))

    def _begin(self, folder: Path, example: str, shown: dict[str, Any]) -> None:
        try:
            describe(folder, example, shown)
            self._writer = CurveWriter(folder, self._samples)
        except OSError as error:
            raise DataError(f"{folder}: {error.strerror} (--no-log does without it)") from error

    def wants_batch(self) -> None:
        """A step begins, by waiting for its batch."""
        if self._on:
            self._split.wants_batch()

    def has_batch(self) -> None:
        """The batch is there."""
        if self._on:
            self._split.has_batch()

    def step(self, samples: int, loss: Tensor, logits: Tensor | None = None, labels: Tensor | None = None) -> None:
        """A step is done.

        Args:
            samples: of the step, over all ranks.
            loss: (), this rank's mean.
            logits: (B,) for the AUC, B samples as on every other rank; None where there is no AUC.
            labels: (B,), 0 or 1.
        """
        if not self._on:
            return
        self._split.step_ends()
        self._steps += 1
        self._samples += samples
        self._window.add(samples, loss, logits, labels)
        if self._steps % self._every == 0:
            self.point()

    def point(self) -> None:
        """Adds a point to each curve, where there was a step since the one before."""
        if not self._on or not self._window.steps:
            return
        window, self._window = self._window, _Window()
        before, self._tables = self._tables, self._table_stats()
        values = window.values() | _speed(self._split.take(), window) | self._rates()
        values["memory/tables"] = sum(stats.bytes for stats in self._tables.values())
        self.add(values | _of_tables(before, self._tables))

    def add(self, values: Mapping[str, float | None]) -> None:
        """Adds a point here to some curves; not of a value that is None or not finite."""
        if self._writer is not None:
            known = {tag: value for tag, value in values.items() if value is not None and value - value == 0}
            self._writer.add(known, self._samples)

    def finish(self, result: dict[str, Any]) -> None:
        """Writes down what came of the run, and ends the log."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            assert self._folder is not None
            try:
                add_result(self._folder, result)
            except OSError as error:
                print(f"warning: the result is not in the log: {error}", file=sys.stderr)

    def _rates(self) -> dict[str, float]:
        # A rank without tables has none of theirs.
        (_, fused), _ = self._optimizer.optimizers
        rates = {"embeddings": _rate(fused), "dense": _rate(dense_part(self._optimizer))}
        return {f"learning_rate/{name}": rate for name, rate in rates.items() if rate is not None}


class _Window:
    """The steps from one point to the next."""

    def __init__(self) -> None:
        self.steps = self.samples = 0
        self._loss_sum = torch.zeros((), dtype=torch.float64)
        self._scored: deque[tuple[Tensor, Tensor]] = deque()
        self._scored_samples = 0

    def add(self, samples: int, loss: Tensor, logits: Tensor | None, labels: Tensor | None) -> None:
        self.steps += 1
        self.samples += samples
        self._loss_sum += loss.detach() * samples
        if logits is not None and labels is not None:
            self._scored.append((logits.detach(), labels))
            self._scored_samples += len(labels)
            while self._scored_samples - len(self._scored[0][1]) >= AUC_SAMPLES:
                self._scored_samples -= len(self._scored.popleft()[1])

    def values(self) -> dict[str, float]:
        """Loss, AUC and the processes' memory, over all ranks; the same on each but for the AUC, rank 0's alone."""
        sums = torch.stack([self._loss_sum, torch.tensor(resident_bytes(), dtype=torch.float64)])
        dist.all_reduce(sums)
        loss = float(sums[0]) / (self.samples * dist.get_world_size())
        auc = _auc(*map(torch.cat, zip(*self._scored, strict=True))) if self._scored else {}
        return {"loss/training": loss, "memory/processes": float(sums[1])} | auc


def _auc(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """The AUC over the samples of all ranks, on rank 0; none where only one label occurs."""
    # One tensor to send; in double, as float32's sigmoid makes ties of confident predictions.
    mine = torch.stack([logits.double(), labels.double()])
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather(mine, every)
    if every is None:
        return {}
    logits, labels = torch.cat(every, dim=1)
    if labels.min() == labels.max():
        return {}
    return {"AUC/training": float(binary_auroc(logits.sigmoid(), labels.long(), validate_args=False))}


def _speed(seconds: Mapping[str, float], window: _Window) -> dict[str, float]:
    split = {f"step_ms/{part}": 1e3 * spent / window.steps for part, spent in seconds.items()}
    return split | {"speed/samples_per_second": window.samples / sum(seconds.values())}


def _of_tables(before: Mapping[str, TableStats], now: Mapping[str, TableStats]) -> dict[str, float]:
    """Curves of each table and of all of them."""
    done = since(before, now)
    values: dict[str, float] = {}
    for name, stats in [*done.items(), (ALL, total(done))]:
        values |= {f"rows/{name}": stats.rows, f"bytes/{name}": stats.bytes}
        if stats.lookups:  # of RecStore's tables; stock ones do not count
            unseen = stats.misses - stats.cold_hits
            values |= {f"hit_rate/{name}": stats.hits / stats.lookups, f"unseen_share/{name}": unseen / stats.lookups}
            values |= {f"insert_rate/{name}": stats.inserts / stats.lookups}
            values |= {f"eviction_rate/{name}": stats.evicted / stats.lookups}
    return values


def _rate(optimizer: Optimizer) -> float | None:
    groups = optimizer.param_groups
    return float(groups[0]["lr"]) if groups else None
