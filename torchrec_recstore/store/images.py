"""The images of rows: the bytes of a row with all of its state, as a table stores it in memory and in a cold store."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_recstore.ops import RowTensors
from torchrec_recstore.row_types import GRID_BYTES, as_numbers, row_bytes

_META_BYTES = 8  # the last step and the frequency, which end an image


@dataclass(frozen=True)
class ImageLayout:
    """The layout of the images of one shard: weights, element-wise states, the row-wise state, and the bookkeeping.

    Args:
        dtype: The data type of the weights.
        columns: The number of columns of the shard.
        state_dtype: The data type of the optimizer state. A float16 state of squares is stored as its square root.
        squares: For each element-wise state, whether it is a state of squares. A row-wise state always is.
    """

    dtype: torch.dtype
    columns: int
    state_dtype: torch.dtype
    squares: tuple[bool, ...]

    @property
    def image_bytes(self) -> int:
        """The bytes of an image."""
        return self._aside + self.state_dtype.itemsize + _META_BYTES

    def unpacked(self, images: Tensor) -> RowTensors:
        """Returns the tensors of images, (N, image bytes) uint8. States are float32 for each ``state_dtype``."""
        size = row_bytes(self.dtype, self.columns)
        weight = images[:, : self.columns * self.dtype.itemsize]
        if self.dtype is torch.int8:  # the codes are padded to whole floats, and the scale and the bias follow
            weight = torch.cat([weight, images[:, size - GRID_BYTES : size]], dim=1)
        else:
            weight = as_numbers(weight, self.dtype)
        bytes_of_one = self.columns * self.state_dtype.itemsize
        elements = torch.empty(len(self.squares), len(images), self.columns, dtype=torch.float32)
        for i, is_square in enumerate(self.squares):
            elements[i] = self._states(images[:, size + i * bytes_of_one : size + (i + 1) * bytes_of_one], is_square)
        state = self._states(images[:, self._aside : -_META_BYTES], True).squeeze(1)
        return weight, elements, state, last_steps(images), _unsigned(images[:, -4:])

    @property
    def _aside(self) -> int:
        """The place of the row-wise state. The element-wise states are padded to whole floats."""
        elements = len(self.squares) * self.columns * self.state_dtype.itemsize
        return row_bytes(self.dtype, self.columns) + -(-elements // 4) * 4

    def _states(self, part: Tensor, is_square: bool) -> Tensor:
        numbers = as_numbers(part, self.state_dtype).float()
        return numbers * numbers if is_square and self.state_dtype is torch.float16 else numbers


def last_steps(images: Tensor) -> Tensor:
    """Returns the last step of each of N images: (N,) int64."""
    return _unsigned(images[:, -8:-4])


def with_last_steps_up_to(images: Tensor, steps: int) -> Tensor:
    """Returns N images in which a last step above ``steps`` is replaced by ``steps``."""
    ahead = last_steps(images) > steps
    if not ahead.any():
        return images
    images = images.clone()
    images[ahead, -8:-4] = torch.tensor([steps]).view(torch.uint8)[:4]  # the last step is stored as uint32
    return images


def _unsigned(part: Tensor) -> Tensor:
    return as_numbers(part, torch.int32).squeeze(1).to(torch.int64) & 0xFFFFFFFF
