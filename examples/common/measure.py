"""Measures what the curves of a run show.

They show the parts of a step's time, loss, AUC, memory, and the counts of tables.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics.functional.classification import binary_auroc
from torchrec.distributed.embedding_types import ShardedEmbeddingModule

from common.report import ALL, PART_TITLES, since, total
from torchrec_recstore import TableStats

AUC_SAMPLES = 2**20
"""The number of samples of each rank that the AUC of a point uses.

It limits the memory of a run.
"""


def resident_bytes() -> int:
    """Returns the resident memory of this process in bytes, including shared memory."""
    sizes = Path("/proc/self/statm").read_text().split()
    resident_pages = int(sizes[1])
    return resident_pages * os.sysconf("SC_PAGE_SIZE")


class StepSplit:
    """Measures the parts of the time of training steps with hooks on TorchRec's sharded
    collections.

    - reading: the time that the step waits for the next batch.
    - input_dist: the time from the call of a collection to its first lookup, in which
      ids are exchanged between ranks.
    - lookup: the forward pass of the kernels, RecStore's or stock ones.
    - update: the backward pass of the kernels, which applies the fused optimizer.
    - dense: the rest of the step: forward and backward pass of the dense layers, their
      optimizer, the output dist and the reduction of gradients.

    About ten hooks a step read the clock. Measuring every step of a run this way costs
    less than profiling a few steps. Asynchronous work of a CUDA device is not measured.

    Args:
        model: The sharded model, with any number of collections.
    """

    def __init__(self, model: nn.Module) -> None:
        self._seconds = dict.fromkeys(PART_TITLES, 0.0)
        self._running = False
        self._begin = 0.0
        self._dist_begin = 0.0
        self._lookup_begin = 0.0
        self._update_begin = 0.0
        for module in model.modules():
            if isinstance(module, ShardedEmbeddingModule):
                module.register_forward_pre_hook(self._dist_begins)
                # The lookups are not submodules (torchrec 1.8.0), so model.modules()
                # does not list them.
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
        # not set in wants_batch, because no batch follows the last one of an epoch
        self._running = True
        self._seconds["reading"] += time.perf_counter() - self._begin

    def step_ends(self) -> None:
        """Records that the step has ended.

        The time until the next step begins is not counted.
        """
        self._running = False
        self._seconds["dense"] += time.perf_counter() - self._begin

    def take(self) -> dict[str, float]:
        """Returns the time in seconds of each part since the last call."""
        seconds = self._seconds
        self._seconds = dict.fromkeys(PART_TITLES, 0.0)
        # "dense" contains the whole step up to here.
        other_parts = [seconds[part] for part in seconds if part != "dense"]
        seconds["dense"] -= sum(other_parts)
        return seconds

    def _dist_begins(self, *_: object) -> None:
        self._dist_begin = time.perf_counter()

    def _lookup_begins(self, *_: object) -> None:
        self._lookup_begin = time.perf_counter()
        if self._running and self._dist_begin:
            self._seconds["input_dist"] += self._lookup_begin - self._dist_begin
        # further lookups of the same collection follow no input dist
        self._dist_begin = 0.0

    def _lookup_ends(self, *_: object) -> None:
        if self._running:
            self._seconds["lookup"] += time.perf_counter() - self._lookup_begin

    def _watch_update(
        self,
        kernel: nn.Module,
        arguments: Any,
        pooled: Tensor,
    ) -> None:
        # The grad_fn of a kernel's result is the backward of the kernel, for RecStore
        # and for FBGEMM.
        if self._running and pooled.grad_fn is not None:
            pooled.grad_fn.register_prehook(self._update_begins)
            pooled.grad_fn.register_hook(self._update_ends)

    def _update_begins(self, *_: object) -> None:
        self._update_begin = time.perf_counter()

    def _update_ends(self, *_: object) -> None:
        self._seconds["update"] += time.perf_counter() - self._update_begin


class Window:
    """The steps between two points."""

    def __init__(self) -> None:
        self.steps = 0
        self.samples = 0
        self._loss_sum = torch.zeros((), dtype=torch.float64)
        self._scored: deque[tuple[Tensor, Tensor]] = deque()
        self._scored_samples = 0

    def add(
        self,
        samples: int,
        loss: Tensor,
        logits: Tensor | None,
        labels: Tensor | None,
    ) -> None:
        """Adds a step; see ``Run.step``."""
        self.steps += 1
        self.samples += samples
        self._loss_sum += loss.detach() * samples
        if logits is not None and labels is not None:
            self._scored.append((logits.detach(), labels))
            self._scored_samples += len(labels)
            _, oldest_labels = self._scored[0]
            while self._scored_samples - len(oldest_labels) >= AUC_SAMPLES:
                self._scored.popleft()
                self._scored_samples -= len(oldest_labels)
                _, oldest_labels = self._scored[0]

    def values(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """Returns the points of loss, AUC, memory and speed.

        The AUC is on rank 0 only. Collective.

        Args:
            seconds: The time of each part of the steps; see :meth:`StepSplit.take`.
        """
        memory = torch.tensor(resident_bytes(), dtype=torch.float64)
        sums = torch.stack([self._loss_sum, memory])
        dist.all_reduce(sums)
        loss_sum, memory_sum = sums.tolist()
        points = {
            "loss/training": loss_sum / (self.samples * dist.get_world_size()),
            "memory/processes": memory_sum,
        }
        if self._scored:
            logits = torch.cat([step_logits for step_logits, _ in self._scored])
            labels = torch.cat([step_labels for _, step_labels in self._scored])
            points |= _auc(logits, labels)
        for part, part_s in seconds.items():
            points[f"step_ms/{part}"] = 1e3 * part_s / self.steps
        points["speed/samples_per_second"] = self.samples / sum(seconds.values())
        return points


def _auc(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Returns the AUC over the samples of all ranks, on rank 0.

    It is left out if only one label occurs. Collective.
    """
    # One tensor is sent instead of two. It is float64, because the float32 sigmoid of
    # large logits is exactly 1, which would make ties.
    scores = torch.stack([logits.double(), labels.double()])
    scores_of_ranks = None
    if dist.get_rank() == 0:
        scores_of_ranks = []
        for _ in range(dist.get_world_size()):
            scores_of_ranks.append(torch.empty_like(scores))
    dist.gather(scores, scores_of_ranks)
    if scores_of_ranks is None:
        return {}
    logits, labels = torch.cat(scores_of_ranks, dim=1)
    if labels.min() == labels.max():
        return {}
    auc = binary_auroc(
        logits.sigmoid(),
        labels.long(),
        validate_args=False,
    )
    return {"AUC/training": float(auc)}


def table_points(
    earlier: Mapping[str, TableStats],
    later: Mapping[str, TableStats],
) -> dict[str, float]:
    """Returns the points of the curves of each table and of all tables.

    Args:
        earlier: The statistics of the tables at the previous point.
        later: The statistics of the tables now.
    """
    tables = since(earlier, later)
    tables_and_sum = {**tables, ALL: total(tables)}
    points: dict[str, float] = {
        "memory/tables": sum(stats.bytes for stats in later.values())
    }
    for name, stats in tables_and_sum.items():
        points[f"rows/{name}"] = stats.rows
        points[f"bytes/{name}"] = stats.bytes
        if stats.lookups:  # only RecStore tables count lookups
            unseen = stats.misses - stats.cold_hits
            points[f"hit_rate/{name}"] = stats.hits / stats.lookups
            points[f"unseen_share/{name}"] = unseen / stats.lookups
            points[f"insert_rate/{name}"] = stats.inserts / stats.lookups
            points[f"eviction_rate/{name}"] = stats.evicted / stats.lookups
    return points
