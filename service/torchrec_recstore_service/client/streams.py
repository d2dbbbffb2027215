"""Reads and writes of rows by gRPC.

Tests: tests/service/test_several_tables.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire.messages import fields, new_message
from torchrec_recstore_service.wire.protocol import PART_BYTES, PART_IDS, rows_a_part
from torchrec_recstore_service.wire.table_rows import Piece, TableRows, pieces

_CALL_BYTES, _CALL_IDS = 1 << 30, 1 << 22  # of a read of several tables
_SERVICE = "/torchrec_recstore.ParameterServer/"


class Streams:
    """The reads and writes of rows of one server by gRPC.

    A call whose requests or replies fit into one part is unary for the client. On the
    wire, a stream of one message is the same, but it takes gRPC twice as long.

    All methods raise grpc.RpcError.

    Args:
        channel: The channel to the server.
        metadata: The metadata of each call.
    """

    def __init__(self, channel: Any, metadata: Sequence[tuple[str, str]]) -> None:
        self._metadata = metadata
        self._pull_one = channel.unary_unary(f"{_SERVICE}Pull", _registered_method=True)
        self._pull_many = channel.unary_stream(
            f"{_SERVICE}Pull", _registered_method=True
        )
        self._pull = channel.stream_stream(f"{_SERVICE}Pull", _registered_method=True)
        self._write_one = channel.unary_unary(
            f"{_SERVICE}Write", _registered_method=True
        )
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
        at = 0
        several = (
            None
            if call.is_plain
            else pieces(call.row_bytes, call.counts, _CALL_BYTES, most_ids=_CALL_IDS)
        )
        for part in several or (None,):
            ids, place, size = call.part(part)
            if part is None:
                header = pb.PullHeader(table=call.label, epoch=epoch)
            else:
                header = pb.PullHeader(epoch=epoch, tables=call.headers(part))
            for reply in self._replies(
                header, ids, len(ids) <= PART_IDS and size <= PART_BYTES, left_s
            ):
                received = fields(reply).get(_ROWS)
                if received is not None:
                    at = call.put(received.numpy(), at)
                    if at < 0:
                        return False
            if at != (place + size if size else at):
                return False
        return True

    def found(
        self, header: pb.PullHeader, ids: Tensor, row_bytes: int, left_s: float
    ) -> tuple[Tensor, Tensor]:
        """Returns which of ``ids``, (N,) int64, have a row, (n,) uint8, and their rows,
        (bytes,) uint8, as received.
        """
        none = torch.empty(0, dtype=torch.uint8)
        replies = list(
            self._replies(header, ids, len(ids) <= rows_a_part(row_bytes), left_s)
        )
        received = [fields(reply) for reply in replies]
        found, rows = (
            [reply.get(number, none) for reply in received]
            for number in (_FOUND, _ROWS)
        )
        return torch.cat([none, *found]), torch.cat([none, *rows])

    def write(
        self,
        header: pb.WriteHeader,
        call: TableRows,
        initial: TableRows | None,
        left_s: float,
    ) -> int:
        """Writes, updates or deletes rows.

        Args:
            header: The header of the call.
            call: The ids and rows that are sent.
            initial: The initial rows of ids that have no row, or None.
            left_s: The longest time in seconds that the call may take.

        Returns:
            The number of deleted rows.
        """
        first = header.SerializeToString()
        options = {"timeout": left_s, "metadata": self._metadata}
        arrays = (
            [(_INITIAL, initial), (_WRITTEN, call)]
            if initial is not None
            else [(_WRITTEN, call)]
        )
        if sum(8 * len(some.ids) + some.size for _, some in arrays) <= PART_BYTES:
            reply = self._write_one(
                _message([(numbers, some, None) for numbers, some in arrays], first),
                **options,
            )
        else:
            reply = self._write(_requests(first, arrays), **options)
        return int(pb.WriteReply.FromString(reply).deleted)

    def _replies(
        self, header: pb.PullHeader, ids: Tensor, one: bool, left_s: float
    ) -> Iterable[bytes]:
        """Returns the replies to a read.

        ``one``: whether the server answers with one reply.
        """
        first = header.SerializeToString()
        options = {"timeout": left_s, "metadata": self._metadata}
        if one:
            return [self._pull_one(_asking(ids, first), **options)]
        size = len(ids) if header.tables else PART_IDS
        parts = [ids[place : place + size] for place in range(0, len(ids), size)]
        requests = (_asking(part, b"" if i else first) for i, part in enumerate(parts))
        replies: Iterable[bytes]
        replies = (
            self._pull_many(next(requests), **options)
            if len(parts) == 1
            else self._pull(requests, **options)
        )
        return replies


_ASKED = pb.PullRequest.IDS_FIELD_NUMBER
_FOUND, _ROWS = pb.PullReply.FOUND_FIELD_NUMBER, pb.PullReply.ROWS_FIELD_NUMBER
_WRITTEN = pb.WriteRequest.IDS_FIELD_NUMBER, pb.WriteRequest.ROWS_FIELD_NUMBER
_INITIAL = (
    pb.WriteRequest.INITIAL_IDS_FIELD_NUMBER,
    pb.WriteRequest.INITIAL_ROWS_FIELD_NUMBER,
)


def _asking(ids: Tensor, header: bytes) -> bytes:
    """Returns the request of a read with some of its ids."""
    message, memory = new_message([(_ASKED, 8 * len(ids))], header)
    memory[0].numpy()[:] = ids.numpy().view(np.uint8)
    return message


def _message(
    arrays: Sequence[tuple[tuple[int, int], TableRows, Sequence[Piece] | None]],
    header: bytes = b"",
) -> bytes:
    """Returns the request of a write: the numbers of the fields of ids and rows, and
    the part that they hold.
    """
    parts = [call.part(part) for _, call, part in arrays]
    sizes = zip(arrays, parts, strict=True)
    numbered = [
        each
        for ((ids, rows), _, _), (own, _, size) in sizes
        for each in ((ids, 8 * len(own)), (rows, size))
    ]
    message, memory = new_message(numbered, header)
    for number, ((_, call, _), (ids, place, _)) in enumerate(
        zip(arrays, parts, strict=True)
    ):
        memory[2 * number].numpy()[:] = ids.numpy().view(np.uint8)
        call.take(memory[2 * number + 1], place)
    return message


def _requests(
    header: bytes, arrays: Sequence[tuple[tuple[int, int], TableRows]]
) -> Iterator[bytes]:
    yield new_message([], header)[0]
    for numbers, call in arrays:
        for part in pieces(call.row_bytes, call.counts, PART_BYTES):
            if part:
                yield _message([(numbers, call, part)])
