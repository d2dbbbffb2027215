"""How an exported table's rows are stored: FBGEMM's formats, which TorchRec's quantised modules read as they are."""

from __future__ import annotations

import torch
from torch import Tensor

FORMATS = {torch.float32: "float32", torch.float16: "float16", torch.int8: "int8", torch.quint4x2: "int4"}
"""Names of the data types that rows are exported in."""

DTYPES = {"float32": torch.float32, "fp16": torch.float16, "int8": torch.int8, "int4": torch.quint4x2}
"""The data types by what commands call them."""

TYPE_NUMBERS = {"float16": 1, "int8": 2, "int4": 3}
"""``SparseType.as_int()`` of fbgemm-gpu 1.8.0."""

FORMAT_NAMES = {0: "float32"} | {number: name for name, number in TYPE_NUMBERS.items()}
"""The names by these numbers."""

_ALIGNMENT = 16  # bytes, torchrec.quant's DEFAULT_ROW_ALIGNMENT (1.8.0)
_GREATEST = torch.finfo(torch.float16).max
_BITS = {"float16": 16, "int8": 8, "int4": 4}
_MULTIPLES = {"int8": 2, "int4": 4}
"""What the dim must be a multiple of: FBGEMM packs rows into whole pairs of bytes (fbgemm-gpu 1.8.0)."""


def check_dtype(dtype: torch.dtype) -> str:
    """The name of a format.

    Raises:
        ValueError: rows are not exported in that data type.
    """
    if dtype not in FORMATS:
        names = ", ".join(map(str, FORMATS))
        raise ValueError(f"dtype must be one of {names} (which is TorchRec's int4), got {dtype}")
    return FORMATS[dtype]


def check_dim(name: str, dim: int, row_format: str) -> None:
    """Refuses a table whose rows the format cannot hold.

    Raises:
        ValueError: the message names the table.
    """
    multiple = _MULTIPLES.get(row_format, 1)
    if dim % multiple:
        raise ValueError(f"table {name!r} has dim {dim}: {row_format} rows need a multiple of {multiple}")


def row_bytes(dim: int, row_format: str) -> int:
    """Of one row."""
    if row_format == "float32":
        return dim * 4
    size = dim * _BITS[row_format] // 8 + (0 if row_format == "float16" else 4)
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def check_range(name: str, weight: Tensor, row_format: str) -> None:
    """Refuses weights that a format cannot hold: all but float32 keep numbers as float16, if only scale and bias.

    Raises:
        ValueError: the message names the table.
    """
    if row_format != "float32" and weight.numel():
        least, greatest = weight.aminmax()
        if not (least >= -_GREATEST and greatest <= _GREATEST):  # nor where they are NaN
            raise ValueError(
                f"table {name!r} has weights from {float(least):g} to {float(greatest):g}: {row_format} rows hold "
                f"finite ones up to {_GREATEST:g}"
            )


def packed(name: str, weight: Tensor, row_format: str) -> Tensor:
    """Rows as they are stored.

    Args:
        name: of the table.
        weight: (R, dim) float32.
        row_format: of :data:`FORMATS`.

    Returns:
        (R, dim) float32 as it is; else (R, :func:`row_bytes`) uint8: int8 and int4 rows begin with their scale and
        bias, float16 each.

    Raises:
        ValueError: see :func:`check_range`.
    """
    check_range(name, weight, row_format)
    if row_format == "float32":
        return weight
    import fbgemm_gpu  # noqa: F401  (registers the ops that pack and read these; float32 rows do without)

    out = torch.zeros(len(weight), row_bytes(weight.shape[1], row_format), dtype=torch.uint8)
    if len(weight) == 0:
        return out
    if row_format == "float16":
        data = weight.half().view(torch.uint8)
        out[:, : data.shape[1]] = data
        return out
    data = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(weight, _BITS[row_format])
    out[:, :4] = data[:, -4:]
    out[:, 4 : data.shape[1]] = data[:, :-4]
    return out
