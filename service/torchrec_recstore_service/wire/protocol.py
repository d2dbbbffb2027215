"""Definitions that client and server share in addition to recstore.proto: errors,
headers, and tensors as bytes.

Tests: tests/service/tables/test_limits.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor

from torchrec_recstore.utils import StorageError

VERSION = "2"
ROWS_VERSION = 3
"""The version of connections for rows by TCP.

Those of version 2 do not name the server.
"""
VERSION_KEY = "recstore-protocol"
TOKEN_KEY = "authorization"
ERROR_KEY = "recstore-error"
"""The key in the trailing metadata of an error under which the server sends the name of
the error's class.
"""
NO_INITIAL_ROW = "NoInitialRow"
"""The name of the error that an id has no row and that only the client's ``init_func``
can create it.
"""
SAVE_SUPERSEDED = "SaveSuperseded"
"""The name of the error that another save has got the turn of a save that had not begun
to prepare.
"""
SERVER_RESUMED = "ServerResumed"
"""The name of the error that a server was stopped and started again: it waits, or the
call is for an earlier run.
"""

NOT_PRIMARY = "NotPrimaryError"
"""The name of the error that the server is one of a pair, and not the primary.

It has done nothing.
"""
REPLICA_KEY = "recstore-replica"
"""The key of the metadata of calls that a primary repeats on its backup."""

WRITE_BYTES = 1 << 27
"""The largest size in bytes of the arrays of a write, by default.

Other calls on the table wait for a write.
"""
BYTES_A_WRITTEN_ID = 128
"""A write has at most one id for so many bytes of its largest size.

A new row takes time even if it is short.
"""

_ERROR_BYTES = 4000
PART_IDS = 1 << 16
PART_BYTES = 1 << 20
FRAME_BYTES = 1 << 22
"""The largest size of a frame of HTTP/2 in bytes. gRPC's default of 16 KiB costs a
fifth of the time of large calls.
"""
MESSAGE_BYTES = (1 << 26) + (1 << 20)
"""The largest size of a message in bytes.

It is larger than ``PART_BYTES``, because a row is not split and may have up to 2**24
columns.
"""


class ServiceError(StorageError):
    """A parameter server cannot be reached, refuses access or has failed.

    The message names the server and the table.

    Args:
        message: The message.
        kind: The name of the error that the server has raised, if it has raised one.
            Default: "".
    """

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        """The name of the error that the server has raised.

        Empty if it has raised none.
        """


class ServerRestartedError(ServiceError):
    """A server has lost the writes of this client since its last save: it was killed,
    or a save was loaded.

    The server's tables are those of a save. To continue from a save, call
    ``RecStoreClient.load`` or make a new client.
    """

    repeated = False
    """Whether an earlier attempt of the same call may have been carried out."""


class ServerSetError(ServiceError):
    """The servers are not one set in one epoch: a server was killed, is empty, or
    belongs to other servers.

    The message says in which state each server is, and names the command that brings
    all servers to one save.
    """


class NoInitialRow(ValueError):
    """An id has no row, and the row can only be made by a client that has the table's
    ``init_func``.

    Args:
        name: The name of the table.
        pending: (n,) int64. The positions in the call's ``ids`` for which the call was
            not carried out, so that the caller can repeat the call for these ids. None:
            unknown.
    """

    def __init__(self, name: str, pending: Tensor | None = None) -> None:
        super().__init__(
            f"table {name!r} has rows that an init_func or row_func makes, and an id"
            " has none yet: call init_data with that function first"
        )
        self.pending = pending


class Status(NamedTuple):
    """What a client is told of an error: gRPC's status code, the message, and the name
    of the Python exception.
    """

    code: int
    details: str
    error: str


# The errors of a server that clients raise with the same class.
REMOTE_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (
        ValueError,
        TypeError,
        MemoryError,
        FileExistsError,
        FileNotFoundError,
        OSError,
        ServerRestartedError,
    )
}


def token_value(token: str) -> str:
    """Returns the value of the header ``TOKEN_KEY`` for a token."""
    return f"Bearer {token}"


def rows_a_part(row_bytes: int) -> int:
    """Returns the number of rows of ``row_bytes`` bytes in one part of a stream."""
    return max(1, min(PART_IDS, PART_BYTES // max(1, row_bytes)))


def to_bytes(tensor: Tensor) -> bytes:
    """Returns the elements of a tensor as bytes."""
    return as_bytes(tensor).numpy().tobytes()


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns the elements of a tensor as bytes, (n,) uint8, without a copy if the
    tensor is contiguous.
    """
    flat: Tensor = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return flat


def from_bytes(
    parts: Iterable[bytes],
    dtype: torch.dtype,
    columns: int | None = None,
) -> Tensor:
    """Concatenates parts of bytes to a tensor.

    Args:
        parts: The parts, in order.
        dtype: The data type of the tensor.
        columns: The number of columns. Default: None, for a tensor of one dimension.

    Returns:
        (n,), or (n, columns).

    Raises:
        ValueError: The bytes end within an element or a row.
    """
    parts = list(parts)
    out = torch.empty(sum(map(len, parts)), dtype=torch.uint8)
    fill(out, parts)
    return array_of(out, dtype, columns)


def array_of(
    content: Tensor,
    dtype: torch.dtype,
    columns: int | None = None,
) -> Tensor:
    """Returns bytes, (n,) uint8, as a tensor without a copy.

    Args:
        content: The bytes.
        dtype: The data type of the tensor.
        columns: The number of columns. Default: None, for a tensor of one dimension.

    Returns:
        (n,), or (n, columns).

    Raises:
        ValueError: The bytes end within an element or a row.
    """
    size = dtype.itemsize * (1 if columns is None else columns)
    if len(content) % size:
        raise ValueError(f"{len(content)} bytes are not a multiple of {size}")
    flat: Tensor = content.view(dtype)
    return flat if columns is None else flat.view(-1, columns)


def fill(out: Tensor, parts: Iterable[bytes]) -> int:
    """Writes parts of bytes to the beginning of ``out``, (n,) uint8, and returns their
    total size in bytes.

    Raises:
        ValueError: The parts are larger than ``out``.
    """
    place = 0
    array = out.numpy()
    for part in parts:
        if place + len(part) > len(array):
            raise ValueError(f"more than {len(array)} bytes")
        array[place : place + len(part)] = np.frombuffer(part, np.uint8)
        place += len(part)
    return place


def shortened(details: str) -> str:
    """Removes the middle of a long message, because gRPC sends it in a header, as
    percent-encoded UTF-8.
    """
    if len(details) <= _ERROR_BYTES and len(quote(details)) <= _ERROR_BYTES:
        return details
    half = _ERROR_BYTES // 2
    end = _fitting(details[: -half - 1 : -1], half)[::-1]
    return f"{_fitting(details[:half], half)} ... {end}"


def _fitting(text: str, size: int) -> str:
    """Returns the longest beginning of ``text`` that has at most ``size`` bytes as
    percent-encoded UTF-8.
    """
    for place, character in enumerate(text):
        size -= len(quote(character))
        if size < 0:
            return text[:place]
    return text
