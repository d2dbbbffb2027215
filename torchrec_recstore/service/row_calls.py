"""The calls of the parameter server that read and write rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.row_types import value_dtype
from torchrec_recstore.rpc import recstore_pb2 as pb
from torchrec_recstore.rpc.protocol import PART_IDS, array_of, rows_a_part, to_bytes
from torchrec_recstore.rpc.table_spec import TableSpec
from torchrec_recstore.rpc.wire import content, fields, new_message
from torchrec_recstore.service.hosted import HostedBackend
from torchrec_recstore.service.metrics import Observer

_NONE = torch.empty(0, dtype=torch.uint8)
_ARRAYS = (
    pb.WriteRequest.IDS_FIELD_NUMBER,
    pb.WriteRequest.ROWS_FIELD_NUMBER,
    pb.WriteRequest.INITIAL_IDS_FIELD_NUMBER,
    pb.WriteRequest.INITIAL_ROWS_FIELD_NUMBER,
)


_Header = TypeVar("_Header", pb.PullHeader, pb.WriteHeader)


class _Once(Protocol):
    def __call__(self, header: pb.WriteHeader, action: Callable[[], int]) -> int: ...


class RowCalls:
    """The calls that read and write rows of the tables of a server.

    A read begins with :meth:`readable`, and a write with :meth:`writable`.

    Args:
        tables: The tables.
        once: The function that carries out each numbered write once, in the epoch of its header.
        observer: The observer that the ids of each call are reported to.
        check_epoch: The function that raises an error if the server is not in the epoch of a call.
        max_request_bytes: The largest size in bytes of a write.
    """

    def __init__(
        self,
        tables: HostedBackend,
        once: _Once,
        observer: Observer,
        check_epoch: Callable[[str], None],
        max_request_bytes: int,
    ) -> None:
        self._tables = tables
        self._once = once
        self._observer = observer
        self._check_epoch = check_epoch
        self._max_request_bytes = max_request_bytes

    def pull(self, requests: Iterator[bytes]) -> Iterator[bytes]:
        """Reads rows. See ``Pull`` in recstore.proto; requests and replies are the bytes of the messages."""
        header: pb.PullHeader | None = None
        for request in requests:
            parts = fields(request)
            if header is None:
                header = _header(pb.PullHeader, parts)
                spec = self.readable(header)
                row_bytes = spec.dim * value_dtype(spec.dtype).itemsize
                size = PART_IDS if header.want == pb.PullHeader.FOUND else rows_a_part(row_bytes)
            ids = array_of(parts.get(pb.PullRequest.IDS_FIELD_NUMBER, _NONE).clone(), torch.int64)
            for place in range(0, max(1, len(ids)), size):
                yield self._reply(header, spec, ids[place : place + size])

    def _reply(self, header: pb.PullHeader, spec: TableSpec, ids: Tensor) -> bytes:
        dtype = value_dtype(spec.dtype)
        if header.want != pb.PullHeader.ROWS or len(ids) == 0:
            reply: bytes = self.read(header, ids).SerializeToString()
            return reply
        size = len(ids) * spec.dim * dtype.itemsize
        message, memory = new_message([(pb.PullReply.ROWS_FIELD_NUMBER, size)])
        self.rows(header, ids, array_of(memory[0], dtype, spec.dim))
        return message

    def write(self, requests: Iterator[bytes]) -> bytes:
        """Writes, updates or deletes rows. See ``Write`` in recstore.proto; see :meth:`pull`."""
        request = next(requests, b"")
        parts = fields(request)
        header = _header(pb.WriteHeader, parts)
        spec = self.writable(header)
        kept = []  # the messages, whose memory is used until the end
        arrays: dict[int, list[Tensor]] = {number: [] for number in _ARRAYS}
        size = 0
        while True:
            kept.append(request)
            size += len(request)
            if size > self._max_request_bytes:
                raise ValueError(f"a write may have at most {self._max_request_bytes} bytes: split it")
            for number, array in arrays.items():
                array.append(parts.get(number, _NONE))
            try:
                request = next(requests)
            except StopIteration:
                break
            parts = fields(request)
        deleted = self.apply(header, spec, *(_joined(array) for array in arrays.values()))
        reply: bytes = pb.WriteReply(deleted=deleted).SerializeToString()
        return reply

    def readable(self, header: pb.PullHeader) -> TableSpec:
        """Returns the specification of the table that a read is for.

        Raises:
            ServerRestartedError: The read is for another epoch.
            ValueError: There is no such table.
        """
        self._check_epoch(header.epoch)
        return self._spec(header.table)

    def writable(self, header: pb.WriteHeader) -> TableSpec:
        """Returns the specification of the table that a write is for. See :meth:`readable` for the errors."""
        self._check_epoch(header.epoch)
        return self._spec(header.table)

    def read(self, header: pb.PullHeader, ids: Tensor) -> pb.PullReply:
        """Reads the rows of ``ids``, (N,) int64, or which of them have a row, as ``header.want`` says."""
        if header.want == pb.PullHeader.ROWS:
            return pb.PullReply(rows=to_bytes(self.rows(header, ids)))
        if header.want == pb.PullHeader.FOUND:
            found = self._tables.exists(header.table, ids)
            self._check_epoch(header.epoch)
            return pb.PullReply(found=to_bytes(found))
        if header.want == pb.PullHeader.FOUND_ROWS:
            self._observer.ids("pull", header.table, len(ids))
            found, rows = self._tables.found_rows(header.table, ids)
            self._check_epoch(header.epoch)
            return pb.PullReply(found=to_bytes(found), rows=to_bytes(rows))
        raise ValueError(f"want must be ROWS, FOUND or FOUND_ROWS, got {header.want}")

    def rows(self, header: pb.PullHeader, ids: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns the rows of ``ids``, (N,) int64: (N, columns). If ``out`` is given, it receives the rows."""
        self._observer.ids("pull", header.table, len(ids))
        rows = self._tables.pull(header.table, ids, out)
        self._check_epoch(header.epoch)  # the rows may be those of an epoch that has begun meanwhile
        return rows

    def apply(
        self,
        header: pb.WriteHeader,
        spec: TableSpec,
        ids_bytes: Tensor,
        rows_bytes: Tensor,
        initial_ids_bytes: Tensor,
        initial_rows_bytes: Tensor,
    ) -> int:
        """Carries out a write, once for its number.

        Args:
            header: The header of the write.
            spec: What :meth:`writable` has returned for the header.
            ids_bytes: (bytes,) uint8. The ids. See ``WriteRequest`` in recstore.proto for this and the other arrays.
            rows_bytes: (bytes,) uint8. The weights or gradients.
            initial_ids_bytes: (bytes,) uint8. The ids that have an initial row.
            initial_rows_bytes: (bytes,) uint8. The initial rows.

        Returns:
            The number of deleted rows.

        Raises:
            ValueError: The arrays do not fit the header or each other. No row has changed.
        """
        ids = array_of(ids_bytes, torch.int64)
        if len(ids) != header.ids:
            raise ValueError(f"{len(ids)} ids were received, {header.ids} were announced")
        name = header.table

        def rows(received: Tensor, of: Tensor, dtype: torch.dtype) -> Tensor:
            matrix = array_of(received, dtype, spec.dim)
            if len(matrix) != len(of):
                raise ValueError(f"{len(of)} ids and {len(matrix)} rows were received: there must be a row for each id")
            return matrix

        dtype = torch.float32 if header.float32 else value_dtype(spec.dtype)
        action: Callable[[], int]
        if header.kind == pb.WriteHeader.PUSH:
            operation = "push"
            values = rows(rows_bytes, ids, dtype)
            action = _nothing_deleted(lambda: self._tables.push(name, ids, values))
        elif header.kind == pb.WriteHeader.UPDATE:
            operation = "update"
            grads = rows(rows_bytes, ids, dtype)
            initial_ids = array_of(initial_ids_bytes, torch.int64)
            initial_rows = rows(initial_rows_bytes, initial_ids, torch.float32)
            initial = (initial_ids, initial_rows) if len(initial_ids) else None
            action = _nothing_deleted(lambda: self._tables.update(name, ids, grads, initial))
        elif header.kind == pb.WriteHeader.DELETE:
            operation = "delete"
            action = lambda: self._tables.delete(name, ids)  # noqa: E731
        else:
            raise ValueError(f"kind must be PUSH, UPDATE or DELETE, got {header.kind}")
        self._observer.ids(operation, name, len(ids))
        return self._once(header, action)

    def _spec(self, table: str) -> TableSpec:
        spec = self._tables.spec(table)
        if spec is None:
            raise self._tables.no_table(table)
        return spec


def _header(kind: type[_Header], parts: dict[int, Tensor]) -> _Header:
    """Returns the header of a message, from the fields of the message."""
    try:
        header: _Header = kind.FromString(content(parts.get(1)))
    except DecodeError:
        raise ValueError("the header is not one of the protocol") from None
    return header


def _joined(parts: list[Tensor]) -> Tensor:
    """Returns parts, (size,) uint8, one after the other in memory that is aligned and does not depend on messages."""
    size = sum(map(len, parts))
    joined = ops.rows_empty(1, size)[0]
    memory, place = joined.numpy(), 0
    for part in parts:
        memory[place : place + len(part)] = part.numpy()
        place += len(part)
    return joined


def _nothing_deleted(write: Callable[[], None]) -> Callable[[], int]:
    def action() -> int:
        write()
        return 0

    return action
