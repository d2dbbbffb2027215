"""Reads and writes of rows by gRPC."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.rpc import recstore_pb2 as pb
from torchrec_recstore.rpc.protocol import PART_BYTES, PART_IDS, as_bytes, rows_a_part
from torchrec_recstore.rpc.wire import fields, new_message

_SERVICE = "/torchrec_recstore.ParameterServer/"


class Streams:
    """The reads and writes of rows of one server by gRPC.

    A call whose requests or replies fit into one part is unary for the client. On the wire, a stream of one message is
    the same, but it takes gRPC twice as long.

    All methods raise grpc.RpcError.

    Args:
        channel: The channel to the server.
        metadata: The metadata of each call.
    """

    def __init__(self, channel: Any, metadata: Sequence[tuple[str, str]]) -> None:
        self._metadata = metadata
        self._pull_one = channel.unary_unary(f"{_SERVICE}Pull", _registered_method=True)
        self._pull_many = channel.unary_stream(f"{_SERVICE}Pull", _registered_method=True)
        self._pull = channel.stream_stream(f"{_SERVICE}Pull", _registered_method=True)
        self._write_one = channel.unary_unary(f"{_SERVICE}Write", _registered_method=True)
        self._write = channel.stream_unary(f"{_SERVICE}Write", _registered_method=True)

    def pull(self, header: pb.PullHeader, ids: Tensor, out: Tensor, places: Tensor | None, left_s: float) -> bool:
        """Reads rows into a tensor.

        Args:
            header: The header of the call.
            ids: (N,) int64. The ids whose rows are read.
            out: (N, row bytes) uint8, contiguous. The memory to write the rows to.
            places: (N,) int64. The index in ``out`` of the row of each id. ``out`` may then have more than N rows. None
                means the order of ``ids``.
            left_s: The longest time in seconds that the call may take.

        Returns:
            Whether the server has answered with N rows.
        """
        row_bytes = out.shape[1]
        done = 0
        for reply in self._replies(header, ids, rows_a_part(row_bytes), left_s):
            received = fields(reply).get(_ROWS)
            if received is None:
                continue
            rows, rest = divmod(len(received), row_bytes)
            if rest or done + rows > len(ids):
                return False
            received = received.view(rows, row_bytes)
            if places is None:
                out[done : done + rows].numpy()[:] = received.numpy()
            else:
                ops.rows_put(out, places[done : done + rows], received)
            done += rows
        return done == len(ids)

    def found(self, header: pb.PullHeader, ids: Tensor, row_bytes: int, left_s: float) -> tuple[Tensor, Tensor]:
        """Returns which of ``ids``, (N,) int64, have a row, (n,) uint8, and their rows, (bytes,) uint8, as received."""
        none = torch.empty(0, dtype=torch.uint8)
        replies = list(self._replies(header, ids, rows_a_part(row_bytes), left_s))
        received = [fields(reply) for reply in replies]
        found, rows = ([reply.get(number, none) for reply in received] for number in (_FOUND, _ROWS))
        return torch.cat([none, *found]), torch.cat([none, *rows])

    def write(
        self, header: pb.WriteHeader, ids: Tensor, rows: Tensor, initial: tuple[Tensor, Tensor], left_s: float
    ) -> int:
        """Writes, updates or deletes rows.

        Args:
            header: The header of the call.
            ids: (N,) int64. The ids whose rows are written.
            rows: (N, columns). The weights or gradients.
            initial: Ids, (M,) int64, and rows, (M, columns) float32, for the ids that have no row.
            left_s: The longest time in seconds that the call may take.

        Returns:
            The number of deleted rows.
        """
        first = header.SerializeToString()
        arrays = [as_bytes(array) for array in (ids, rows, *initial)]
        if sum(map(len, arrays)) <= PART_BYTES:
            whole = _message(zip((_IDS, _NEW_ROWS, _INITIAL_IDS, _INITIAL_ROWS), arrays, strict=True), first)
            reply = self._write_one(whole, timeout=left_s, metadata=self._metadata)
        else:
            reply = self._write(_parts(first, ids, rows, initial), timeout=left_s, metadata=self._metadata)
        return int(pb.WriteReply.FromString(reply).deleted)

    def _replies(self, header: pb.PullHeader, ids: Tensor, rows_a_reply: int, left_s: float) -> Iterable[bytes]:
        first = header.SerializeToString()
        options = {"timeout": left_s, "metadata": self._metadata}
        if len(ids) <= min(PART_IDS, rows_a_reply):
            return [self._pull_one(_message([(_ASKED, as_bytes(ids))], first), **options)]
        parts = [ids[place : place + PART_IDS] for place in range(0, len(ids), PART_IDS)]
        requests = (_message([(_ASKED, as_bytes(part))], b"" if i else first) for i, part in enumerate(parts))
        replies: Iterable[bytes]
        replies = self._pull_many(next(requests), **options) if len(parts) == 1 else self._pull(requests, **options)
        return replies


_ASKED = pb.PullRequest.IDS_FIELD_NUMBER
_FOUND, _ROWS = pb.PullReply.FOUND_FIELD_NUMBER, pb.PullReply.ROWS_FIELD_NUMBER
_IDS, _NEW_ROWS = pb.WriteRequest.IDS_FIELD_NUMBER, pb.WriteRequest.ROWS_FIELD_NUMBER
_INITIAL_IDS = pb.WriteRequest.INITIAL_IDS_FIELD_NUMBER
_INITIAL_ROWS = pb.WriteRequest.INITIAL_ROWS_FIELD_NUMBER


def _message(arrays: Iterable[tuple[int, Tensor]], header: bytes = b"") -> bytes:
    """Returns a message with copies of arrays, (size,) uint8, by the numbers of their fields."""
    given = [(number, array) for number, array in arrays if len(array)]
    message, memory = new_message([(number, len(array)) for number, array in given], header)
    for place, (_, array) in zip(memory, given, strict=True):
        place.numpy()[:] = array.numpy()
    return message


def _parts(header: bytes, ids: Tensor, rows: Tensor, initial: tuple[Tensor, Tensor]) -> Iterator[bytes]:
    yield _message([], header)
    for some_ids, some_rows in _split(*initial):
        yield _message([(_INITIAL_IDS, as_bytes(some_ids)), (_INITIAL_ROWS, as_bytes(some_rows))])
    for some_ids, some_rows in _split(ids, rows):
        yield _message([(_IDS, as_bytes(some_ids)), (_NEW_ROWS, as_bytes(some_rows))])


def _split(ids: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    size = rows_a_part(rows.shape[1] * rows.dtype.itemsize)
    for place in range(0, len(ids), size):
        yield ids[place : place + size], rows[place : place + size]
