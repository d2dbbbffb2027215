"""The protocol of cold stores, its error, and the byte encodings that the implementations share."""

from __future__ import annotations

import ctypes
import hashlib
import secrets
import struct
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Protocol
from urllib.parse import quote

import torch
from torch import Tensor

from torchrec_recstore.ops import RowTensors


class ColdStoreError(RuntimeError):
    """A cold store cannot be read or written; the message names it."""


class ColdStore(Protocol):
    """Rows, as bytes, by id: those of one shard of one table.

    A row comes back as it was put, byte for byte, until it is put again or deleted. What a call has done is done when
    it returns; one that raises may be repeated. Calls come from one thread at a time, not always the same; what
    :meth:`scan` has given is read on beside them where ``ascending_snapshots`` is set.

    Every call raises :class:`ColdStoreError` where the store cannot be reached, is full, or has lost rows.
    """

    ascending_snapshots: bool
    """Whether :meth:`scan` gives ids in ascending order and the rows of the moment of its call, whatever is put or
    deleted before it is exhausted. Other stores are scanned while nothing changes."""

    def get(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Reads rows.

        Args:
            ids: (N,) int64, distinct.

        Returns:
            (N,) bool, which of them are there, and the rows of these, (their number, row bytes) uint8, in the order of
            ``ids``.
        """

    def put(self, ids: Tensor, rows: Tensor) -> None:
        """Writes or overwrites rows: ids (N,) int64, distinct, rows (N, row bytes) uint8."""

    def delete(self, ids: Tensor) -> None:
        """Forgets rows, of ids (N,) int64; those that are not there are passed over."""

    def scan(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Every id that is there, once, and its row, batch by batch: ids (n,) int64, rows (n, row bytes) uint8."""

    def close(self) -> None:
        """Forgets all rows and frees what the store takes. Closing twice is fine; any other call then raises."""


class SharedColdStore(ColdStore, Protocol):
    """Rows that other tables of the same name read and write too: where the options' ``shared`` is set.

    It is not empty when it is opened, and keeps its rows when it is closed. Rows of a :meth:`scan` are of any moment
    since its call, and those that others delete meanwhile are passed over.
    """

    def ids(self) -> Tensor:
        """(N,) int64: every id that is there, once."""


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
