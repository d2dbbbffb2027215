"""The ids of batches on an accelerator, on the host, where the rows are."""

from __future__ import annotations

import weakref
from collections import deque

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

_BATCHES = 4  # as many as the kernels keep of prefetched batches


class HostIds:
    """Copies the ids of each batch to the host once, in one copy, also if the batch was prefetched before.

    Batches that are on the host are returned as they are.

    Args:
        with_offsets: Whether the same copy has the offsets, for pooled lookups. Sequences do not need them.
    """

    def __init__(self, with_offsets: bool) -> None:
        self._with_offsets = with_offsets
        self._ahead: deque[tuple[weakref.ref[Tensor], Tensor, Tensor]] = deque(maxlen=_BATCHES)

    def prefetch(self, features: KeyedJaggedTensor) -> Tensor:
        """Returns the ids of a batch, (N,) int64, and keeps the copy for :meth:`take`."""
        values: Tensor = features.values()
        if values.device.type == "cpu":
            return values
        ids, offsets = self._copied(features)
        self._ahead.append((weakref.ref(values), ids, offsets))
        return ids

    def take(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """Returns the ids of a batch, (N,) int64, and the offsets, the position of the first id of each bag.

        The offsets are empty without ``with_offsets``.
        """
        values: Tensor = features.values()
        if values.device.type == "cpu":
            return values, features.offsets() if self._with_offsets else values[:0]
        for kept in self._ahead:
            if kept[0]() is values:
                self._ahead.remove(kept)
                return kept[1:]
        return self._copied(features)

    def _copied(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        values: Tensor = features.values()
        both = torch.cat([values, features.offsets().to(values.dtype)]) if self._with_offsets else values
        on_host = both.to("cpu")
        return on_host[: len(values)], on_host[len(values) :]
