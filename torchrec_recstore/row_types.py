"""The data types in which a table stores the weights of its rows, and conversions
between them.

A weight of an 8-bit row (``torch.int8``) is ``code * scale + bias``, with a code from 0
to 255 for each weight, and one scale and one bias for each row. Outside a table, the
stored weights of N such rows are (N, columns + 8) uint8: the codes of a row, then its
scale and its bias as float32. This is the layout of FBGEMM's
``FloatToFused8BitRowwiseQuantized``. Stored weights of other types are (N, columns)
tensors of that type.

Tests: tests/store/test_row_types.py, tests/store/test_eight_bits.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_recstore.utils import aligned

ROW_TYPES: dict[torch.dtype, int] = {
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.int8: 3,
}
"""The values of ``RowType`` in csrc/rows/config.h."""
ROW_DTYPES = tuple(ROW_TYPES)
"""The types in which a table can store its weights."""

STATE_TYPES: dict[torch.dtype, int] = {torch.float32: 0, torch.float16: 1}
"""The data types in which a table can store its optimizer state, and the values of
``StateType`` in csrc/rows/config.h.
"""

MOST_COLUMNS = 2**24
"""The largest number of columns of a table: ``kMostColumns`` in csrc/ops/table.cpp."""

GRID_BYTES = 8
"""The bytes of the scale and the bias of an 8-bit row."""
_TOP = 255  # the greatest code
_UNIT = 1 << 16  # a step between codes, in the fixed-point numbers of the rounding


def value_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the data type of lookups from a table of ``dtype``: float32 for 8-bit
    rows, else ``dtype``.
    """
    if dtype is torch.int8:
        return torch.float32
    return dtype


def stored_columns(dtype: torch.dtype, columns: int) -> int:
    """Returns the number of columns of the stored weights of ``columns`` columns of a
    table of ``dtype``.
    """
    if dtype is torch.int8:
        return columns + GRID_BYTES
    return columns


def row_bytes(dtype: torch.dtype, columns: int) -> int:
    """Returns the number of bytes that the weights of a row occupy in a table.

    It is a multiple of 4.
    """
    code_bytes = aligned(columns * dtype.itemsize, 4)
    if dtype is torch.int8:
        return code_bytes + GRID_BYTES
    return code_bytes


def as_numbers(content: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a copy of bytes, (N, columns * ``dtype.itemsize``) uint8, as numbers, (N,
    columns) of ``dtype``.

    The bytes may begin at any place in memory, also at one that ``Tensor.view``
    refuses.
    """
    rows = content.shape[0]
    columns = content.shape[1] // dtype.itemsize
    copied = content.clone(memory_format=torch.contiguous_format)
    return copied.view(-1).view(dtype).view(rows, columns)


def values(stored: Tensor) -> Tensor:
    """Returns the values of stored weights: (N, columns) float32.

    All of them are exact.
    """
    if stored.dtype is not torch.uint8:
        return stored.float()
    codes = stored[:, :-GRID_BYTES].float()
    grid = as_numbers(stored[:, -GRID_BYTES:], torch.float32)
    scale = grid[:, :1]
    bias = grid[:, 1:]
    return codes * scale + bias


def has_finite_sum(stored: Tensor) -> bool:
    """Returns whether a sum over stored weights is finite, so that all weights are.

    It takes a fraction of the time and memory of a look at each weight. The sum of
    finite weights can be infinite.
    """
    if stored.dtype is not torch.uint8:
        return math.isfinite(stored.sum(dtype=torch.float32))
    grid = as_numbers(stored[:, -GRID_BYTES:], torch.float32)
    scale = grid[:, 0].abs()
    bias = grid[:, 1].abs()
    largest = scale * _TOP + bias
    return math.isfinite(largest.sum())


def as_stored(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns weights in the form in which a table of ``dtype`` stores them, rounded to
    nearest.

    The weights are (N, columns) floating-point values, or stored weights of any data
    type.
    """
    # the stored weights of 8-bit rows are uint8
    stored_dtype = torch.uint8 if dtype is torch.int8 else dtype
    if weights.dtype is stored_dtype:
        return weights
    numbers = values(weights)
    if dtype is torch.int8:
        return _quantized(numbers)
    return numbers.to(dtype)


def columns_of(stored: Tensor, columns: slice) -> Tensor:
    """Returns some columns of stored weights, exactly: 8-bit rows keep their scale and
    bias.
    """
    if stored.dtype is not torch.uint8:
        return stored[:, columns]
    codes = stored[:, :-GRID_BYTES]
    grid = stored[:, -GRID_BYTES:]
    return torch.cat([codes[:, columns], grid], dim=1)


def joined_columns(parts: Sequence[Tensor]) -> Tensor:
    """Returns the stored weights of rows whose columns are in several parts, in their
    order.

    Parts of 8-bit rows have different scales. The result is then float32.
    """
    if len(parts) == 1:
        return parts[0]
    numbers = []
    for part in parts:
        if part.dtype is torch.uint8:
            numbers.append(values(part))
        else:
            numbers.append(part)
    return torch.cat(numbers, dim=1)


def _quantized(weights: Tensor) -> Tensor:
    """Returns 8-bit rows of (N, columns) float32 weights, to the bit as
    csrc/row_loops/row_int8.inl makes them.
    """
    least = weights.amin(1, keepdim=True)
    greatest = weights.amax(1, keepdim=True)
    is_finite = (weights.abs() <= 2.0**126).all(1, keepdim=True)
    spread = greatest - least
    is_constant = spread < 2.0**-100

    # The scale has 16 significant bits.
    exact_scale = spread * torch.tensor(1 / _TOP)
    bits = exact_scale.view(torch.int32)
    rounded_bits = (bits + 0x80) & ~0xFF
    scale = rounded_bits.view(torch.float32)
    inverse = torch.where(is_constant, 0.0, _UNIT / scale)

    most_steps = _TOP * _UNIT
    steps = (weights - least) * inverse
    steps = steps.clamp(max=most_steps)
    steps = torch.where(is_finite, steps, most_steps)
    rounded_steps = steps.to(torch.int32) + _UNIT // 2
    codes = (rounded_steps >> 16).to(torch.uint8)

    scale = torch.where(is_constant, 0.0, scale)
    bias = least + 0.0  # without a negative zero
    grid = torch.cat([scale, bias], dim=1)
    grid = torch.where(is_finite, grid, torch.nan)
    return torch.cat([codes, grid.view(torch.uint8)], dim=1)
