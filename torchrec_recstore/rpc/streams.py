"""Reads and writes of rows by gRPC."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.rpc import recstore_pb2 as pb
from torchrec_recstore.rpc.protocol import PART_BYTES, PART_IDS, as_bytes, rows_a_part, take_rows
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
        self,
        header: pb.WriteHeader,
        ids: Tensor,
        rows: Tensor,
        initial: tuple[Tensor, Tensor],
        places: Tensor | None,
        left_s: float,
    ) -> int:
        """Writes, updates or deletes rows.

        Args:
            header: The header of the call.
            ids: (N,) int64. The ids whose rows are written.
            rows: (N, columns), contiguous. The weights or gradients.
            initial: Ids, (M,) int64, and rows, (M, columns) float32, for the ids that have no row.
            places: (N,) int64. The index in ``rows`` of the row of each id. None means the order of ``ids``.
            left_s: The longest time in seconds that the call may take.

        Returns:
            The number of deleted rows.
        """
        first = header.SerializeToString()
        options = {"timeout": left_s, "metadata": self._metadata}
        size = len(ids) * (8 + rows.shape[1] * rows.itemsize) + sum(array.numel() * array.itemsize for array in initial)
        if size <= PART_BYTES:
            arrays = [*_rows_part(_WRITTEN, ids, rows, places), *_rows_part(_INITIAL, *initial, None)]
            reply = self._write_one(_filled(arrays, first), **options)
        else:
            requests = _requests(first, ids, rows, places, initial)
            reply = self._write(requests, **options)
        return int(pb.WriteReply.FromString(reply).deleted)

    def _replies(self, header: pb.PullHeader, ids: Tensor, rows_a_reply: int, left_s: float) -> Iterable[bytes]:
        first = header.SerializeToString()
        options = {"timeout": left_s, "metadata": self._metadata}
        if len(ids) <= min(PART_IDS, rows_a_reply):
            return [self._pull_one(_filled([_ids_part(_ASKED, ids)], first), **options)]
        parts = [ids[place : place + PART_IDS] for place in range(0, len(ids), PART_IDS)]
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


def _rows_part(numbers: tuple[int, int], ids: Tensor, rows: Tensor, places: Tensor | None) -> list[_Array]:
    size = len(ids) * rows.shape[1] * rows.itemsize
    return [_ids_part(numbers[0], ids), (numbers[1], size, lambda memory: take_rows(rows, places, memory))]


def _requests(
    header: bytes, ids: Tensor, rows: Tensor, places: Tensor | None, initial: tuple[Tensor, Tensor]
) -> Iterator[bytes]:
    yield _filled([], header)
    for numbers, some_ids, some_rows, some_places in ((_INITIAL, *initial, None), (_WRITTEN, ids, rows, places)):
        size = rows_a_part(some_rows.shape[1] * some_rows.itemsize)
        for begin in range(0, len(some_ids), size):
            own = slice(begin, begin + size)
            if some_places is None:
                yield _filled(_rows_part(numbers, some_ids[own], some_rows[own], None))
            else:
                yield _filled(_rows_part(numbers, some_ids[own], some_rows, some_places[own]))
