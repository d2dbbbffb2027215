"""Checks of the ids and rows that users pass to a table or a client, and sets of ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def among(ids: Tensor, ascending: Tensor) -> Tensor:
    """Which of ``ids``, (N,), are in ``ascending``, (M,): (N,) bool. A few times faster than ``torch.isin``."""
    if not len(ascending):
        return torch.zeros_like(ids, dtype=torch.bool)
    return ascending[torch.searchsorted(ascending, ids).clamp_(max=len(ascending) - 1)] == ids


def check_ids(ids: object, where: str = "") -> None:
    """Refuses what is not (N,) int64 on the CPU.

    Args:
        ids: what was passed.
        where: what the message begins with.

    Raises:
        TypeError, ValueError: another type, dtype, shape or device.
    """
    if not isinstance(ids, Tensor):
        raise TypeError(f"{where}ids must be an int64 tensor, got {type(ids).__name__}")
    if ids.dtype is not torch.int64:
        raise TypeError(f"{where}ids must be an int64 tensor, got {ids.dtype}")
    if ids.dim() != 1:
        raise ValueError(f"{where}ids must have the shape (N,), got {tuple(ids.shape)}")
    _check_on_cpu(ids, "ids", where)


def check_rows(
    rows: object, argument: str, shape: tuple[int, int], dtypes: Sequence[torch.dtype], where: str = ""
) -> None:
    """Refuses what is not of that shape and one of these dtypes, on the CPU.

    Args:
        rows: what was passed.
        argument: its name.
        shape: (N, columns).
        dtypes: in the order in which the message names them, each once.
        where: what the message begins with.

    Raises:
        TypeError, ValueError: another type, dtype, shape or device.
    """
    names = " or ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes))
    if not isinstance(rows, Tensor):
        raise TypeError(f"{where}{argument} must be a {names} tensor, got {type(rows).__name__}")
    if rows.dtype not in dtypes:
        raise TypeError(f"{where}{argument} must be a {names} tensor, got {rows.dtype}")
    if tuple(rows.shape) != shape:
        raise ValueError(f"{where}{argument} must have the shape {shape}, got {tuple(rows.shape)}")
    _check_on_cpu(rows, argument, where)


def _check_on_cpu(tensor: Tensor, argument: str, where: str) -> None:
    if tensor.device.type != "cpu":
        raise ValueError(f"{where}{argument} must be on the CPU, got {tensor.device}")
