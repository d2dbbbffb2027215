"""Reads and writes of rows as gRPC streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.rpc import recstore_pb2 as pb
from torchrec_recstore.rpc.protocol import PART_IDS, fill, from_bytes, rows_a_part, to_bytes


class Streams:
    """The reads and writes of rows of one server, as gRPC streams.

    All methods raise grpc.RpcError.

    Args:
        stub: The stub of the server.
        metadata: The metadata of each call.
    """

    def __init__(self, stub: Any, metadata: Sequence[tuple[str, str]]) -> None:
        self._stub = stub
        self._metadata = metadata

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
        for reply in self._replies(header, ids, left_s):
            rows, rest = divmod(len(reply.rows), row_bytes)
            if rest or done + rows > len(ids):
                return False
            if places is None:
                fill(out[done : done + rows].view(-1), [reply.rows])
            elif rows:
                received = torch.frombuffer(memoryview(reply.rows), dtype=torch.uint8).view(rows, row_bytes)
                ops.rows_put(out, places[done : done + rows], received)
            done += rows
        return done == len(ids)

    def found(self, header: pb.PullHeader, ids: Tensor, row_bytes: int, left_s: float) -> tuple[Tensor, Tensor]:
        """Returns which of ``ids``, (N,) int64, have a row, (n,) uint8, and their rows, (bytes,) uint8, as received."""
        replies = list(self._replies(header, ids, left_s))
        found = from_bytes([reply.found for reply in replies], torch.uint8)
        return found, from_bytes([reply.rows for reply in replies], torch.uint8)

    def write(
        self,
        header: pb.WriteHeader,
        ids: Tensor,
        rows: Tensor,
        initial: tuple[Tensor, Tensor],
        left_s: float,
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
        reply = self._stub.Write(_parts(header, ids, rows, initial), timeout=left_s, metadata=self._metadata)
        return int(reply.deleted)

    def _replies(self, header: pb.PullHeader, ids: Tensor, left_s: float) -> Iterator[pb.PullReply]:
        requests = (
            pb.PullRequest(header=header if place == 0 else None, ids=to_bytes(ids[place : place + PART_IDS]))
            for place in range(0, max(1, len(ids)), PART_IDS)
        )
        replies: Iterator[pb.PullReply] = self._stub.Pull(requests, timeout=left_s, metadata=self._metadata)
        return replies


def _parts(
    header: pb.WriteHeader, ids: Tensor, rows: Tensor, initial: tuple[Tensor, Tensor]
) -> Iterator[pb.WriteRequest]:
    yield pb.WriteRequest(header=header)
    for some_ids, some_rows in _split(*initial):
        yield pb.WriteRequest(initial_ids=to_bytes(some_ids), initial_rows=to_bytes(some_rows))
    for some_ids, some_rows in _split(ids, rows):
        yield pb.WriteRequest(ids=to_bytes(some_ids), rows=to_bytes(some_rows))


def _split(ids: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    size = rows_a_part(rows.shape[1] * rows.dtype.itemsize)
    for place in range(0, len(ids), size):
        yield ids[place : place + size], rows[place : place + size]
