"""The ids of batches on an accelerator, on the host, where the rows are."""

from __future__ import annotations

import weakref
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_recstore.kernels.device_copies import to_host, weights_to_host

_BATCHES = 4  # as many as the kernels keep of prefetched batches


class HostBatch(NamedTuple):
    """A batch on the host.

    Args:
        ids: (N,) int64. The ids.
        offsets: (F * B + 1,) int64. The position of the first id of each bag, and N. Empty if the kernel does not pool.
        weights: (N,) float32. The weights of the ids, or None.
    """

    ids: Tensor
    offsets: Tensor
    weights: Tensor | None


class HostIds:
    """Copies each batch to the host once, in one copy, also if the batch was prefetched before.

    Batches that are on the host are returned as they are. The weights of a prefetched batch, and weights that require a
    gradient, are copied in the forward, because the layers that make or change them run there.

    Args:
        with_offsets: Whether the offsets are copied, for pooled lookups. Sequences do not need them.
        with_weights: Whether the weights are copied.
    """

    def __init__(self, with_offsets: bool, with_weights: bool) -> None:
        self._with_offsets, self._with_weights = with_offsets, with_weights
        self._ahead: deque[tuple[weakref.ref[Tensor], HostBatch]] = deque(maxlen=_BATCHES)

    def prefetch(self, features: KeyedJaggedTensor, batch: Tensor | None = None) -> Tensor:
        """Returns the ids of a batch, (N,) int64, and keeps the copy for :meth:`take`.

        Args:
            features: The features of one group of tables.
            batch: The ids of the whole batch. Each lookup of the batch has the same tensor, while it splits the
                features anew. Default: None, the ids of ``features``.
        """
        values: Tensor = features.values()
        if values.is_cpu:
            return values
        found = self._copied(features, None)
        self._ahead.append((weakref.ref(values if batch is None else batch), found))
        return found.ids

    def take(self, features: KeyedJaggedTensor, batch: Tensor | None = None) -> HostBatch:
        """Returns a batch on the host. See :meth:`prefetch` for the arguments."""
        values: Tensor = features.values()
        weights = features.weights_or_none() if self._with_weights else None
        if values.is_cpu:
            offsets = features.offsets() if self._with_offsets else values[:0]
            return HostBatch(values, offsets, None if weights is None else weights.float())
        for kept in self._ahead:
            if kept[0]() is (values if batch is None else batch):
                self._ahead.remove(kept)
                return kept[1] if weights is None else _weighted(kept[1], weights)
        if weights is None or (weights.requires_grad and torch.is_grad_enabled()):
            found = self._copied(features, None)
            return found if weights is None else _weighted(found, weights)
        return self._copied(features, weights)

    def _copied(self, features: KeyedJaggedTensor, weights: Tensor | None) -> HostBatch:
        values: Tensor = features.values()
        tensors = [values]
        if self._with_offsets:
            tensors.append(features.offsets())
        if weights is not None:
            tensors.append(weights.float())
        ids, *more = to_host(tensors)
        offsets = more[0] if self._with_offsets else ids[:0]
        return HostBatch(ids, offsets, None if weights is None else more[-1])


def _weighted(found: HostBatch, weights: Tensor) -> HostBatch:
    return HostBatch(found.ids, found.offsets, weights_to_host(weights.float()))
