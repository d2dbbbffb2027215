"""Reads and writes of rows by shared memory, in the client: see SegmentRequest in
recstore.proto.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import grpc
import numpy as np
import torch
from torch import Tensor

from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire.protocol import ERROR_KEY
from torchrec_recstore_service.wire.segment import (
    MESSAGE_BYTES,
    Segment,
    is_available,
    is_same_user,
)
from torchrec_recstore_service.wire.table_rows import TableRows, aligned

# enough for the numbers of a header, and for those of a table in a header
_SETTINGS_BYTES = 256
_ALIGNING_BYTES = 256  # the most that four arrays of a call take beside their contents
_HELLO_S = 5.0
# A server names no other socket: listen_memory() in row_server.cpp.
_SOCKET = re.compile(r"recstore-[0-9a-f]{32}")
# the time after which a client that has got no connection asks for one again
_AGAIN_S = 10.0
MESSAGE_CODES = {code.value[0]: code for code in grpc.StatusCode}
"""gRPC's status codes by their numbers."""


class CallError(grpc.RpcError):  # type: ignore[misc]
    """A call by shared memory has failed.

    It has the methods of the errors of calls by gRPC.
    """

    def __init__(self, code: grpc.StatusCode, details: str, error: str = "") -> None:
        super().__init__(details)
        self._code = code
        self._details = details
        self._error = error

    def code(self) -> grpc.StatusCode:
        """Returns the status code."""
        return self._code

    def details(self) -> str:
        """Returns the message."""
        return self._details

    def trailing_metadata(self) -> Sequence[tuple[str, str]]:
        """Returns the name of the error that the server has raised, as the server sends
        it by gRPC.
        """
        return [(ERROR_KEY, self._error)] if self._error else []


