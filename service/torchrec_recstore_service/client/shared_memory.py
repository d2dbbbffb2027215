"""Calls on rows by shared memory: see SegmentRequest in recstore.proto."""

from __future__ import annotations

import os
import re
import socket
import time
import weakref

import numpy as np
import torch
from torch import Tensor

from torchrec_recstore_service.client.row_connections import (
    MESSAGE_CODES,
    DoesNotFitError,
    ServedError,
    call_gone,
    call_late,
)
from torchrec_recstore_service.wire import recstore_pb2 as pb
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

    def pull(
        self,
        epoch: str,
        call: TableRows,
        left_s: float,
    ) -> bool:
        """See :meth:`Streams.pull`.

        A call that does not fit into the segment is made in parts.
        """
        self._end = time.monotonic() + left_s
        table_bytes = _SETTINGS_BYTES + 4 * max(map(len, call.tables))
        most_tables = max(1, (MESSAGE_BYTES - _SETTINGS_BYTES) // table_bytes)
        most_bytes = self._segment.size
        for header, ids, begin, size in call.reads(
            epoch,
            most_bytes,
            most_bytes // 8,
            most_tables,
        ):
            self._send_ids(header, ids)
            received = 0
            is_last = False
            while not is_last:
                reply = self._receive()
                received = aligned(received)
                is_last = reply.last
                end = received + reply.rows
                if end > size:
                    return False
                rows = self._segment.array[received:end]
                if call.put(rows, begin + received) < 0:
                    return False
                received = end
            if received != size:
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
        self._end = time.monotonic() + left_s
        most_ids = (self._segment.size - 128) // max(row_bytes + 1, 8)
        has_row_parts: list[Tensor] = []
        row_parts: list[Tensor] = []
        for begin in range(0, max(1, len(ids)), most_ids):
            self._send_ids(header, ids[begin : begin + most_ids])
            reply = self._receive()
            has_row, rows = self._segment.arrays([reply.found, reply.rows])
            has_row_parts.append(has_row.clone())
            row_parts.append(rows.clone())
        return torch.cat(has_row_parts), torch.cat(row_parts)

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
        sizes = [8 * len(call.ids), call.size]
        if initial is not None:
            sizes += [8 * len(initial.ids), initial.size]
        if (
            header.ByteSize() > MESSAGE_BYTES - _SETTINGS_BYTES
            or sum(sizes) > self._segment.size - _ALIGNING_BYTES
        ):
            raise DoesNotFitError
        arrays = self._segment.arrays(sizes)
        arrays[0].numpy()[:] = call.ids.numpy().view(np.uint8)
        call.take(arrays[1], 0)
        request = pb.SegmentRequest(write=header, ids=sizes[0], rows=sizes[1])
        if initial is not None:
            arrays[2].numpy()[:] = initial.ids.numpy().view(np.uint8)
            initial.take(arrays[3], 0)
            request.initial_ids = sizes[2]
            request.initial_rows = sizes[3]
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
    """Makes a connection by shared memory, if the server and this system have it."""
    return SharedMemoryConnection(offer) if offer.socket and is_available() else None


_of_this_process: weakref.WeakSet[SharedMemoryConnection] = weakref.WeakSet()


def _close_in_child() -> None:
    # The server must notice the end of the parent, although a forked process lives on.
    for connection in list(_of_this_process):
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)
