"""Reads and writes of rows by gRPC.

Tests: tests/service/test_several_tables.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire.messages import fields, new_message
from torchrec_recstore_service.wire.protocol import PART_BYTES, PART_IDS, rows_a_part
from torchrec_recstore_service.wire.table_rows import Piece, TableRows, pieces

# the largest numbers of bytes of rows and of ids of a read of several tables
_CALL_BYTES = 1 << 30
_CALL_IDS = 1 << 22
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
        pull = f"{_SERVICE}Pull"
        write = f"{_SERVICE}Write"
        self._pull_unary = channel.unary_unary(pull, _registered_method=True)
        self._pull_replies = channel.unary_stream(pull, _registered_method=True)
        self._pull = channel.stream_stream(pull, _registered_method=True)
        self._write_unary = channel.unary_unary(write, _registered_method=True)
        self._write = channel.stream_unary(write, _registered_method=True)

    def pull(
        self,
        epoch: str,
        call: TableRows,
        left_s: float,
    ) -> bool:
        """Reads rows into the memory of ``call``.

        Args:
            epoch: The label of the epoch of the call.
            call: The ids whose rows are read, and the memory.
            left_s: The longest time in seconds that the call may take.

        Returns:
            Whether the server has answered with the rows of all ids.
        """
        parts: Iterable[Sequence[Piece] | None] = [None]  # all rows
        if not call.is_plain:
            parts = pieces(
                call.row_bytes,
                call.counts,
                _CALL_BYTES,
                most_ids=_CALL_IDS,
            )
        position = 0
        for part in parts:
            ids, begin, size = call.part(part)
            if part is None:
                header = pb.PullHeader(table=call.label, epoch=epoch)
            else:
                header = pb.PullHeader(epoch=epoch, tables=call.headers(part))
            has_one_reply = len(ids) <= PART_IDS and size <= PART_BYTES
            for reply in self._replies(header, ids, has_one_reply, left_s):
                rows = fields(reply).get(_ROWS)
                if rows is not None:
                    position = call.put(rows.numpy(), position)
                    if position < 0:
                        return False
            if size and position != begin + size:
                return False
        return True

    def existing_rows(
        self,
        header: pb.PullHeader,
        ids: Tensor,
        row_bytes: int,
        left_s: float,
    ) -> tuple[Tensor, Tensor]:
        """Returns which of ``ids``, (N,) int64, have a row, (n,) uint8, and their rows,
        (bytes,) uint8, as received.
        """
        has_one_reply = len(ids) <= rows_a_part(row_bytes)
        # all of them, because the parts below lie in their memory
        replies = list(self._replies(header, ids, has_one_reply, left_s))
        nothing = torch.empty(0, dtype=torch.uint8)
        has_row_parts = [nothing]
        row_parts = [nothing]
        for reply in replies:
            content_of = fields(reply)
            has_row_parts.append(content_of.get(_FOUND, nothing))
            row_parts.append(content_of.get(_ROWS, nothing))
        return torch.cat(has_row_parts), torch.cat(row_parts)

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
        header_bytes = header.SerializeToString()
        options = {"timeout": left_s, "metadata": self._metadata}
        calls = [_WriteArrays(call, *_WRITTEN)]
        if initial is not None:
            calls.insert(0, _WriteArrays(initial, *_INITIAL))
        size = sum(8 * len(arrays.rows.ids) + arrays.rows.size for arrays in calls)
        if size <= PART_BYTES:
            parts: list[tuple[_WriteArrays, Sequence[Piece] | None]]
            parts = [(arrays, None) for arrays in calls]
            reply = self._write_unary(_write_message(parts, header_bytes), **options)
        else:
            reply = self._write(_write_messages(header_bytes, calls), **options)
        return int(pb.WriteReply.FromString(reply).deleted)

    def _replies(
        self,
        header: pb.PullHeader,
        ids: Tensor,
        has_one_reply: bool,
        left_s: float,
    ) -> Iterable[bytes]:
        """Returns the replies to a read."""
        header_bytes = header.SerializeToString()
        options = {"timeout": left_s, "metadata": self._metadata}
        if has_one_reply:
            return [self._pull_unary(_read_message(ids, header_bytes), **options)]
        part_ids = len(ids) if header.tables else PART_IDS
        messages = []
        for begin in range(0, len(ids), part_ids):
            header_of_part = b"" if begin else header_bytes
            part = ids[begin : begin + part_ids]
            messages.append(partial(_read_message, part, header_of_part))
        replies: Iterable[bytes]
        if len(messages) == 1:
            replies = self._pull_replies(messages[0](), **options)
        else:
            # each message is made when it is sent
            replies = self._pull((message() for message in messages), **options)
        return replies


_READ_IDS = pb.PullRequest.IDS_FIELD_NUMBER
_FOUND = pb.PullReply.FOUND_FIELD_NUMBER
_ROWS = pb.PullReply.ROWS_FIELD_NUMBER
# the numbers of the fields of ids and of rows
_WRITTEN = (pb.WriteRequest.IDS_FIELD_NUMBER, pb.WriteRequest.ROWS_FIELD_NUMBER)
_INITIAL = (
    pb.WriteRequest.INITIAL_IDS_FIELD_NUMBER,
    pb.WriteRequest.INITIAL_ROWS_FIELD_NUMBER,
)


class _WriteArrays(NamedTuple):
    """Rows that are written, and the numbers of the fields of their ids and contents."""

    rows: TableRows
    ids_field: int
    rows_field: int


def _read_message(ids: Tensor, header: bytes) -> bytes:
    """Returns the request of a read with some of its ids."""
    message, memory = new_message([(_READ_IDS, 8 * len(ids))], header)
    memory[0].numpy()[:] = ids.numpy().view(np.uint8)
    return message


def _write_message(
    parts: Sequence[tuple[_WriteArrays, Sequence[Piece] | None]],
    header: bytes = b"",
) -> bytes:
    """Returns the request of a write with parts of its rows. A part of None: all rows."""
    contents = []
    field_sizes = []
    for arrays, part in parts:
        ids, begin, size = arrays.rows.part(part)
        contents.append((arrays.rows, ids, begin))
        field_sizes.append((arrays.ids_field, 8 * len(ids)))
        field_sizes.append((arrays.rows_field, size))

    message, memory = new_message(field_sizes, header)
    memory_of_ids = memory[::2]
    memory_of_rows = memory[1::2]
    for number, (rows, ids, begin) in enumerate(contents):
        memory_of_ids[number].numpy()[:] = ids.numpy().view(np.uint8)
        rows.take(memory_of_rows[number], begin)
    return message


def _write_messages(header: bytes, calls: Sequence[_WriteArrays]) -> Iterator[bytes]:
    """Yields the requests of a write that has several."""
    message, _ = new_message([], header)
    yield message
    for arrays in calls:
        for part in pieces(arrays.rows.row_bytes, arrays.rows.counts, PART_BYTES):
            if part:
                yield _write_message([(arrays, part)])
