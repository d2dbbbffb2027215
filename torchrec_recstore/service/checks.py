"""Checks of what users pass to a client, before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_recstore.service.spec import TableSpec


def checked_name(name: object) -> str:
    """The name of a table.

    Raises:
        TypeError, ValueError: it is no str, or empty.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {type(name).__name__}")
    if not name:
        raise ValueError("name must not be empty")
    return name


def checked_shape(name: str, shape: Sequence[int]) -> tuple[int, int]:
    """The rows that a table is expected to have, and its dim.

    Raises:
        TypeError, ValueError: ``shape`` is something else.
    """
    if not isinstance(shape, Sequence) or any(isinstance(n, bool) or not isinstance(n, int) for n in shape):
        raise TypeError(f"table {name!r}: shape must be two ints, (rows, dim), got {shape!r}")
    if len(shape) != 2 or min(shape) < 1:
        raise ValueError(f"table {name!r}: shape must be two ints above 0, (rows, dim), got {tuple(shape)}")
    return shape[0], shape[1]


def checked_ids(name: str, ids: object) -> Tensor:
    """Ids as the tables take them.

    Raises:
        TypeError, ValueError: they are not (N,) int64 on the CPU.
    """
    if not isinstance(ids, Tensor):
        raise TypeError(f"table {name!r}: ids must be an int64 tensor, got {type(ids).__name__}")
    if ids.dtype is not torch.int64:
        raise TypeError(f"table {name!r}: ids must be an int64 tensor, got {ids.dtype}")
    if ids.dim() != 1:
        raise ValueError(f"table {name!r}: ids must have the shape (N,), got {tuple(ids.shape)}")
    return _on_cpu(name, "ids", ids)


def checked_rows(name: str, argument: str, rows: object, ids: Tensor, spec: TableSpec) -> Tensor:
    """Rows of ``ids`` as the tables take them.

    Raises:
        TypeError, ValueError: they are not (N, dim) of the table's dtype or float32, on the CPU.
    """
    names = " or ".join(sorted({str(kind).removeprefix("torch.") for kind in (torch.float32, spec.dtype)}))
    if not isinstance(rows, Tensor):
        raise TypeError(f"table {name!r}: {argument} must be a {names} tensor, got {type(rows).__name__}")
    if rows.dtype not in (torch.float32, spec.dtype):
        raise TypeError(f"table {name!r}: {argument} must be a {names} tensor, got {rows.dtype}")
    if tuple(rows.shape) != (len(ids), spec.dim):
        raise ValueError(
            f"table {name!r}: {argument} must have the shape ({len(ids)}, {spec.dim}), got {tuple(rows.shape)}"
        )
    return _on_cpu(name, argument, rows)


def _on_cpu(name: str, argument: str, tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu":
        raise ValueError(f"table {name!r}: {argument} must be on the CPU, got {tensor.device}")
    return tensor.detach().contiguous()
