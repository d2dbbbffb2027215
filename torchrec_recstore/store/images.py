"""Rows as bytes, as they lie in the native table.

Weights, padded to whole floats, element-wise optimizer states, then twelve bytes: the row-wise state float32, the last
step and the frequency uint32 (csrc/row_kernels.h, RowMeta).
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_recstore.ops import RowTensors

_META_BYTES = 12


def unpacked(images: Tensor, dtype: torch.dtype, columns: int) -> RowTensors:
    """What images (N, image bytes) uint8 hold.

    Args:
        images: of one table.
        dtype: of its weights.
        columns: of the shard.
    """
    n = len(images)
    weight = _numbers(images[:, : columns * dtype.itemsize], dtype)
    states = _numbers(images[:, -(-columns * dtype.itemsize // 4) * 4 : -_META_BYTES], torch.float32)
    elements = states.reshape(n, states.shape[1] // columns, columns).transpose(0, 1).contiguous()
    last_step, frequency = (
        _unsigned(images[:, place : place + 4]) for place in (-8 + images.shape[1], -4 + images.shape[1])
    )
    return weight, elements, _numbers(images[:, -12:-8], torch.float32).squeeze(1), last_step, frequency


def last_steps(images: Tensor) -> Tensor:
    """(N,) int64: the last step of each of N images."""
    return _unsigned(images[:, -8:-4])


def with_last_steps_up_to(images: Tensor, steps: int) -> Tensor:
    """The same images, N of them, of which none has a last step beyond ``steps``."""
    ahead = last_steps(images) > steps
    if not ahead.any():
        return images
    images = images.clone()
    images[ahead, -8:-4] = torch.tensor([steps]).view(torch.uint8)[:4]  # the lower half, of uint32
    return images


def _numbers(part: Tensor, dtype: torch.dtype) -> Tensor:
    return part.contiguous().view(dtype).reshape(len(part), part.shape[1] // dtype.itemsize)


def _unsigned(part: Tensor) -> Tensor:
    return _numbers(part, torch.int32).squeeze(1).to(torch.int64) & 0xFFFFFFFF
