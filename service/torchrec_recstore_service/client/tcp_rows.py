"""Reads and writes of rows by TCP, in the client: see "Calls on rows by TCP" in
recstore.proto.

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

from torchrec_recstore_service.client.shared_memory import (
    MESSAGE_CODES,
    CallError,
    ServedError,
    call_gone,
    call_late,
)
from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire.protocol import ROWS_VERSION
from torchrec_recstore_service.wire.table_rows import TableRows

_CALL_BYTES, _CALL_IDS = 1 << 30, 1 << 22  # of a read
_CONNECT_S, _HELLO_S = 1.0, 5.0
_AHEAD = 1 << 16  # bytes that are read at once while the size of a reply is not known
_MESSAGE = 32  # bytes of a reply without an error, or more
_PIECE = 1 << 18  # bytes that are written to a TLS connection at once


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
        self._end = time.monotonic() + _HELLO_S
        # a port that a firewall blocks does not answer
        raw = socket.create_connection((host, port), _CONNECT_S)
        try:
            raw.settimeout(_HELLO_S)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket: Any = (
                raw
                if context is None
                else context.wrap_socket(raw, server_hostname=host)
            )
            self._encrypted = context is not None
            self._ahead = np.empty(_AHEAD, np.uint8)
            self._view = memoryview(self._ahead)  # type: ignore[arg-type]
            # the bytes of _ahead that were received and not used
            self._from = self._to = 0
            self._most = _AHEAD
            secret = b"" if token is None else token.encode()
            name = server.encode()
            head = b"RECSTORE"
            for number in (ROWS_VERSION, len(secret), len(name)):
                head += number.to_bytes(4, "little")
            self._send(secret + name, [], head)
            if self._receive().server != server:
                raise OSError("another program has answered")
        except CallError as error:
            raw.close()
            refused = isinstance(error, ServedError)
            raise (RefusedError(error) if refused else OSError(str(error))) from None
        except BaseException:
            raw.close()
            raise

    def is_alive(self) -> bool:
        """Returns whether the server is still there. To be called between two calls."""
        arrived = select.poll()  # select cannot have a file descriptor above 1023
        arrived.register(self._socket, select.POLLIN)
        return self._from == self._to and not arrived.poll(0)

    def close(self) -> None:
        """Closes the connection. The server then forgets it."""
        self._socket.close()

    def pull(self, epoch: str, call: TableRows, left_s: float) -> bool:
        """See :meth:`Streams.pull`."""
        self._end = time.monotonic() + left_s
        most_tables = max(1, (1 << 20) // (512 + 4 * max(map(len, call.tables))))
        for header, ids, begin, size in call.reads(
            epoch, _CALL_BYTES, _CALL_IDS, most_tables
        ):
            self._send(
                pb.SegmentRequest(pull=header, ids=8 * ids.numel()).SerializeToString(),
                [ids.numpy()],
            )
            # Of a large reply, no more is read ahead than its message, because the rest
            # would be copied twice.
            self._most = _AHEAD if size < _AHEAD else _MESSAGE
            at, last = begin, False
            while not last:
                reply = self._receive()
                last = reply.last
                if reply.rows > begin + size - at:
                    return False
                memory = call.window(at, reply.rows)
                if memory is not None:
                    self._fill(memory)
                    at += reply.rows
                    continue
                at = call.put(self._array(reply.rows), at)
                if at < 0:
                    return False
            if at != begin + size:
                return False
        return True

    def found(
        self, header: pb.PullHeader, ids: Tensor, row_bytes: int, left_s: float
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`Streams.found`."""
        self._most = _AHEAD
        self._end = time.monotonic() + left_s
        arrays: tuple[list[Tensor], list[Tensor]] = ([], [])
        most = max(1, min(_CALL_IDS, _CALL_BYTES // max(1, row_bytes)))
        for place in range(0, max(1, len(ids)), most):
            some = ids[place : place + most]
            self._send(
                pb.SegmentRequest(
                    pull=header, ids=8 * some.numel()
                ).SerializeToString(),
                [some.numpy()],
            )
            reply = self._receive()
            for kind, size in zip(arrays, (reply.found, reply.rows), strict=True):
                kind.append(torch.from_numpy(self._array(size)))
        return torch.cat(arrays[0]), torch.cat(arrays[1])

    def write(
        self,
        header: pb.WriteHeader,
        call: TableRows,
        initial: TableRows | None,
        left_s: float,
    ) -> int:
        """See :meth:`Streams.write`."""
        self._end = time.monotonic() + left_s
        arrays: list[Any] = []
        for some in (call, initial):
            arrays += (
                [np.empty(0, np.uint8)] * 2
                if some is None
                else [some.ids.numpy(), some.stream()]
            )
        ids, rows, initial_ids, initial_rows = (array.nbytes for array in arrays)
        request = pb.SegmentRequest(
            write=header,
            ids=ids,
            rows=rows,
            initial_ids=initial_ids,
            initial_rows=initial_rows,
        )
        self._send(request.SerializeToString(), arrays)
        return int(self._receive().deleted)

    def _send(
        self, message: bytes, arrays: Sequence[Any], head: bytes | None = None
    ) -> None:
        """Sends a message, after its size if there is no other head, and arrays."""
        first = (len(message).to_bytes(4, "little") if head is None else head) + message
        contents = [
            first,
            *(memoryview(array).cast("B") for array in arrays if array.nbytes),
        ]
        self._socket.settimeout(max(0.001, self._end - time.monotonic()))
        try:
            sent = 0 if self._encrypted else self._socket.sendmsg(contents)
            for content in contents:
                for place in range(sent, len(content), _PIECE):
                    self._socket.sendall(content[place : place + _PIECE])
                sent = max(0, sent - len(content))
        except TimeoutError:
            raise call_late() from None
        except OSError as error:
            # a server that refuses a request says why before it closes the connection
            self._receive()
            raise call_gone(error) from None

    def _receive(self) -> pb.SegmentReply:
        size = 4
        has_size = False
        while True:
            if self._to - self._from >= size:
                end = self._from + size
                content = bytes(self._view[self._from : end])
                self._from = end
                if has_size:
                    break
                has_size, size = True, int.from_bytes(content, "little")
                if size > _AHEAD:
                    raise call_gone("the reply is too long")
                continue
            # the rest moves to the beginning
            if self._from + size > _AHEAD or self._from == self._to:
                rest = bytes(self._view[self._from : self._to])
                self._view[: len(rest)] = rest
                self._from, self._to = 0, len(rest)
            self._to += self._read(
                self._view[self._to : self._from + max(size, self._most)]
            )
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
        done = min(len(array), self._to - self._from)
        array[:done] = self._ahead[self._from : self._from + done]
        self._from += done
        view = memoryview(array)
        while done < len(view):
            done += self._read(view[done:])

    def _read(self, memory: memoryview) -> int:
        self._socket.settimeout(max(0.001, self._end - time.monotonic()))
        try:
            got = int(self._socket.recv_into(memory))
        except TimeoutError:
            raise call_late() from None
        except OSError as error:
            raise call_gone(error) from None
        if not got:
            raise call_gone("the connection was closed")
        return got
