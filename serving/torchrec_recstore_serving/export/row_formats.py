"""Converts rows to FBGEMM's row formats, which TorchRec's quantised modules read.

Tests: tests/serving/export/test_from_model.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

FORMATS = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.int8: "int8",
    torch.quint4x2: "int4",
}
"""The names of the row formats, by the data types that a user passes."""

DTYPES = {
    "float32": torch.float32,
    "fp16": torch.float16,
    "int8": torch.int8,
    "int4": torch.quint4x2,
}
"""The data types, by the names of the command line."""

TYPE_NUMBERS = {"float16": 1, "int8": 2, "int4": 3}
"""The numbers of the row formats in FBGEMM: ``SparseType.as_int()`` of fbgemm-gpu
1.8.0.
"""

FORMAT_NAMES = {
    0: "float32",
    1: "float16",
    2: "int8",
    3: "int4",
}
"""The names of the row formats by FBGEMM's numbers."""

_ALIGNMENT = 16  # bytes; torchrec.quant's DEFAULT_ROW_ALIGNMENT (TorchRec 1.8.0)
_SCALE_AND_BIAS_BYTES = 4  # of an int8 or int4 row
_GREATEST = torch.finfo(torch.float16).max
_BITS = {"float16": 16, "int8": 8, "int4": 4}
# The dim must be a multiple of this number, because FBGEMM packs rows into pairs of
# bytes (fbgemm-gpu 1.8.0).
_MULTIPLES = {"int8": 2, "int4": 4}


def check_dtype(dtype: torch.dtype) -> str:
    """Checks the data type of an export, and returns the name of the row format.

    Raises:
        ValueError: Rows cannot be exported in this data type.
    """
    if dtype not in FORMATS:
        names = ", ".join(map(str, FORMATS))
        raise ValueError(
            f"dtype must be one of {names} (which is TorchRec's int4), got {dtype}"
        )
    return FORMATS[dtype]


def check_dim(name: str, dim: int, row_format: str) -> None:
    """Refuses a table whose dim the row format does not support.

    Raises:
        ValueError: The dim is not a multiple of the required number. The message names
            the table.
    """
    multiple = _MULTIPLES.get(row_format, 1)
    if dim % multiple:
        raise ValueError(
            f"table {name!r} has dim {dim}: {row_format} rows need a multiple of"
            f" {multiple}"
        )


def row_bytes(dim: int, row_format: str) -> int:
    """Returns the size of a stored row in bytes."""
    if row_format == "float32":
        return dim * 4
    size = dim * _BITS[row_format] // 8
    if row_format in ("int8", "int4"):
        size += _SCALE_AND_BIAS_BYTES
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def check_range(name: str, weight: Tensor, row_format: str) -> None:
    """Refuses weights that a row format cannot represent.

    All formats except float32 store float16 numbers: the weights, or the scale and the
    bias of a row.

    Raises:
        ValueError: A weight is too large or not finite. The message names the table.
    """
    if row_format != "float32" and weight.numel():
        least, greatest = weight.aminmax()
        if not (least >= -_GREATEST and greatest <= _GREATEST):  # false for NaN
            raise ValueError(
                f"table {name!r} has weights from {float(least):g} to"
                f" {float(greatest):g}: {row_format} rows hold finite weights up to"
                f" {_GREATEST:g}"
            )


def packed(name: str, weight: Tensor, row_format: str) -> Tensor:
    """Converts rows to a row format.

    Args:
        name: The table's name, for error messages.
        weight: (R, dim) float32. The rows.
        row_format: A name in :data:`FORMATS`.

    Returns:
        For float32: ``weight``. For other formats: (R, :func:`row_bytes`) uint8. An
        int8 or int4 row begins with its scale and its bias, each in float16.

    Raises:
        ValueError: See :func:`check_range`.
    """
    check_range(name, weight, row_format)
    if row_format == "float32":
        return weight
    import fbgemm_gpu  # noqa: F401  (registers the ops that pack and read the rows; float32 rows need none)

    count, dim = weight.shape
    rows = torch.zeros(count, row_bytes(dim, row_format), dtype=torch.uint8)
    if count == 0:
        return rows
    if row_format == "float16":
        data = weight.half().view(torch.uint8)
        rows[:, : data.shape[1]] = data
        return rows
    data = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(
        weight,
        _BITS[row_format],
    )
    # FBGEMM's function writes the scale and the bias at the end of a row.
    numbers = data[:, :-_SCALE_AND_BIAS_BYTES]
    end = _SCALE_AND_BIAS_BYTES + numbers.shape[1]
    rows[:, :_SCALE_AND_BIAS_BYTES] = data[:, -_SCALE_AND_BIAS_BYTES:]
    rows[:, _SCALE_AND_BIAS_BYTES:end] = numbers
    return rows
