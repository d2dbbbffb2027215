"""Converts the input of ``torch.nn.EmbeddingBag`` to bags of ids on the CPU.

Tests: tests/modules/test_embedding_bag.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchrec_recstore.kernels.device_copies import to_host, weights_to_host
from torchrec_recstore.modules.eager_kernels import Bags


def bags_of(
    input: Tensor,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    include_last_offset: bool,
    padding_idx: int | None,
) -> Bags:
    """Returns the bags of one table, without the padding id.

    The arguments and the errors are those of :class:`RecStoreEmbeddingBag` and its ``forward``.
    """
    input, offsets, per_sample_weights = _on_host(input, offsets, per_sample_weights)
    ids = int64_input(input)
    if input.is_nested:
        ids, offsets, include_last_offset = int64_input(input.values()), input.offsets(), True  # type: ignore[attr-defined]
        if per_sample_weights is not None and not per_sample_weights.is_nested:
            raise ValueError("per_sample_weights must be a nested tensor if input is one")
        per_sample_weights = None if per_sample_weights is None else per_sample_weights.values()
    weights = None if per_sample_weights is None else _weights(per_sample_weights, ids)
    if ids.dim() == 2:
        if offsets is not None:
            raise ValueError("offsets must be None if input has the shape (B, L): each row of input is a bag")
        # arange with a step cannot make these bounds: L may be 0.
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
    """Returns ``input`` as an int64 tensor on the CPU, or ``input`` itself if it is a nested tensor."""
    if not isinstance(input, Tensor) or input.dtype not in (torch.int32, torch.int64):
        got = input.dtype if isinstance(input, Tensor) else type(input).__name__
        raise TypeError(f"input must be an int32 or int64 tensor, got {got}")
    return input if input.is_nested else _on_host(input)[0].to(torch.int64)


def _on_host(*tensors: Tensor | None) -> list[Any]:
    """Returns the tensors on the CPU, copied together.

    Nested tensors, and weights whose gradient or dtype needs a copy of its own, are returned as they are.
    """
    together = {
        number: tensor
        for number, tensor in enumerate(tensors)
        if isinstance(tensor, Tensor)
        and tensor.device.type != "cpu"
        and tensor.itemsize in (4, 8)
        and not (tensor.is_nested or tensor.requires_grad)
    }
    found: list[Any] = list(tensors)
    if together:
        on_host = to_host([tensor.reshape(-1) for tensor in together.values()])
        for (number, tensor), copied in zip(together.items(), on_host, strict=True):
            found[number] = copied.view(tensor.shape)
    return found


def _weights(weights: Tensor, ids: Tensor) -> Tensor:
    if not weights.is_floating_point():
        raise TypeError(f"per_sample_weights must be of a floating-point dtype, got {weights.dtype}")
    if weights.shape != ids.shape:
        shapes = f"{tuple(ids.shape)}, got {tuple(weights.shape)}"
        raise ValueError(f"per_sample_weights must have the shape of input, {shapes}")
    return weights_to_host(weights.float())


def _bounds(ids: Tensor, offsets: Tensor | None, include_last_offset: bool) -> Tensor:
    """Returns the positions where the bags begin and where the last bag ends, (B + 1,) int64, on the CPU."""
    if ids.dim() != 1:
        raise ValueError(f"input must have the shape (B, L) or (N,), got {tuple(ids.shape)}")
    if offsets is None:
        raise ValueError("offsets must be given if input has the shape (N,)")
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"offsets must be an int32 or int64 tensor, got {offsets.dtype}")
    if offsets.dim() != 1 or (include_last_offset and len(offsets) == 0):
        shape = "(B + 1,)" if include_last_offset else "(B,)"
        raise ValueError(f"offsets must have the shape {shape}, got {tuple(offsets.shape)}")
    bounds: Tensor = _on_host(offsets)[0].to(torch.int64)
    if not include_last_offset:
        if len(bounds) == 0:
            return torch.zeros(1, dtype=torch.int64)
        bounds = torch.cat([bounds, torch.tensor([len(ids)])])
    if int(bounds[0]) != 0 or int(bounds[-1]) > len(ids) or not bool((bounds[1:] >= bounds[:-1]).all()):
        raise ValueError(f"offsets must ascend from 0 to at most the {len(ids)} ids of input")
    return bounds
