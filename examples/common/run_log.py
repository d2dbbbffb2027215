"""Measures the curves of a run, writes them as TensorBoard event files, and reads them."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from common.command import DataError
from common.processes import on_rank_0
from common.report import ALL, PART_TITLES, since, total
from common.run_folder import add_result, describe, has_curves, resident_bytes
from common.run_settings import RunSettings
from common.sharding import dense_part
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics.functional.classification import binary_auroc
from torchrec.distributed.embedding_types import ShardedEmbeddingModule
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer

from torchrec_recstore import TableStats

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

AUC_SAMPLES = 2**20
"""The number of samples of each rank that the AUC of a point uses. It limits the memory of a run."""


class Curve(NamedTuple):
    """The values of one number during a run.

    Attributes:
        samples: The numbers of training samples at the points, ascending.
        values: The values at the points, in float32 precision.
    """

    samples: list[int]
    values: list[float]


def read_curves(folder: Path) -> dict[str, Curve]:
    """Reads all curves of a folder. Files of a run that was killed are read up to the last complete record.

    If a resumed run has written points again, the older points are ignored, as in TensorBoard. A curve of more than
    10,000 points is reduced to a random sample of 10,000 points.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    points = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    return {tag: Curve([p.step for p in curve], [p.value for p in curve]) for tag, curve in points.items()}


