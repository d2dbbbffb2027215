"""Where the time of a training step goes, by the wall clock of one rank."""

from __future__ import annotations

import time
from typing import Any

from common.words import PART_TITLES
from torch import Tensor, nn
from torchrec.distributed.embedding_types import ShardedEmbeddingModule


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
