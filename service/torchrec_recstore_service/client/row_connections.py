"""The connections for rows to one server, and the errors of calls by them.

Tests: tests/service/test_shared_memory.py, test_native_rows.py and test_ports.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import grpc

from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire.protocol import ERROR_KEY

# the time after which a client that has got no connection asks for one again
_AGAIN_S = 10.0
MESSAGE_CODES = {code.value[0]: code for code in grpc.StatusCode}
"""gRPC's status codes by their numbers."""


class CallError(grpc.RpcError):  # type: ignore[misc]
    """A call by shared memory or by TCP has failed.

    It has the methods of the errors of calls by gRPC.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        details: str,
        error: str = "",
    ) -> None:
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


class ServedError(CallError):
    """The server has answered a call with an error.

    The connection can be used again.
    """


class DoesNotFitError(Exception):
    """A call does not fit into the segment, so that it has to go another way."""


def call_late() -> CallError:
    """Returns the error of a call whose time is over."""
    return CallError(grpc.StatusCode.DEADLINE_EXCEEDED, "the server has not answered")


def call_gone(reason: object) -> CallError:
    """Returns the error of a call whose server has gone."""
    return CallError(
        grpc.StatusCode.UNAVAILABLE,
        f"the connection for rows has ended: {reason}",
    )


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
        limit: The largest number of connections.
    """

    def __init__(
        self,
        attach: Callable[[float], pb.AttachReply],
        make: Callable[[pb.AttachReply], RowConnection | None],
        limit: int,
    ) -> None:
        self._attach = attach
        self._make = make
        self._limit = limit
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
            if self._open >= self._limit or time.monotonic() < self._not_before:
                return None
            self._open += 1
            offer = self._offer
        new_connection = None
        try:
            if offer is not None:
                new_connection = self._connect(offer)
            # the server may have been started again since a known offer
            if new_connection is None:
                offer = self._attach(left_s)
                new_connection = self._connect(offer)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
        finally:
            with self._lock:
                if new_connection is None:
                    self._open -= 1
                self._offer = offer if new_connection is not None else None
        if new_connection is None:
            self._not_before = time.monotonic() + _AGAIN_S
        return new_connection

    def _connect(self, offer: pb.AttachReply) -> RowConnection | None:
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
