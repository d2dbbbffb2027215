"""The batch of a collection, from which each group of tables takes its features."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from torchrec_recstore.kernels.device_copies import to_host, weights_to_host
from torchrec_recstore.modules.lookups import Bags
from torchrec_recstore.ops import concatenated


class Features:
    """A batch from which each group of tables takes its features.

    Args:
        given: The batch.
        is_weighted: Whether the per-sample weights of the batch are used.

    Raises:
        TypeError: The ids are not integers.
        ValueError: ``is_weighted`` is True and the batch has no weights.
    """

    def __init__(self, given: KeyedJaggedTensor, is_weighted: bool) -> None:
        dtype = given.values().dtype
        if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
            raise TypeError(f"ids must be integers, got {dtype} for features {given.keys()}")
        if is_weighted and given.weights_or_none() is None:
            raise ValueError(f"is_weighted=True needs weights of the features {given.keys()}")
        self.device = given.values().device
        self._as_given = given
        self.given = given if self.device.type == "cpu" else _on_host(given, is_weighted)
        self._is_weighted = is_weighted

    @cached_property
    def as_given(self) -> dict[str, JaggedTensor]:
        """The features of the batch by name, on its device."""
        jagged: dict[str, JaggedTensor] = self._as_given.to_dict()
        return jagged

    @cached_property
    def jagged(self) -> dict[str, JaggedTensor]:
        """The features of the batch by name, on the CPU."""
        jagged: dict[str, JaggedTensor] = self.given.to_dict()
        return jagged

    def ids(self, names: Sequence[str]) -> Tensor:
        """Returns the ids of features, (N,) int64, on the CPU, feature by feature."""
        whole = self._has_all(names)
        ids: Tensor = self.given.values() if whole else concatenated([self.jagged[name].values() for name in names])
        return ids.to(torch.int64)

    def bags(self, names: Sequence[str]) -> tuple[Bags, list[int] | None]:
        """Returns the bags of features, feature by feature.

        Returns:
            The bags, and None. If the batch size varies by feature, empty bags are appended to the shorter features, so
            that all features have the same number of bags, and the second value is each feature's own number of bags.
        """
        varies = self.given.variable_stride_per_key()
        if self._has_all(names) and not varies:
            weights = self.given.weights() if self._is_weighted else None
            offsets = self.given.offsets().to(torch.int64)
            return Bags(self.ids(names), offsets, _float(weights)), None
        parts = [self.jagged[name] for name in names]
        lengths = [part.lengths().to(torch.int64) for part in parts]
        counts = [len(some) for some in lengths]
        most = max(counts)
        padded = torch.cat([F.pad(some, (0, most - count)) for some, count in zip(lengths, counts, strict=True)])
        offsets = F.pad(padded.cumsum(0), (1, 0))
        weights = concatenated([part.weights() for part in parts]) if self._is_weighted else None
        return Bags(self.ids(names), offsets, _float(weights)), counts if varies else None

    def _has_all(self, names: Sequence[str]) -> bool:
        return list(names) == list(self.given.keys())


def _float(weights: Tensor | None) -> Tensor | None:
    return None if weights is None else weights.float()


def _on_host(given: KeyedJaggedTensor, is_weighted: bool) -> KeyedJaggedTensor:
    """Returns a batch of an accelerator on the CPU, without its weights if they are not used."""
    weights = given.weights().float() if is_weighted else None
    together = [given.values().to(torch.int64), given.lengths()]
    alone = weights is not None and weights.requires_grad
    values, lengths, *more = to_host([*together, weights] if weights is not None and not alone else together)
    varies = given.variable_stride_per_key()
    return KeyedJaggedTensor(
        given.keys(),
        values,
        weights_to_host(weights) if weights is not None and alone else more[0] if more else None,
        lengths,
        stride_per_key_per_rank=given.stride_per_key_per_rank() if varies else None,
        inverse_indices=given.inverse_indices_or_none(),
    )