class CurveWriter:
    """Adds points to the curves in a folder. After a failed write it prints one warning and writes no more points.

    Args:
        folder: The folder, which must exist.
        samples: The number of training samples at which the run begins. Later points, which a killed run has written,
            are discarded.

    Raises:
        OSError: The folder cannot be written.
    """

    def __init__(self, folder: Path, samples: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        _silence_writer_threads()
        before = read_curves(folder) if has_curves(folder) else {}
        # The validation of an epoch may have been written after the checkpoint of the epoch's last step. Such points
        # are not written again.
        self._samples = samples
        self._there = {tag for tag, curve in before.items() if samples in curve.samples}
        purge = samples + 1 if before else None
        self._writer: SummaryWriter | None = SummaryWriter(str(folder), purge_step=purge)  # type: ignore[no-untyped-call]

    def add(self, values: Mapping[str, float], samples: int) -> None:
        """Adds a point to each of the named curves and writes the points to the disk."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        new = {tag: value for tag, value in values.items() if samples > self._samples or tag not in self._there}
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in new.items()])

        def write(writer: SummaryWriter) -> None:
            # All values are one record, so that a killed run leaves either all or none of them. A call of add_scalar
            # for each value would take twice as long as the rest of a point.
            writer.file_writer.add_summary(summary, samples)
            # The points must be on the disk before the next checkpoint, from which a run may be resumed.
            writer.flush()

        self._unless_failed(write)

    def close(self) -> None:
        """Closes the file."""
        self._unless_failed(lambda writer: writer.close())
        self._writer = None

    def _unless_failed(self, work: Callable[[SummaryWriter], None]) -> None:
        if self._writer is None:
            return
        try:
            work(self._writer)
        except OSError as error:
            self._writer = None
            print(f"warning: no more curves are written: {error}", file=sys.stderr)


def _silence_writer_threads() -> None:
    """Hides the traceback of TensorBoard's writing thread, because the next call raises the same error."""
    before = threading.excepthook

    def hook(failure: threading.ExceptHookArgs) -> None:
        if type(failure.thread).__name__ != "_AsyncWriterThread":
            before(failure)

    threading.excepthook = hook


class StepSplit:
    """Measures the parts of the time of training steps with hooks on TorchRec's sharded collections.

    - reading: the time that the step waits for the next batch.
    - input_dist: the time from the call of a collection to its first lookup, in which ids are exchanged between ranks.
    - lookup: the forward pass of the kernels, RecStore's or stock ones.
    - update: the backward pass of the kernels, which applies the fused optimizer.
    - dense: the rest of the step: forward and backward pass of the dense layers, their optimizer, the output dist and
      the reduction of gradients.

    About ten hooks a step read the clock. Measuring every step of a run this way costs less than profiling a few steps.
    Asynchronous work of a CUDA device is not measured.

    Args:
        model: The sharded model, with any number of collections.
    """

    def __init__(self, model: nn.Module) -> None:
        self._seconds = dict.fromkeys(PART_TITLES, 0.0)
        self._running = False
        self._begin = self._dist_begin = self._lookup_begin = self._update_begin = 0.0
        for module in model.modules():
            if isinstance(module, ShardedEmbeddingModule):
                module.register_forward_pre_hook(self._dist_begins)
                # The lookups are not submodules (torchrec 1.8.0), so model.modules() does not list them.
                for lookup in module._lookups:
                    lookup.register_forward_pre_hook(self._lookup_begins)
                    lookup.register_forward_hook(self._lookup_ends)
                    for kernel in getattr(lookup, "_emb_modules", ()):
                        kernel.register_forward_hook(self._watch_update)

    def wants_batch(self) -> None:
        """Records that a step begins to wait for its batch."""
        self._begin = time.perf_counter()

    def has_batch(self) -> None:
        """Records that the batch has arrived."""
        self._running = True  # not set in wants_batch, because no batch follows the last one of an epoch
        self._seconds["reading"] += time.perf_counter() - self._begin

    def step_ends(self) -> None:
        """Records that the step has ended. The time until the next step begins is not counted."""
        self._running = False
        self._seconds["dense"] += time.perf_counter() - self._begin

    def take(self) -> dict[str, float]:
        """Returns the time in seconds of each part since the last call."""
        seconds, self._seconds = self._seconds, dict.fromkeys(PART_TITLES, 0.0)
        # "dense" contains the whole step up to here.
        seconds["dense"] -= sum(spent for part, spent in seconds.items() if part != "dense")
        return seconds

    def _dist_begins(self, *_: object) -> None:
        self._dist_begin = time.perf_counter()

    def _lookup_begins(self, *_: object) -> None:
        self._lookup_begin = time.perf_counter()
        if self._running and self._dist_begin:
            self._seconds["input_dist"] += self._lookup_begin - self._dist_begin
        self._dist_begin = 0.0  # further lookups of the same collection follow no input dist

    def _lookup_ends(self, *_: object) -> None:
        if self._running:
            self._seconds["lookup"] += time.perf_counter() - self._lookup_begin

    def _watch_update(self, kernel: nn.Module, arguments: Any, pooled: Tensor) -> None:
        # The grad_fn of a kernel's result is the backward of the kernel, for RecStore and for FBGEMM.
        if self._running and pooled.grad_fn is not None:
            pooled.grad_fn.register_prehook(self._update_begins)
            pooled.grad_fn.register_hook(self._update_ends)

    def _update_begins(self, *_: object) -> None:
        self._update_begin = time.perf_counter()

    def _update_ends(self, *_: object) -> None:
        self._seconds["update"] += time.perf_counter() - self._update_begin


class RunLog:
    """The curves of a run, with a point every ``settings.log_every`` steps. Every method is collective; rank 0 writes.

    A point describes the steps since the previous point: their mean loss, the AUC of their predictions, and so on.
    Times are those of rank 0.

    Args:
        folder: The folder of the log, which only this run uses. None writes nothing.
        example: The name of the example.
        settings: The settings of the run.
        shown: The settings without credentials, for the description of the run.
        model: The sharded model.
        optimizer: The optimizer of the tables and of the dense part.
        table_stats: A function that returns the statistics of the tables over all ranks. Collective.
        steps: The number of steps that the run has already taken. Default: 0.
        samples: The number of training samples of these steps, over all ranks. Default: 0.

    Raises:
        DataError: The folder cannot be written.
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
            raise DataError(f"{folder}: {error.strerror} (--no-log writes no log)") from error

    def wants_batch(self) -> None:
        """Records that a step begins to wait for its batch."""
        if self._on:
            self._split.wants_batch()

    def has_batch(self) -> None:
        """Records that the batch has arrived."""
        if self._on:
            self._split.has_batch()

    def step(self, samples: int, loss: Tensor, logits: Tensor | None = None, labels: Tensor | None = None) -> None:
        """Records that a step has ended.

        Args:
            samples: The number of samples of the step, over all ranks.
            loss: (). The mean loss of this rank.
            logits: (B,). The logits for the AUC, with the same B on every rank. None: no AUC is computed.
            labels: (B,). The labels, 0 or 1.
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
        """Adds a point to each curve if there was a step since the previous point."""
        if not self._on or not self._window.steps:
            return
        window, self._window = self._window, _Window()
        before, self._tables = self._tables, self._table_stats()
        values = window.values() | _speed(self._split.take(), window) | self._rates()
        values["memory/tables"] = sum(stats.bytes for stats in self._tables.values())
        self.add(values | _of_tables(before, self._tables))

    def add(self, values: Mapping[str, float | None]) -> None:
        """Adds a point to the named curves. Values that are None or not finite are ignored."""
        if self._writer is not None:
            known = {tag: value for tag, value in values.items() if value is not None and value - value == 0}
            self._writer.add(known, self._samples)

    def finish(self, result: dict[str, Any]) -> None:
        """Writes the result of the run and closes the log."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            assert self._folder is not None
            try:
                add_result(self._folder, result)
            except OSError as error:
                print(f"warning: the result is not in the log: {error}", file=sys.stderr)

    def _rates(self) -> dict[str, float]:
        # A rank without tables has no rate of the embeddings.
        (_, fused), _ = self._optimizer.optimizers
        rates = {"embeddings": _rate(fused), "dense": _rate(dense_part(self._optimizer))}
        return {f"learning_rate/{name}": rate for name, rate in rates.items() if rate is not None}


class _Window:
    """The steps between two points."""

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
        """Returns the loss and the memory over all ranks, and on rank 0 the AUC. Collective."""
        sums = torch.stack([self._loss_sum, torch.tensor(resident_bytes(), dtype=torch.float64)])
        dist.all_reduce(sums)
        loss = float(sums[0]) / (self.samples * dist.get_world_size())
        auc = _auc(*map(torch.cat, zip(*self._scored, strict=True))) if self._scored else {}
        return {"loss/training": loss, "memory/processes": float(sums[1])} | auc


def _auc(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Returns the AUC over the samples of all ranks, on rank 0. It is left out if only one label occurs. Collective."""
    # One tensor is sent instead of two. It is float64, because the float32 sigmoid of large logits is exactly 1, which
    # would make ties.
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
    """Returns the points of the curves of each table and of all tables."""
    done = since(before, now)
    values: dict[str, float] = {}
    for name, stats in [*done.items(), (ALL, total(done))]:
        values |= {f"rows/{name}": stats.rows, f"bytes/{name}": stats.bytes}
        if stats.lookups:  # only RecStore tables count lookups
            unseen = stats.misses - stats.cold_hits
            values |= {f"hit_rate/{name}": stats.hits / stats.lookups, f"unseen_share/{name}": unseen / stats.lookups}
            values |= {f"insert_rate/{name}": stats.inserts / stats.lookups}
            values |= {f"eviction_rate/{name}": stats.evicted / stats.lookups}
    return values


def _rate(optimizer: Optimizer) -> float | None:
    groups = optimizer.param_groups
    return float(groups[0]["lr"]) if groups else None
