"""What cold stores share: rows and ids as bytes objects and back, and the names under which a store keeps its own."""

from __future__ import annotations

import ctypes
import hashlib
import secrets
import struct
from collections.abc import Iterable
from itertools import chain
from urllib.parse import quote

import torch
from torch import Tensor

ID_BYTES = 8
_SIGN = -(2**63)


def check_ids(ids: Tensor) -> None:
    """Raises TypeError or ValueError where ``ids`` are not (N,) int64."""
    if ids.dtype != torch.int64:
        raise TypeError(f"ids must be int64, got {ids.dtype}")
    if ids.dim() != 1:
        raise ValueError(f"ids must be of shape (N,), got {tuple(ids.shape)}")


def check_rows(ids: Tensor, rows: Tensor, row_bytes: int) -> None:
    """Raises TypeError or ValueError where ``ids`` are not (N,) int64 and ``rows`` (N, row_bytes) uint8."""
    check_ids(ids)
    if rows.dtype != torch.uint8:
        raise TypeError(f"rows must be uint8, got {rows.dtype}")
    if rows.shape != (len(ids), row_bytes):
        raise ValueError(f"rows must be of shape ({len(ids)}, {row_bytes}), got {tuple(rows.shape)}")


def id_bytes(ids: Tensor) -> Tensor:
    """(N, 8) uint8: ids (N,) int64, big-endian with the sign bit flipped, so that bytes sort as ids do."""
    return _swapped(ids ^ _SIGN).contiguous().view(torch.uint8).view(-1, ID_BYTES)


def ids_of(encoded: Tensor) -> Tensor:
    """(N,) int64, of what :func:`id_bytes` gave."""
    swapped = torch.empty(len(encoded), ID_BYTES, dtype=torch.uint8).copy_(encoded)
    return _swapped(swapped.view(torch.int64).view(-1)) ^ _SIGN


def _swapped(words: Tensor) -> Tensor:
    """Each int64 with its bytes the other way round; flipping them as a dimension takes torch six times as long."""
    for bits, mask in ((8, 0x00FF00FF00FF00FF), (16, 0x0000FFFF0000FFFF), (32, 0x00000000FFFFFFFF)):
        words = (words & mask) << bits | (words >> bits) & mask
    return words


def split(table: Tensor) -> list[bytes]:
    """Each row of (N, width) uint8 as a bytes object; no Python runs for each."""
    table = table.contiguous()
    if not table.numel():
        return [b""] * len(table)
    data = ctypes.string_at(table.data_ptr(), table.numel())
    return list(chain.from_iterable(struct.iter_unpack(f"{table.size(1)}s", data)))


def in_parts(tensor: Tensor, n: int) -> list[Tensor]:
    """Parts of at most ``n`` rows, in order; one part where there are none."""
    return [tensor[begin : begin + n] for begin in range(0, max(1, len(tensor)), n)]


def join(pieces: Iterable[bytes], width: int) -> Tensor:
    """(N, width) uint8: bytes objects one after the other, which take a multiple of ``width`` together."""
    data = bytearray().join(pieces)
    # frombuffer refuses an empty buffer.
    return torch.frombuffer(data, dtype=torch.uint8).view(-1, width) if data else torch.empty(0, width).byte()


def filled(values: Iterable[bytes | None]) -> Tensor:
    """(N,) bool: which values are neither None nor empty."""
    data = bytearray(map(bool, values))
    return torch.frombuffer(data, dtype=torch.bool) if data else torch.empty(0, dtype=torch.bool)


def escaped_name(name: str) -> str:
    """``name`` as a file name and a part of a Redis pattern: one name each, of at most 128 characters."""
    escaped = quote(name, safe="").replace(".", "%2E") or "%"
    if len(escaped) > 128:
        escaped = f"{escaped[:100]}~{hashlib.sha256(name.encode()).hexdigest()[:24]}"
    return escaped


def new_run() -> str:
    """12 hexadecimal digits, drawn by the system: stores that share a place are told apart by them."""
    return secrets.token_hex(6)
