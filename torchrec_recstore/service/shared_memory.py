"""Calls by shared memory, in the server: see SegmentRequest in recstore.proto."""

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

import torch
from google.protobuf.message import DecodeError

from torchrec_recstore.row_types import value_dtype
from torchrec_recstore.rpc import recstore_pb2 as pb
from torchrec_recstore.rpc.protocol import Status, array_of, fill, rows_a_part
from torchrec_recstore.rpc.segment import MESSAGE_BYTES, SEGMENT_BYTES, Segment, is_available, is_same_user, new_memory
from torchrec_recstore.service.metrics import Observer
from torchrec_recstore.service.row_calls import RowCalls

MOST_CONNECTIONS = 64
"""The number of connections that a server accepts. A client that gets none calls by gRPC."""
_HELLO_S = 10.0
_STOP_S = 30.0
_PARTS = 4  # parts of a gRPC stream that are read at once, before the client copies their rows

_log = logging.getLogger(__name__)


class SharedMemoryServer:
    """Takes calls of clients on this host that run as the same user. Each connection has a thread and a segment.

    The headers of calls are messages on a socket, which the kernel copies. A client can change the arrays in its
    segment at any time. Ids are therefore copied before they are used. The values of rows can be anything, so a change
    of them concerns only the rows that the client writes.

    Args:
        calls: The calls on rows.
        observer: The observer that every call is reported to.
        status: The function that returns what a client is told of an error, by the method and the error.
    """

    def __init__(self, calls: RowCalls, observer: Observer, status: Callable[[str, Exception], Status]) -> None:
        self._calls = calls
        self._observer = observer
        self._status = status
        self._secret = secrets.token_bytes(16)
        self._listener: socket.socket | None = None
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._stopping = False

    def start(self) -> None:
        """Takes connections, if the system supports it."""
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
        return pb.AttachReply(socket=self._listener.getsockname()[1:].decode(), secret=self._secret)

    def stop(self) -> None:
        """Refuses new calls, and waits for the running ones."""
        with self._lock:
            self._stopping = True
            running = dict(self._connections)
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # ends the accept in progress
            self._listener.close()
        for connection in running:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RD)  # a reply can still be sent
        end = time.monotonic() + _STOP_S
        for thread in running.values():
            thread.join(max(0.0, end - time.monotonic()))

    def _accept(self, listener: socket.socket) -> None:
        while not self._stopping:
            try:
                connection = listener.accept()[0]
            except OSError:
                time.sleep(0.1)  # too many open files, or the end
                continue
            with self._lock:
                if self._stopping or len(self._connections) >= MOST_CONNECTIONS or not is_same_user(connection):
                    connection.close()
                    continue
                thread = threading.Thread(target=self._serve, args=(connection,), name="recstore-memory", daemon=True)
                self._connections[connection] = thread
            try:
                thread.start()
            except RuntimeError:  # the system has no more threads
                self._forget(connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            segment = self._greet(connection)
            while segment is not None and (message := connection.recv(MESSAGE_BYTES + 1)):
                self._answer(connection, segment, message)
        except OSError:
            pass  # the client is gone, or the system has no memory for it
        except Exception:
            _log.exception("a connection by shared memory was closed")
        finally:
            self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.pop(connection, None)
        connection.close()

    def _greet(self, connection: socket.socket) -> Segment | None:
        connection.settimeout(_HELLO_S)
        if not hmac.compare_digest(connection.recv(MESSAGE_BYTES), self._secret):
            return None
        file = new_memory(SEGMENT_BYTES)
        try:
            segment = Segment(file, SEGMENT_BYTES)
            socket.send_fds(connection, [b"%d" % SEGMENT_BYTES], [file])
        finally:
            os.close(file)
        connection.settimeout(None)
        return segment

    def _answer(self, connection: socket.socket, segment: Segment, message: bytes) -> None:
        begin = time.perf_counter()
        method, outcome = "SharedMemory", "ok"
        try:
            request = _parsed(message)
            method = "Pull" if request.HasField("pull") else "Write"
            if method == "Pull":
                self._pull(connection, segment, request)
            else:
                self._write(connection, segment, request)
        except ConnectionError:  # the client is gone
            outcome = "cancelled"
            raise
        except Exception as error:
            outcome = type(error).__name__
            status = self._status(method, error)
            reply = pb.SegmentReply(last=True, code=status.code, details=status.details, error=status.error)
            connection.send(reply.SerializeToString())
        finally:
            self._observer.call(method, outcome, time.perf_counter() - begin)

    def _pull(self, connection: socket.socket, segment: Segment, request: pb.SegmentRequest) -> None:
        header = request.pull
        spec = self._calls.readable(header)
        ids = array_of(segment.arrays([request.ids])[0].clone(), torch.int64)
        if header.want != pb.PullHeader.ROWS:
            found = self._calls.read(header, ids)
            arrays = segment.arrays([len(found.found), len(found.rows)])
            for array, content in zip(arrays, (found.found, found.rows), strict=True):
                fill(array, [content])
            sizes = pb.SegmentReply(last=True, found=len(found.found), rows=len(found.rows))
            connection.send(sizes.SerializeToString())
            return
        dtype = value_dtype(spec.dtype)
        row_bytes = spec.dim * dtype.itemsize
        out = segment.arrays([len(ids) * row_bytes])[0].view(dtype).view(-1, spec.dim)
        size = _PARTS * rows_a_part(row_bytes)
        for place in range(0, max(1, len(ids)), size):
            some = ids[place : place + size]
            self._calls.rows(header, some, out[place : place + size])
            reply = pb.SegmentReply(last=place + size >= len(ids), rows=len(some) * row_bytes)
            connection.send(reply.SerializeToString())

    def _write(self, connection: socket.socket, segment: Segment, request: pb.SegmentRequest) -> None:
        header = request.write
        spec = self._calls.writable(header)
        ids, rows, initial_ids, initial_rows = segment.arrays(
            [request.ids, request.rows, request.initial_ids, request.initial_rows]
        )
        if header.kind != pb.WriteHeader.UPDATE:  # the gradients of an update are read once, and only added
            rows = rows.clone()
        deleted = self._calls.apply(header, spec, ids.clone(), rows, initial_ids.clone(), initial_rows.clone())
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
