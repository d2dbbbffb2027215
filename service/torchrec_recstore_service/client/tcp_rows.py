"""The client of "Calls on rows by TCP" in recstore.proto.

Tests: tests/service/test_native_rows.py.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np
import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from torchrec_recstore_service.client.row_connections import (
    MESSAGE_CODES,
    CallError,
    ServedError,
    call_gone,
    call_late,
)
from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire.protocol import ROWS_VERSION
from torchrec_recstore_service.wire.table_rows import TableRows

# the largest numbers of bytes of rows and of ids of a read
_CALL_BYTES = 1 << 30
_CALL_IDS = 1 << 22
_CONNECT_S = 1.0
_HELLO_S = 5.0
# bytes that are read at once while the size of a reply is not known
_AHEAD_BYTES = 1 << 16
_MESSAGE_BYTES = 32  # of a reply without an error, or more
_PIECE_BYTES = 1 << 18  # that are written to a TLS connection at once


class RefusedError(OSError):
    """A server has refused a connection."""

    def __init__(self, error: ServedError) -> None:
        super().__init__(str(error))
        self.is_from_it = error.code() is grpc.StatusCode.UNAVAILABLE
        """Whether the connection has reached its server, which is not the primary of
        its pair.
        """


class TcpConnection:
    """A connection to a server for one call at a time.

    See :class:`Streams` for the methods.

    Args:
        host: The host of the server.
        port: The port for calls on rows.
        token: The token that the server requires, or None.
        context: The context of TLS, or None for a connection without encryption.
        server: The name of the server, from its answer to ``Attach``. Another server
            refuses the connection.

    Raises:
        OSError: The server cannot be reached or has refused the connection, or another
            program has answered.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: str | None,
        context: ssl.SSLContext | None,
        server: str,
    ) -> None:
        self._deadline = time.monotonic() + _HELLO_S
        # a port that a firewall blocks does not answer
        raw = socket.create_connection((host, port), _CONNECT_S)
        try:
            raw.settimeout(_HELLO_S)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket: Any = raw
            if context is not None:
                self._socket = context.wrap_socket(raw, server_hostname=host)
            self._encrypted = context is not None
            self._ahead = np.empty(_AHEAD_BYTES, np.uint8)
            self._view = memoryview(self._ahead)  # type: ignore[arg-type]
            # the bytes of _ahead that were received and not used
            self._begin = 0
            self._end = 0
            # the bytes that are read at once
            self._read_bytes = _AHEAD_BYTES
            self._greet(token, server)
        except CallError as error:
            raw.close()
            if isinstance(error, ServedError):
                raise RefusedError(error) from None
            raise OSError(str(error)) from None
        except BaseException:
            raw.close()
            raise

    def _greet(self, token: str | None, server: str) -> None:
        """Tells the server who calls, and checks that it is the one that is meant."""
        secret = b"" if token is None else token.encode()
        name = server.encode()
        head = b"RECSTORE"
        for number in (ROWS_VERSION, len(secret), len(name)):
            head += number.to_bytes(4, "little")
        self._send(secret + name, [], head)
        if self._receive().server != server:
            raise OSError("another program has answered")

    def is_alive(self) -> bool:
        """Returns whether the server is still there. To be called between two calls."""
        arrived = select.poll()  # select cannot have a file descriptor above 1023
        arrived.register(self._socket, select.POLLIN)
        return self._begin == self._end and not arrived.poll(0)

    def close(self) -> None:
        """Closes the connection. The server then forgets it."""
        self._socket.close()

    def pull(
        self,
        epoch: str,
        call: TableRows,
        left_s: float,
    ) -> bool:
        """See :meth:`Streams.pull`."""
        self._deadline = time.monotonic() + left_s
        longest_name = max(len(name) for name in call.tables)
        # a header of at most a megabyte, in UTF-8
        most_tables = max(1, (1 << 20) // (512 + 4 * longest_name))
        for header, ids, begin, size in call.reads(
            epoch,
            _CALL_BYTES,
            _CALL_IDS,
            most_tables,
        ):
            request = pb.SegmentRequest(pull=header, ids=8 * ids.numel())
            self._send(request.SerializeToString(), [ids.numpy()])
            # Of a large reply, no more is read ahead than its message, because the rest
            # would be copied twice.
            self._read_bytes = _AHEAD_BYTES if size < _AHEAD_BYTES else _MESSAGE_BYTES
            position = begin
            is_last = False
            while not is_last:
                reply = self._receive()
                is_last = reply.last
                if reply.rows > begin + size - position:
                    return False
                memory = call.window(position, reply.rows)
                if memory is not None:
                    self._fill(memory)
                    position += reply.rows
                    continue
                position = call.put(self._array(reply.rows), position)
                if position < 0:
                    return False
            if position != begin + size:
                return False
        return True

    def existing_rows(
        self,
        header: pb.PullHeader,
        ids: Tensor,
        row_bytes: int,
        left_s: float,
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`Streams.existing_rows`."""
        self._read_bytes = _AHEAD_BYTES
        self._deadline = time.monotonic() + left_s
        has_row_parts: list[Tensor] = []
        row_parts: list[Tensor] = []
        most_ids = max(1, min(_CALL_IDS, _CALL_BYTES // max(1, row_bytes)))
        for begin in range(0, max(1, len(ids)), most_ids):
            part = ids[begin : begin + most_ids]
            request = pb.SegmentRequest(pull=header, ids=8 * part.numel())
            self._send(request.SerializeToString(), [part.numpy()])
            reply = self._receive()
            has_row_parts.append(torch.from_numpy(self._array(reply.found)))
            row_parts.append(torch.from_numpy(self._array(reply.rows)))
        return torch.cat(has_row_parts), torch.cat(row_parts)

    def write(
        self,
        header: pb.WriteHeader,
        call: TableRows,
        initial: TableRows | None,
        left_s: float,
    ) -> int:
        """See :meth:`Streams.write`."""
        self._deadline = time.monotonic() + left_s
        ids = call.ids.numpy()
        rows = call.stream()
        arrays: list[Any] = [ids, rows]
        request = pb.SegmentRequest(write=header, ids=ids.nbytes, rows=rows.nbytes)
        if initial is not None:
            initial_ids = initial.ids.numpy()
            initial_rows = initial.stream()
            arrays += [initial_ids, initial_rows]
            request.initial_ids = initial_ids.nbytes
            request.initial_rows = initial_rows.nbytes
        self._send(request.SerializeToString(), arrays)
        return int(self._receive().deleted)

    def _send(
        self,
        message: bytes,
        arrays: Sequence[Any],
        head: bytes | None = None,
    ) -> None:
        """Sends a message, after its size if there is no other head, and arrays."""
        if head is None:
            head = len(message).to_bytes(4, "little")
        contents: list[Any] = [head + message]
        for array in arrays:
            if array.nbytes:
                contents.append(memoryview(array).cast("B"))
        left_s = self._deadline - time.monotonic()
        self._socket.settimeout(max(0.001, left_s))
        try:
            sent = 0 if self._encrypted else self._socket.sendmsg(contents)
            for content in contents:
                for begin in range(sent, len(content), _PIECE_BYTES):
                    end = begin + _PIECE_BYTES
                    self._socket.sendall(content[begin:end])
                sent = max(0, sent - len(content))
        except TimeoutError:
            raise call_late() from None
        except OSError as error:
            # a server that refuses a request says why before it closes the connection
            self._receive()
            raise call_gone(error) from None

    def _receive(self) -> pb.SegmentReply:
        # Both pieces are read here, because a call of a function for each would be
        # felt in small replies.
        size = 4  # of the number before the message, and then of the message
        content = b""
        for is_message in (False, True):
            while self._end - self._begin < size:
                # the remaining bytes move to the beginning
                if self._begin + size > _AHEAD_BYTES or self._begin == self._end:
                    remaining = bytes(self._view[self._begin : self._end])
                    self._view[: len(remaining)] = remaining
                    self._begin = 0
                    self._end = len(remaining)
                most_end = self._begin + max(size, self._read_bytes)
                self._end += self._read(self._view[self._end : most_end])
            content_end = self._begin + size
            content = bytes(self._view[self._begin : content_end])
            self._begin = content_end
            if not is_message:
                size = int.from_bytes(content, "little")
                if size > _AHEAD_BYTES:
                    raise call_gone("the reply is too long")
        try:
            reply: pb.SegmentReply = pb.SegmentReply.FromString(content)
        except DecodeError:
            raise call_gone("the reply cannot be read") from None
        if reply.code:
            code = MESSAGE_CODES.get(reply.code, grpc.StatusCode.UNKNOWN)
            raise ServedError(code, reply.details, reply.error)
        return reply

    def _array(self, size: int) -> Any:
        array = np.empty(size, np.uint8)
        self._fill(array)
        return array

    def _fill(self, array: Any) -> None:
        """Receives the bytes of an array, (n,) uint8."""
        filled = min(len(array), self._end - self._begin)
        array[:filled] = self._ahead[self._begin : self._begin + filled]
        self._begin += filled
        view = memoryview(array)
        while filled < len(view):
            filled += self._read(view[filled:])

    def _read(self, memory: memoryview) -> int:
        self._socket.settimeout(max(0.001, self._deadline - time.monotonic()))
        try:
            size = int(self._socket.recv_into(memory))
        except TimeoutError:
            raise call_late() from None
        except OSError as error:
            raise call_gone(error) from None
        if not size:
            raise call_gone("the connection was closed")
        return size
