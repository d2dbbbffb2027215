"""Calls by shared memory, in the server: see SegmentRequest in recstore.proto.

Tests: tests/service/test_shared_memory.py.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import grpc
import torch
from google.protobuf.message import DecodeError

from torchrec_recstore.row_types import value_dtype
from torchrec_recstore_service.server.calls import Call, RequestMemory
from torchrec_recstore_service.server.credentials import Watched
from torchrec_recstore_service.server.native import CallCounts, CallRefusedError
from torchrec_recstore_service.server.pair import Pair
from torchrec_recstore_service.server.row_calls import RowCalls
from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire.protocol import PART_BYTES, Status, array_of, fill
from torchrec_recstore_service.wire.segment import (
    MESSAGE_BYTES,
    SEGMENT_BYTES,
    Segment,
    is_available,
    is_same_user,
    new_memory,
)
from torchrec_recstore_service.wire.table_rows import aligned

MOST_CONNECTIONS = 64
"""The largest number of connections of a server. A client that gets none calls by gRPC."""
_HELLO_S = 10.0
_STOP_S = 30.0
_PARTS = 4  # parts of a gRPC stream that are read at once, before the client copies their rows

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Connection:
    """A connection of a client."""

    socket: socket.socket
    token: str
    """The token with which the client has got the connection. Empty if the server requires none."""
    call: Call
    thread: threading.Thread | None = None
    segment: Segment | None = None
    file: int | None = None
    """The file descriptor of the segment, which knows how much memory the segment takes."""
    running: bool = False

    def size(self) -> int:
        """Returns the size in bytes of the memory that the segment takes now."""
        return 0 if self.file is None else os.fstat(self.file).st_blocks * 512


class SharedMemoryServer:
    """Takes calls of clients on this host that run as the same user. Each connection has a thread and a segment.

    The headers of calls are messages on a socket, which the kernel copies. A client can change the arrays in its
    segment at any time. Ids are therefore copied before they are used. The values of rows can be anything, so a change
    of them concerns only the rows that the client writes.

    Args:
        calls: The calls on rows.
        observer: The counts of calls.
        status: The function that returns what a client is told of an error, by the method and the error.
        pair: The part of the server in its pair.
    """

    def __init__(
        self,
        calls: RowCalls,
        observer: CallCounts,
        status: Callable[[str, Exception], Status],
        pair: Pair,
    ) -> None:
        self._pair = pair
        self._calls = calls
        self._observer = observer
        self._status = status
        self._key = secrets.token_bytes(16)
        self._token: Watched[str] | None = None
        self._memory = RequestMemory(0)
        self._listener: socket.socket | None = None
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, _Connection] = {}
        self._stopping = False

    def start(self, token: Watched[str] | None, memory: RequestMemory) -> None:
        """Takes connections, if the system supports it.

        Args:
            token: The token that clients must have. A connection whose token was replaced is closed at its next call.
            memory: The memory of the requests of all running calls, also of those by gRPC. The segments together are
                not larger than its limit.
        """
        self._token, self._memory = token, memory
        if not is_available():
            return
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0recstore-{secrets.token_hex(16)}")
        self._listener.listen(MOST_CONNECTIONS)
        threading.Thread(target=self._accept, args=(self._listener,), name="recstore-memory", daemon=True).start()

    def offer(self) -> pb.AttachReply:
        """Returns the address for clients."""
        if self._listener is None or self._stopping:
            return pb.AttachReply()
        return pb.AttachReply(socket=self._listener.getsockname()[1:].decode(), secret=self._secret(self._token_now))

    def gauges(self) -> dict[str, tuple[str, Callable[[], float]]]:
        """Returns numbers for the metrics. See :meth:`GrpcServer.gauges`."""

        def total(number: Callable[[_Connection], int]) -> Callable[[], int]:
            def add() -> int:
                with self._lock:
                    return sum(map(number, self._connections.values()))

            return add

        return {
            "shared_memory_connections": ("The number of connections by shared memory.", total(lambda _: 1)),
            "shared_memory_calls_running": (
                "The number of calls by shared memory that run.",
                total(lambda connection: connection.running),
            ),
            "shared_memory_bytes": (
                "The size of the memory that clients share with this server.",
                total(_Connection.size),
            ),
        }

    def stop(self) -> None:
        """Refuses new calls, and waits for the running ones."""
        with self._lock:
            self._stopping = True
            running = list(self._connections.values())
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # ends the accept in progress
            self._listener.close()
        for connection in running:
            with suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RD)  # a reply can still be sent
        end = time.monotonic() + _STOP_S
        for connection in running:
            if connection.thread is not None:
                connection.thread.join(max(0.0, end - time.monotonic()))

    @property
    def _token_now(self) -> str:
        return "" if self._token is None else self._token.value

    def _secret(self, token: str) -> bytes:
        """Returns what a client has to send first. Only a client with the token gets it."""
        return hmac.digest(self._key, token.encode(), "sha256")

    def _accept(self, listener: socket.socket) -> None:
        while not self._stopping:
            try:
                accepted = listener.accept()[0]
            except OSError:
                time.sleep(0.1)  # too many open files, or the end
                continue
            connection = _Connection(accepted, self._token_now, Call(accepted.close, self._memory))
            with self._lock:
                if not self._has_room() or not is_same_user(accepted):
                    accepted.close()
                    continue
                connection.thread = threading.Thread(
                    target=self._serve, args=(connection,), name="recstore-memory", daemon=True
                )
                self._connections[accepted] = connection
            try:
                connection.thread.start()
            except RuntimeError:  # the system has no more threads
                self._forget(connection)

    def _has_room(self) -> bool:
        """Returns whether a connection can be taken. Ends connections whose token was replaced, to make room."""
        for connection in self._connections.values():
            if connection.token != self._token_now:
                with suppress(OSError):
                    connection.socket.shutdown(socket.SHUT_RDWR)
        most = min(MOST_CONNECTIONS, self._memory.limit // SEGMENT_BYTES)
        return not self._stopping and len(self._connections) < most

    def _serve(self, connection: _Connection) -> None:
        try:
            self._greet(connection)
            while connection.segment is not None and (message := connection.socket.recv(MESSAGE_BYTES + 1)):
                self._answer(connection, connection.segment, message)
        except OSError:
            pass  # the client is gone, or the system has no memory for it
        except Exception:
            _log.exception("a connection by shared memory was closed")
        finally:
            self._forget(connection)

    def _forget(self, connection: _Connection) -> None:
        with self._lock:
            self._connections.pop(connection.socket, None)
            file, connection.file, connection.segment = connection.file, None, None
        connection.socket.close()
        if file is not None:
            os.close(file)

    def _greet(self, connection: _Connection) -> None:
        connection.socket.settimeout(_HELLO_S)
        if not hmac.compare_digest(connection.socket.recv(MESSAGE_BYTES), self._secret(connection.token)):
            return
        connection.file = new_memory(SEGMENT_BYTES)
        segment = Segment(connection.file, SEGMENT_BYTES)
        socket.send_fds(connection.socket, [b"%d" % SEGMENT_BYTES], [connection.file])
        connection.socket.settimeout(None)
        connection.segment = segment

    def _answer(self, connection: _Connection, segment: Segment, message: bytes) -> None:
        begin = time.perf_counter()
        method, outcome = "SharedMemory", "ok"
        connection.running = True
        try:
            if connection.token != self._token_now:
                connection.socket.shutdown(socket.SHUT_RD)  # the next call finds the end of the connection
                raise CallRefusedError(grpc.StatusCode.UNAUTHENTICATED, "the token is missing or wrong")
            self._pair.check_primary()
            request = _parsed(message)
            method = "Pull" if request.HasField("pull") else "Write"
            self._take_memory(connection.call, request, segment)
            if method == "Pull":
                self._pull(connection.socket, segment, request)
            else:
                self._write(connection.socket, segment, request)
        except ConnectionError:  # the client is gone
            outcome = "cancelled"
            raise
        except Exception as error:
            outcome = "refused" if isinstance(error, CallRefusedError) else type(error).__name__
            status = self._status(method, error)
            reply = pb.SegmentReply(last=True, code=status.code, details=status.details, error=status.error)
            connection.socket.send(reply.SerializeToString())
        finally:
            connection.running = False
            self._memory.give_back(connection.call)
            self._observer.call(method, outcome, time.perf_counter() - begin)

    def _take_memory(self, call: Call, request: pb.SegmentRequest, segment: Segment) -> None:
        """Counts the copies of the arrays of a request.

        Raises:
            ValueError: The arrays do not fit into the segment.
            CallRefusedError: The requests of all calls take too much memory.
        """
        sizes = [request.ids, request.rows, request.initial_ids, request.initial_rows]
        segment.arrays(sizes)
        if not self._memory.take(call, sum(sizes)):
            raise CallRefusedError(
                grpc.StatusCode.UNAVAILABLE,
                "the running requests of all clients take --max-request-memory: repeat the call",
            )

    def _pull(self, connection: socket.socket, segment: Segment, request: pb.SegmentRequest) -> None:
        header = request.pull
        specs = self._calls.readable(header)
        ids = array_of(segment.arrays([request.ids])[0].clone(), torch.int64)
        if header.want != pb.PullHeader.ROWS:
            row_bytes = specs[0].dim * value_dtype(specs[0].dtype).itemsize
            segment.arrays([len(ids), len(ids) * row_bytes if header.want == pb.PullHeader.FOUND_ROWS else 0])
            found = self._calls.found(header, ids)
            arrays = segment.arrays([len(found.found), len(found.rows)])
            for array, content in zip(arrays, (found.found, found.rows), strict=True):
                fill(array, [content])
            sizes = pb.SegmentReply(last=True, found=len(found.found), rows=len(found.rows))
            connection.send(sizes.SerializeToString())
            return
        parts = self._calls.parts(header, specs, ids, _PARTS * PART_BYTES)
        if sum(aligned(part.size) for part in parts) > segment.size:
            raise ValueError(f"the rows do not fit into the {segment.size} bytes of the shared memory")
        place = 0
        for number, part in enumerate(parts, 1):
            part.read(segment.bytes[place : place + part.size])
            place = aligned(place + part.size)
            connection.send(pb.SegmentReply(last=number == len(parts), rows=part.size).SerializeToString())

    def _write(self, connection: socket.socket, segment: Segment, request: pb.SegmentRequest) -> None:
        header = request.write
        specs = self._calls.writable(header)
        ids, rows, initial_ids, initial_rows = segment.arrays(
            [request.ids, request.rows, request.initial_ids, request.initial_rows]
        )
        if header.kind != pb.WriteHeader.UPDATE or self._pair.is_on:
            rows = rows.clone()  # the gradients of an update are only added, and read once without a backup
        deleted = self._calls.apply(header, specs, [ids.clone(), rows, initial_ids.clone(), initial_rows.clone()])
        connection.send(pb.SegmentReply(last=True, deleted=deleted).SerializeToString())


def _parsed(message: bytes) -> pb.SegmentRequest:
    if len(message) > MESSAGE_BYTES:
        raise ValueError(f"a message may have at most {MESSAGE_BYTES} bytes")
    try:
        request: pb.SegmentRequest = pb.SegmentRequest.FromString(message)
    except DecodeError:
        raise ValueError("the message is not a SegmentRequest") from None
    if request.WhichOneof("call") is None:
        raise ValueError("the message has neither a pull nor a write")
    return request
