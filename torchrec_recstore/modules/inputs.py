"""Inputs of eager modules as bags of ids on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from torchrec_recstore.modules.lookups import Bags


def bags_of(
    input: Tensor,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    *,
    include_last_offset: bool,
    padding_idx: int | None,
) -> Bags:
    """The bags of one table, without what is padding.

    Args:
        input: (B, L), or (N,) with ``offsets``; int32 or int64.
        offsets: (B,), or (B + 1,) with ``include_last_offset``; int32 or int64. Ids behind the last offset are in no
            bag then.
        per_sample_weights: of the shape of ``input``, floating point.
        include_last_offset: as for ``torch.nn.EmbeddingBag``.
        padding_idx: the id that is left out.

    Raises:
        TypeError: a tensor of another dtype; the message names it.
        ValueError: a tensor of another shape, or offsets that do not ascend within the input.
    """
    ids = int64_input(input)
    if input.is_nested:
        ids, offsets, include_last_offset = int64_input(input.values()), input.offsets(), True  # type: ignore[attr-defined]
        if per_sample_weights is not None and not per_sample_weights.is_nested:
            raise ValueError("per_sample_weights must be nested where input is")
        per_sample_weights = None if per_sample_weights is None else per_sample_weights.values()
    weights = None if per_sample_weights is None else _weights(per_sample_weights, ids)
    if ids.dim() == 2:
        if offsets is not None:
            raise ValueError("offsets must be None where input is of the shape (B, L): each line is a bag")
        # Not arange with a step: lines may be empty.
        bounds = torch.arange(ids.shape[0] + 1) * ids.shape[1]
        ids, weights = ids.reshape(-1), None if weights is None else weights.reshape(-1)
    else:
        bounds = _bounds(ids, offsets, include_last_offset)
        end = int(bounds[-1])
        ids, weights = ids[:end], None if weights is None else weights[:end]
    if padding_idx is not None:
        stays = ids != padding_idx
        before = torch.cat([torch.zeros(1, dtype=torch.int64), stays.cumsum(0)])
        ids, bounds = ids[stays], before[bounds]
        weights = None if weights is None else weights[stays]
    return Bags(ids, bounds, weights)


def int64_input(input: Tensor) -> Tensor:
    """``input`` as int64, on the CPU.

    Raises:
        TypeError: it is neither int32 nor int64.
    """
    if not isinstance(input, Tensor) or input.dtype not in (torch.int32, torch.int64):
        got = input.dtype if isinstance(input, Tensor) else type(input).__name__
        raise TypeError(f"input must be an int32 or int64 tensor, got {got}")
    return input if input.is_nested else input.to("cpu", torch.int64)


def _weights(weights: Tensor, ids: Tensor) -> Tensor:
    if not weights.is_floating_point():
        raise TypeError(f"per_sample_weights must be of a floating-point dtype, got {weights.dtype}")
    if weights.shape != ids.shape:
        raise ValueError(
            f"per_sample_weights must have the shape of input, {tuple(ids.shape)}, got {tuple(weights.shape)}"
        )
    return weights.to("cpu", torch.float32)


def _bounds(ids: Tensor, offsets: Tensor | None, include_last_offset: bool) -> Tensor:
    """(B + 1,) int64, on the CPU: where bags begin, and where the last one ends."""
    if ids.dim() != 1:
        raise ValueError(f"input must be of the shape (B, L) or (N,), got {tuple(ids.shape)}")
    if offsets is None:
        raise ValueError("offsets must be given where input is of the shape (N,)")
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"offsets must be an int32 or int64 tensor, got {offsets.dtype}")
    if offsets.dim() != 1 or (include_last_offset and len(offsets) == 0):
        shape = "(B + 1,)" if include_last_offset else "(B,)"
        raise ValueError(f"offsets must have the shape {shape}, got {tuple(offsets.shape)}")
    bounds = offsets.to("cpu", torch.int64)
    if not include_last_offset:
        if len(bounds) == 0:
            return torch.zeros(1, dtype=torch.int64)
        bounds = torch.cat([bounds, torch.tensor([len(ids)])])
    if int(bounds[0]) != 0 or int(bounds[-1]) > len(ids) or not bool((bounds[1:] >= bounds[:-1]).all()):
        raise ValueError(f"offsets must ascend from 0 to at most the {len(ids)} ids of input")
    return bounds


class Features:
    """A batch, of which each group of tables takes its features.

    Args:
        given: the batch.
        is_weighted: whether its weights count.

    Raises:
        TypeError: ids that are not integers.
        ValueError: weights count and there are none.
    """

    def __init__(self, given: KeyedJaggedTensor, is_weighted: bool) -> None:
        dtype = given.values().dtype
        if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
            raise TypeError(f"ids must be integers, got {dtype} for features {given.keys()}")
        self.given = given
        self.device = given.values().device
        self._is_weighted = is_weighted
        if is_weighted and given.weights_or_none() is None:
            raise ValueError(f"is_weighted=True needs weights of the features {given.keys()}")

    @cached_property
    def jagged(self) -> dict[str, JaggedTensor]:
        """The features one by one, as they were given."""
        jagged: dict[str, JaggedTensor] = self.given.to_dict()
        return jagged

    def ids(self, names: Sequence[str]) -> Tensor:
        """(N,) int64 ids of features, one after the other."""
        whole = self._has_all(names)
        ids: Tensor = self.given.values() if whole else _joined([self.jagged[name].values() for name in names])
        return ids.to("cpu", torch.int64)

    def bags(self, names: Sequence[str]) -> tuple[Bags, list[int] | None]:
        """The bags of features, feature by feature.

        Returns:
            As many of each feature, and how many it has of its own where that varies: behind them there are empty ones.
        """
        varies = self.given.variable_stride_per_key()
        if self._has_all(names) and not varies:
            weights = self.given.weights() if self._is_weighted else None
            offsets = self.given.offsets().to("cpu", torch.int64)
            return Bags(self.ids(names), offsets, _on_cpu(weights)), None
        parts = [self.jagged[name] for name in names]
        lengths = [part.lengths().to("cpu", torch.int64) for part in parts]
        counts = [len(some) for some in lengths]
        most = max(counts)
        padded = torch.cat([F.pad(some, (0, most - count)) for some, count in zip(lengths, counts, strict=True)])
        offsets = F.pad(padded.cumsum(0), (1, 0))
        weights = _joined([part.weights() for part in parts]) if self._is_weighted else None
        return Bags(self.ids(names), offsets, _on_cpu(weights)), counts if varies else None

    def _has_all(self, names: Sequence[str]) -> bool:
        return list(names) == list(self.given.keys())


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _on_cpu(weights: Tensor | None) -> Tensor | None:
    return None if weights is None else weights.to("cpu", torch.float32)
