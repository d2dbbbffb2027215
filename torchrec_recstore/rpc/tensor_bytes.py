"""Tensors as the protocol carries them: raw bytes, contiguous, little-endian as every machine that torch runs on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_bytes(tensor: Tensor) -> bytes:
    """A tensor's elements."""
    flat: Tensor = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().tobytes()


def from_bytes(parts: Iterable[bytes], dtype: torch.dtype, columns: int | None = None) -> Tensor:
    """The tensor that parts make up one after the other: (n,), or (n, columns).

    Raises:
        ValueError: they end within an element or a row.
    """
    parts = list(parts)
    size = dtype.itemsize * (1 if columns is None else columns)
    total = sum(map(len, parts))
    if total % size:
        raise ValueError(f"{total} bytes are no whole number of {size}")
    out = torch.empty(total, dtype=torch.uint8)
    fill(out, parts)
    flat: Tensor = out.view(dtype)
    return flat if columns is None else flat.view(-1, columns)


def fill(out: Tensor, parts: Iterable[bytes]) -> int:
    """Writes parts one after the other into ``out``, (n,) uint8; returns the number of bytes.

    Raises:
        ValueError: they are longer.
    """
    place = 0
    array = out.numpy()
    for part in parts:
        if place + len(part) > len(array):
            raise ValueError(f"more than {len(array)} bytes")
        array[place : place + len(part)] = np.frombuffer(part, np.uint8)
        place += len(part)
    return place


def rows_at(rows: Tensor, places: Tensor) -> Tensor:
    """``rows[places]`` of (N, columns), on the calling thread alone.

    Many threads serve calls, and torch's pool has a team of threads for each that uses it: teams that wait for work
    took more time than the work (8 ms for 25,000 rows of 256 bytes, 0.2 ms so).
    """
    out = rows.new_empty(len(places), rows.shape[1])
    if out.numel():
        _whole_rows(out)[:] = _whole_rows(rows.contiguous())[places.numpy()]
    return out


def put_rows(out: Tensor, places: Tensor, rows: bytes) -> None:
    """``out[places] = rows``, likewise, with the rows as bytes; ``out`` (N, columns) is contiguous."""
    view = _whole_rows(out)
    view[places.numpy()] = np.frombuffer(rows, view.dtype)


def _whole_rows(rows: Tensor) -> np.ndarray[Any, Any]:
    """(N,): each row one element."""
    return rows.detach().view(torch.uint8).numpy().view(f"V{rows.shape[1] * rows.dtype.itemsize}")[:, 0]