class SharedMemoryConnection:
    """A connection to a server on this host, for one call at a time.

    See :class:`Streams` for the methods.

    Args:
        offer: The server's answer to ``Attach``.

    Raises:
        OSError: The server is on another host, runs as another user or has too many
            connections.
    """

    def __init__(self, offer: pb.AttachReply) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        file = None
        try:
            self._socket.settimeout(_HELLO_S)
            if not _SOCKET.fullmatch(offer.socket):
                raise OSError(
                    f"the server offers the socket {offer.socket[:100]!r}, which is no"
                    " server's"
                )
            self._socket.connect(f"\0{offer.socket}")
            if not is_same_user(self._socket):
                raise OSError("the server runs as another user")
            self._socket.send(offer.secret)
            size, files, _, _ = socket.recv_fds(self._socket, 32, 1)
            if not files:
                raise OSError("the server has closed the connection")
            file = files[0]
            self._segment = Segment(file, int(size))
        except BaseException:
            self._socket.close()
            raise
        finally:
            if file is not None:
                os.close(file)
        self._end = 0.0
        _of_this_process.add(self)

    def is_alive(self) -> bool:
        """Returns whether the server is still there. To be called between two calls."""
        try:
            self._socket.settimeout(0)
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def close(self) -> None:
        """Closes the connection. The server then forgets it."""
        self._socket.close()

    def pull(self, epoch: str, call: TableRows, left_s: float) -> bool:
        """See :meth:`Streams.pull`.

        A call that does not fit into the segment is made in parts.
        """
        self._end = time.monotonic() + left_s
        most_tables = max(
            1,
            (MESSAGE_BYTES - _SETTINGS_BYTES)
            // (_SETTINGS_BYTES + 4 * max(map(len, call.tables))),
        )
        most = self._segment.size
        for header, ids, begin, size in call.reads(epoch, most, most // 8, most_tables):
            self._send_ids(header, ids)
            done, last = 0, False
            while not last:
                reply = self._receive()
                done, last = aligned(done), reply.last
                if (
                    done + reply.rows > size
                    or call.put(
                        self._segment.array[done : done + reply.rows], begin + done
                    )
                    < 0
                ):
                    return False
                done += reply.rows
            if done != size:
                return False
        return True

    def found(
        self, header: pb.PullHeader, ids: Tensor, row_bytes: int, left_s: float
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`Streams.found`."""
        self._end = time.monotonic() + left_s
        most = (self._segment.size - 128) // max(row_bytes + 1, 8)
        arrays: tuple[list[Tensor], list[Tensor]] = ([], [])
        for begin in range(0, max(1, len(ids)), most):
            self._send_ids(header, ids[begin : begin + most])
            reply = self._receive()
            for kind, array in zip(
                arrays, self._segment.arrays([reply.found, reply.rows]), strict=True
            ):
                kind.append(array.clone())
        return torch.cat(arrays[0]), torch.cat(arrays[1])

    def write(
        self,
        header: pb.WriteHeader,
        call: TableRows,
        initial: TableRows | None,
        left_s: float,
    ) -> int:
        """See :meth:`Streams.write`.

        Raises:
            DoesNotFitError: The call does not fit into the segment. Nothing was sent.
        """
        self._end = time.monotonic() + left_s
        parts = [call] if initial is None else [call, initial]
        sizes = [size for some in parts for size in (8 * len(some.ids), some.size)]
        if (
            header.ByteSize() > MESSAGE_BYTES - _SETTINGS_BYTES
            or sum(sizes) > self._segment.size - _ALIGNING_BYTES
        ):
            raise DoesNotFitError
        arrays = self._segment.arrays(sizes)
        for number, some in enumerate(parts):
            arrays[2 * number].numpy()[:] = some.ids.numpy().view(np.uint8)
            some.take(arrays[2 * number + 1], 0)
        ids, rows, initial_ids, initial_rows = (*sizes, 0, 0)[:4]
        request = pb.SegmentRequest(
            write=header,
            ids=ids,
            rows=rows,
            initial_ids=initial_ids,
            initial_rows=initial_rows,
        )
        self._send(request)
        return int(self._receive().deleted)

    def _send_ids(self, header: pb.PullHeader, ids: Tensor) -> None:
        size = 8 * ids.numel()
        self._segment.array[:size].view(np.int64)[:] = ids.numpy()
        self._send(pb.SegmentRequest(pull=header, ids=size))

    def _send(self, request: pb.SegmentRequest) -> None:
        message = request.SerializeToString()
        self._socket.settimeout(max(0.001, self._end - time.monotonic()))
        try:
            self._socket.send(message)
        except TimeoutError:
            raise call_late() from None
        except OSError as error:
            raise call_gone(error) from None

    def _receive(self) -> pb.SegmentReply:
        self._socket.settimeout(max(0.001, self._end - time.monotonic()))
        try:
            message = self._socket.recv(MESSAGE_BYTES)
        except TimeoutError:
            raise call_late() from None
        except OSError as error:
            raise call_gone(error) from None
        if not message:
            raise call_gone("the connection was closed")
        reply: pb.SegmentReply = pb.SegmentReply.FromString(message)
        if reply.code:
            raise ServedError(MESSAGE_CODES[reply.code], reply.details, reply.error)
        return reply


def shared_memory(offer: pb.AttachReply) -> SharedMemoryConnection | None:
    """Makes a connection by shared memory, if the server offers one and this system has
    it.
    """
    return SharedMemoryConnection(offer) if offer.socket and is_available() else None


class DoesNotFitError(Exception):
    """A call does not fit into the segment, so that it has to go another way."""


class ServedError(CallError):
    """The server has answered a call with an error.

    The connection can be used again.
    """


class RowConnection(Protocol):
    """A connection for one call on rows at a time.

    It has the methods of :class:`Streams`, too.
    """

    def is_alive(self) -> bool:
        """Returns whether the server is still there. To be called between two calls."""

    def close(self) -> None:
        """Closes the connection. The server then forgets it."""


class RowConnections:
    """The connections of a client to one server for rows, by shared memory or by TCP.

    A call takes a connection for itself. If there is none, because the server does not
    offer one or has too many, calls go another way.

    Args:
        attach: The function that asks the server for what it offers, with the time left
            in seconds.
        make: The function that makes a connection. It returns None, or raises OSError,
            if there can be none.
        most: The largest number of connections.
    """

    def __init__(
        self,
        attach: Callable[[float], pb.AttachReply],
        make: Callable[[pb.AttachReply], RowConnection | None],
        most: int,
    ) -> None:
        self._attach = attach
        self._make = make
        self._most = most
        self._lock = threading.Lock()
        self._idle: list[RowConnection] = []
        self._open = 0
        self._offer: pb.AttachReply | None = None
        self._not_before = 0.0
        self._closed = False

    def take(self, left_s: float) -> RowConnection | None:
        """Returns a connection, which the caller gives back.

        None if the call has to go another way.

        Raises:
            grpc.RpcError: The server cannot be reached.
            ValueError: The client is closed.
        """
        with self._lock:
            if self._closed:
                raise ValueError("Cannot call a closed channel")
            while self._idle:
                connection = self._idle.pop()
                if connection.is_alive():
                    return connection
                self._drop(connection)
            if self._open >= self._most or time.monotonic() < self._not_before:
                return None
            self._open += 1
            offer = self._offer
        made = None
        try:
            if offer is not None:
                made = self._made(offer)
            # the server may have been started again since a known offer
            if made is None:
                offer = self._attach(left_s)
                made = self._made(offer)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
        finally:
            with self._lock:
                if made is None:
                    self._open -= 1
                self._offer = offer if made is not None else None
        if made is None:
            self._not_before = time.monotonic() + _AGAIN_S
        return made

    def _made(self, offer: pb.AttachReply) -> RowConnection | None:
        try:
            return self._make(offer)
        except OSError:
            return None

    def give_back(self, connection: RowConnection) -> None:
        """Takes a connection back after a call whose last reply has arrived."""
        with self._lock:
            if self._closed:
                self._drop(connection)
            else:
                self._idle.append(connection)

    def drop(self, connection: RowConnection) -> None:
        """Closes a connection whose call has not ended."""
        with self._lock:
            self._drop(connection)

    def close(self) -> None:
        """Closes all connections; those of running calls, when the calls end."""
        with self._lock:
            self._closed = True
            while self._idle:
                self._drop(self._idle.pop())

    def _drop(self, connection: RowConnection) -> None:
        connection.close()
        self._open -= 1
        self._offer = None  # the server may be another one by now


def call_late() -> CallError:
    """Returns the error of a call whose time is over."""
    return CallError(grpc.StatusCode.DEADLINE_EXCEEDED, "the server has not answered")


def call_gone(reason: object) -> CallError:
    """Returns the error of a call whose server has gone."""
    return CallError(
        grpc.StatusCode.UNAVAILABLE, f"the connection for rows has ended: {reason}"
    )


_of_this_process: weakref.WeakSet[SharedMemoryConnection] = weakref.WeakSet()


def _close_in_child() -> None:
    # The server must notice the end of the parent, although a forked process lives on.
    for connection in list(_of_this_process):
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)
