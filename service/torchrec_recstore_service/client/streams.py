"""Reads and writes of rows by gRPC."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire.messages import fields, new_message
from torchrec_recstore_service.wire.protocol import PART_BYTES, PART_IDS, as_bytes, rows_a_part
from torchrec_recstore_service.wire.table_rows import Piece, TableRows, pieces

_CALL_BYTES, _CALL_IDS = 1 << 30, 1 << 22  # of a read of several tables
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

    def pull(self, epoch: str, call: TableRows, left_s: float) -> bool:
        """Reads rows into the memory of ``call``.

        Args:
            epoch: The label of the epoch of the call.
            call: The ids whose rows are read, and the memory.
            left_s: The longest time in seconds that the call may take.

        Returns:
            Whether the server has answered with the rows of all ids.
        """
        if call.is_plain:
            header = pb.PullHeader(table=call.tables[0], epoch=epoch)
            one = len(call.ids) <= rows_a_part(call.row_bytes[0])
            return self._pull_into(header, call.ids, call, 0, one, left_s) == call.size
        at = 0
        for part in pieces(call.row_bytes, call.counts, _CALL_BYTES, most_ids=_CALL_IDS):
            header = pb.PullHeader(epoch=epoch, tables=call.headers(part))
            ids, size = call.ids_of(part), call.bytes_of(part)
            one = len(ids) <= PART_IDS and size <= PART_BYTES
            at = self._pull_into(header, ids, call, at, one, left_s)
            if at != (call.place(part) + size if size else at):
                return False
        return True

    def _pull_into(self, header: pb.PullHeader, ids: Tensor, call: TableRows, at: int, one: bool, left_s: float) -> int:
        """Reads rows to the place ``at`` of the stream and returns the place after them; -1 if they do not fit."""
        for reply in self._replies(header, ids, one, left_s):
            received = fields(reply).get(_ROWS)
            if received is not None:
                at = call.put(received.numpy(), at)
                if at < 0:
                    break
        return at

    def found(self, header: pb.PullHeader, ids: Tensor, row_bytes: int, left_s: float) -> tuple[Tensor, Tensor]:
        """Returns which of ``ids``, (N,) int64, have a row, (n,) uint8, and their rows, (bytes,) uint8, as received."""
        none = torch.empty(0, dtype=torch.uint8)
        replies = list(self._replies(header, ids, len(ids) <= rows_a_part(row_bytes), left_s))
        received = [fields(reply) for reply in replies]
        found, rows = ([reply.get(number, none) for reply in received] for number in (_FOUND, _ROWS))
        return torch.cat([none, *found]), torch.cat([none, *rows])

    def write(self, header: pb.WriteHeader, call: TableRows, initial: TableRows, left_s: float) -> int:
        """Writes, updates or deletes rows.

        Args:
            header: The header of the call.
            call: The ids and rows that are sent.
            initial: The initial rows of ids that have no row.
            left_s: The longest time in seconds that the call may take.

        Returns:
            The number of deleted rows.
        """
        first = header.SerializeToString()
        options = {"timeout": left_s, "metadata": self._metadata}
        if 8 * (len(call.ids) + len(initial.ids)) + call.size + initial.size <= PART_BYTES:
            arrays = [array for numbers, some in _both(call, initial) for array in _whole(numbers, some)]
            reply = self._write_one(_filled(arrays, first), **options)
        else:
            reply = self._write(_requests(first, call, initial), **options)
        return int(pb.WriteReply.FromString(reply).deleted)

    def _replies(self, header: pb.PullHeader, ids: Tensor, one: bool, left_s: float) -> Iterable[bytes]:
        """Returns the replies to a read. ``one``: whether the server answers with one reply."""
        first = header.SerializeToString()
        options = {"timeout": left_s, "metadata": self._metadata}
        if one:
            return [self._pull_one(_filled([_ids_part(_ASKED, ids)], first), **options)]
        size = len(ids) if header.tables else PART_IDS
        parts = [ids[place : place + size] for place in range(0, len(ids), size)]
        requests = (_filled([_ids_part(_ASKED, part)], b"" if i else first) for i, part in enumerate(parts))
        replies: Iterable[bytes]
        replies = self._pull_many(next(requests), **options) if len(parts) == 1 else self._pull(requests, **options)
        return replies


_ASKED = pb.PullRequest.IDS_FIELD_NUMBER
_FOUND, _ROWS = pb.PullReply.FOUND_FIELD_NUMBER, pb.PullReply.ROWS_FIELD_NUMBER
_WRITTEN = pb.WriteRequest.IDS_FIELD_NUMBER, pb.WriteRequest.ROWS_FIELD_NUMBER
_INITIAL = pb.WriteRequest.INITIAL_IDS_FIELD_NUMBER, pb.WriteRequest.INITIAL_ROWS_FIELD_NUMBER
_Array = tuple[int, int, Callable[[Tensor], object]]  # the number of a field, its size in bytes, what fills its memory


def _filled(arrays: Sequence[_Array], header: bytes = b"") -> bytes:
    """Returns a message with arrays."""
    message, memory = new_message([(number, size) for number, size, _ in arrays], header)
    for place, (_, _, fill) in zip(memory, arrays, strict=True):
        fill(place)
    return message


def _ids_part(number: int, ids: Tensor) -> _Array:
    content = as_bytes(ids).numpy()
    return number, len(content), lambda memory: np.copyto(memory.numpy(), content)


def _both(call: TableRows, initial: TableRows) -> list[tuple[tuple[int, int], TableRows]]:
    return [(_INITIAL, initial), (_WRITTEN, call)]


def _whole(numbers: tuple[int, int], call: TableRows) -> list[_Array]:
    return [_ids_part(numbers[0], call.ids), (numbers[1], call.size, lambda memory: call.take(memory, 0))]


def _part(numbers: tuple[int, int], call: TableRows, part: Sequence[Piece]) -> list[_Array]:
    at = call.place(part)
    return [
        _ids_part(numbers[0], call.ids_of(part)),
        (numbers[1], call.bytes_of(part), lambda memory: call.take(memory, at)),
    ]


def _requests(header: bytes, call: TableRows, initial: TableRows) -> Iterator[bytes]:
    yield _filled([], header)
    for numbers, some in _both(call, initial):
        for part in pieces(some.row_bytes, some.counts, PART_BYTES):
            if part:
                yield _filled(_part(numbers, some, part))
