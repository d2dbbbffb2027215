"""The protocol of cold stores, its error, and the byte encodings that the
implementations share.

Tests: tests/store/test_conformance.py.
"""

from __future__ import annotations

import ctypes
import hashlib
import secrets
import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Protocol
from urllib.parse import quote

import torch
from torch import Tensor

from torchrec_recstore.row_types import as_numbers
from torchrec_recstore.utils import StorageError

ID_BYTES = 8
_SIGN = -(2**63)


class ColdStoreError(StorageError):
    """A cold store cannot be read or written. The message names the store."""


class ColdStore(Protocol):
    """The protocol of a cold store: it stores the rows of one shard of one table by id.

    A row is a string of bytes.

    The store returns a row byte for byte as it was put, until the row is put again or
    deleted. A call has finished its work when it returns. A call that raises an error
    may be repeated. Calls come from one thread at a time, but not always from the same
    thread. Only the iterator of :meth:`scan` may be used while other calls run, and
    only if ``ascending_snapshots`` is True.

    Every call raises :class:`ColdStoreError` if the store cannot be reached, is full,
    or has lost rows.
    """

    ascending_snapshots: bool
    """Whether :meth:`scan` returns ids in ascending order, and the rows as they were
    when it was called, even if rows are put or deleted before the iterator is
    exhausted.

    If it is False, the table scans the store only while the store does not change.
    """

    def get(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Reads the rows of ``ids``, (N,) int64, distinct.

        Returns:
            Which ids have a row, (N,) bool, and the rows of these ids, (n, row bytes)
            uint8, in the order of ``ids``.
        """

    def put(self, ids: Tensor, rows: Tensor) -> None:
        """Writes ``rows``, (N, row bytes) uint8, of ``ids``, (N,) int64, distinct, and
        overwrites existing rows.
        """

    def delete(self, ids: Tensor) -> None:
        """Deletes the rows of ``ids``, (N,) int64. Ids without a row are ignored."""

    def scan(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Returns an iterator over all rows, each once: batches of ids, (n,) int64, and
        rows, (n, row bytes) uint8.
        """

    def close(self) -> None:
        """Deletes all rows and frees all resources.

        The store may be closed twice. Every other call then raises.
        """


class SharedColdStore(ColdStore, Protocol):
    """The protocol of a cold store that several tables of the same name read and write:
    its options set ``shared``.

    The store may have rows when it is opened, and keeps its rows when it is closed.
    :meth:`scan` may return each row as it was at any time since the call. It may leave
    out rows that other jobs delete in the meantime.
    """

    def ids(self) -> Tensor:
        """Returns the ids of all rows, (N,) int64, distinct."""


def id_bytes(ids: Tensor) -> Tensor:
    """Encodes ids, (N,) int64, as (N, 8) uint8: big-endian, with the sign bit flipped,
    so that bytes sort as ids.
    """
    big_endian = _swapped(ids ^ _SIGN).contiguous()
    return big_endian.view(torch.uint8).view(-1, ID_BYTES)


def ids_of(encoded: Tensor) -> Tensor:
    """Returns the ids, (N,) int64, that :func:`id_bytes` has encoded as ``encoded``,
    (N, 8) uint8.
    """
    big_endian = as_numbers(encoded, torch.int64).squeeze(1)
    return _swapped(big_endian) ^ _SIGN


def _swapped(words: Tensor) -> Tensor:
    """Reverses the bytes of each int64 value.

    It is six times as fast as ``torch.flip`` of the bytes.
    """
    for bits, mask in (
        (8, 0x00FF00FF00FF00FF),
        (16, 0x0000FFFF0000FFFF),
        (32, 0x00000000FFFFFFFF),
    ):
        to_upper = (words & mask) << bits
        to_lower = (words >> bits) & mask
        words = to_upper | to_lower
    return words


def split(table: Tensor) -> list[bytes]:
    """Returns each row of ``table``, (N, width) uint8, as a bytes object, without a
    Python loop over the rows.
    """
    table = table.contiguous()
    if not table.numel():
        return [b""] * len(table)
    data = ctypes.string_at(table.data_ptr(), table.numel())
    rows = struct.iter_unpack(f"{table.size(1)}s", data)
    return list(chain.from_iterable(rows))


def in_parts(tensor: Tensor, n: int) -> list[Tensor]:
    """Splits ``tensor`` into parts of at most ``n`` rows, in order.

    An empty tensor is one part.
    """
    return list(torch.split(tensor, n))


def join(pieces: Iterable[bytes], width: int) -> Tensor:
    """Concatenates bytes objects to a tensor, (N, width) uint8.

    Their total size is a multiple of ``width``.
    """
    data = bytearray().join(pieces)
    if not data:  # torch.frombuffer refuses it
        return torch.empty(0, width, dtype=torch.uint8)
    return torch.frombuffer(data, dtype=torch.uint8).view(-1, width)


def found_rows(values: Sequence[bytes | None], width: int) -> tuple[Tensor, Tensor]:
    """Returns which values are neither None nor empty, (N,) bool, and these values, (n,
    width) uint8.
    """
    rows = join(filter(None, values), width)
    if len(rows) == len(values):
        return torch.ones(len(values), dtype=torch.bool), rows
    has_row = bytearray(map(bool, values))
    return torch.frombuffer(has_row, dtype=torch.bool), rows


def escaped_name(name: str) -> str:
    """Encodes ``name``, uniquely, as a file name of at most 128 characters that is also
    valid in a Redis pattern.
    """
    escaped = quote(name, safe="").replace(".", "%2E") or "%"
    if len(escaped) <= 128:
        return escaped
    digest = hashlib.sha256(name.encode()).hexdigest()
    return f"{escaped[:100]}~{digest[:24]}"


def new_run() -> str:
    """Returns 12 random hexadecimal digits, which tell apart the stores in one
    directory or on one server.
    """
    return secrets.token_hex(6)
