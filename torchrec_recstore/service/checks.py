"""Checks of what users pass to a client, before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from torchrec_recstore.service.spec import TableSpec
from torchrec_recstore.store.arguments import check_ids, check_rows


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
    check_ids(ids, f"table {name!r}: ")
    return cast(Tensor, ids).detach().contiguous()


def checked_rows(name: str, argument: str, rows: object, ids: Tensor, spec: TableSpec) -> Tensor:
    """Rows of ``ids`` as the tables take them.

    Raises:
        TypeError, ValueError: they are not (N, dim) of the table's dtype or float32, on the CPU.
    """
    dtypes = sorted((torch.float32, spec.dtype), key=str)
    check_rows(rows, argument, (len(ids), spec.dim), dtypes, f"table {name!r}: ")
    return cast(Tensor, rows).detach().contiguous()
