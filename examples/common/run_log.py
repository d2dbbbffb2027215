"""The curves of a run over its training samples: measured, written as TensorBoard's event files, and read again."""

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


class Curve(NamedTuple):
    """One number over the run.

    Attributes:
        samples: training samples seen, ascending.
        values: as float32.
    """

    samples: list[int]
    values: list[float]


def read_curves(folder: Path) -> dict[str, Curve]:
    """Reads every curve of a folder; of a run that was killed, up to the last whole record of each file.

    Points that a resumed run has taken again are left out, as TensorBoard does; of a curve of more than 10,000 points,
    10,000 are drawn.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    points = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    return {tag: Curve([p.step for p in curve], [p.value for p in curve]) for tag, curve in points.items()}


class CurveWriter:
    """Adds points to the curves of a folder. What a disk refuses is said once, and no more is written then.

    Args:
        folder: which is there.
        samples: training samples behind the run; points beyond, of a run that was killed, no longer count.

    Raises:
        OSError: nothing can be written there.
    """

    def __init__(self, folder: Path, samples: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        _silence_writer_threads()
        before = read_curves(folder) if has_curves(folder) else {}
        # An epoch's validation may come after the checkpoint of its last step: what is there is not written again.
        self._samples = samples
        self._there = {tag for tag, curve in before.items() if samples in curve.samples}
        purge = samples + 1 if before else None
        self._writer: SummaryWriter | None = SummaryWriter(str(folder), purge_step=purge)  # type: ignore[no-untyped-call]

    def add(self, values: Mapping[str, float], samples: int) -> None:
        """Adds a point to each of some curves, on disk when this returns."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        new = {tag: value for tag, value in values.items() if samples > self._samples or tag not in self._there}
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in new.items()])

        def write(writer: SummaryWriter) -> None:
            # As one record, which a killed run has as a whole or not at all; a call of add_scalar each takes twice as
            # long as all the rest of a point.
            writer.file_writer.add_summary(summary, samples)
            # A run that goes on from a checkpoint finds all points before it.
            writer.flush()

        self._unless_failed(write)

    def close(self) -> None:
        """Ends the writing."""
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
    """Keeps a traceback of TensorBoard's writing thread off the terminal: its error is raised by the next call too."""
    before = threading.excepthook

    def hook(failure: threading.ExceptHookArgs) -> None:
        if type(failure.thread).__name__ != "_AsyncWriterThread":
            before(failure)

    threading.excepthook = hook


class StepSplit:
    """Splits the time of training steps into parts, at the seams of TorchRec's sharded collections.

    - reading: waiting for the next batch.
    - input_dist: from the ids' arrival at a collection to the first lookup: sending them to their ranks, and waiting
      for those of the others.
    - lookup: the forward of the kernels, RecStore's or stock ones.
    - update: their backward, which applies the fused optimizer.
    - dense: all the rest: the dense layers both ways, their optimizer, output dist, the other ranks' gradients.

    Hooks that read the clock, some ten a step, see every step of a run for less than a profiler takes for a few. What a
    CUDA device does later is not seen.

    Args:
        model: sharded, any number of collections.
    """

    def __init__(self, model: nn.Module) -> None:
        self._seconds = dict.fromkeys(PART_TITLES, 0.0)
        self._running = False
        self._begin = self._dist_begin = self._lookup_begin = self._update_begin = 0.0
        for module in model.modules():
            if isinstance(module, ShardedEmbeddingModule):
                module.register_forward_pre_hook(self._dist_begins)
                # Not submodules, so only here within reach (torchrec 1.8.0).
                for lookup in module._lookups:
                    lookup.register_forward_pre_hook(self._lookup_begins)
                    lookup.register_forward_hook(self._lookup_ends)
                    for kernel in getattr(lookup, "_emb_modules", ()):
                        kernel.register_forward_hook(self._watch_update)

    def wants_batch(self) -> None:
        """A step begins, by waiting for its batch."""
        self._begin = time.perf_counter()

    def has_batch(self) -> None:
        """The batch is there."""
        self._running = True  # and not from the beginning: after an epoch's last batch none comes
        self._seconds["reading"] += time.perf_counter() - self._begin

    def step_ends(self) -> None:
        """The step is done; what follows until the next one begins is not counted."""
        self._running = False
        self._seconds["dense"] += time.perf_counter() - self._begin

    def take(self) -> dict[str, float]:
        """Returns the seconds of each part since the last call."""
        seconds, self._seconds = self._seconds, dict.fromkeys(PART_TITLES, 0.0)
        # Until here "dense" is the whole of it.
        seconds["dense"] -= sum(spent for part, spent in seconds.items() if part != "dense")
        return seconds

    def _dist_begins(self, *_: object) -> None:
        self._dist_begin = time.perf_counter()

    def _lookup_begins(self, *_: object) -> None:
        self._lookup_begin = time.perf_counter()
        if self._running and self._dist_begin:
            self._seconds["input_dist"] += self._lookup_begin - self._dist_begin
        self._dist_begin = 0.0  # a collection's further lookups come after its input dist

    def _lookup_ends(self, *_: object) -> None:
        if self._running:
            self._seconds["lookup"] += time.perf_counter() - self._lookup_begin

    def _watch_update(self, kernel: nn.Module, arguments: Any, pooled: Tensor) -> None:
        # The node of autograd behind a kernel's result is its backward, in RecStore's kernels and in FBGEMM's.
        if self._running and pooled.grad_fn is not None:
            pooled.grad_fn.register_prehook(self._update_begins)
            pooled.grad_fn.register_hook(self._update_ends)

    def _update_begins(self, *_: object) -> None:
        self._update_begin = time.perf_counter()

    def _update_ends(self, *_: object) -> None:
        self._seconds["update"] += time.perf_counter() - self._update_begin


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
