"""The calls of the parameter server that read and write rows.

Tests: tests/service/test_server.py and test_fuzz.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal, NamedTuple, Protocol, TypeVar

import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from torchrec_recstore.row_types import value_dtype
from torchrec_recstore_service.server.native import CallCounts
from torchrec_recstore_service.tables.hosted import HostedTables
from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire import row_ops
from torchrec_recstore_service.wire.messages import content, fields, new_message
from torchrec_recstore_service.wire.protocol import (
    BYTES_A_WRITTEN_ID,
    PART_BYTES,
    PART_IDS,
    NoInitialRow,
    array_of,
    rows_a_part,
    to_bytes,
)
from torchrec_recstore_service.wire.row_requests import RowRead, RowUpdate
from torchrec_recstore_service.wire.table_rows import pieces, places_of_tables
from torchrec_recstore_service.wire.table_spec import TableSpec

_EMPTY = torch.empty(0, dtype=torch.uint8)
_ARRAYS = (
    pb.WriteRequest.IDS_FIELD_NUMBER,
    pb.WriteRequest.ROWS_FIELD_NUMBER,
    pb.WriteRequest.INITIAL_IDS_FIELD_NUMBER,
    pb.WriteRequest.INITIAL_ROWS_FIELD_NUMBER,
)


_Header = TypeVar("_Header", pb.PullHeader, pb.WriteHeader)


class PartRead(NamedTuple):
    """A part of a read of rows.

    Args:
        size: The size in bytes of the rows.
        read: A function that writes the rows to memory, (size,) uint8.
    """

    size: int
    read: Callable[[Tensor], None]


class _Once(Protocol):
    def __call__(
        self,
        header: pb.WriteHeader,
        arrays: Sequence[Tensor],
        from_primary: bool,
        action: Callable[[], int],
    ) -> int: ...


class RowCalls:
    """The calls that read and write rows of the tables of a server.

    A read begins with :meth:`readable`, and a write with :meth:`writable`.

    Args:
        tables: The tables.
        once: The function that carries out each numbered write once, in the epoch of
            its header.
        observer: The counts of calls and ids.
        check_epoch: The function that raises an error if the server is not in the epoch
            of a call.
        max_write_bytes: The largest size in bytes of the arrays of a write.
    """

    def __init__(
        self,
        tables: HostedTables,
        once: _Once,
        observer: CallCounts,
        check_epoch: Callable[[str], None],
        max_write_bytes: int,
    ) -> None:
        self._tables = tables
        self._once = once
        self._observer = observer
        self._check_epoch = check_epoch
        self._max_write_bytes = max_write_bytes

    def pull(self, requests: Iterator[bytes]) -> Iterator[bytes]:
        """Reads rows.

        See ``Pull`` in recstore.proto; requests and replies are the bytes of the
        messages.
        """
        header: pb.PullHeader | None = None
        for request in requests:
            content_of = fields(request)
            is_first = header is None
            if header is None:
                header = _header(pb.PullHeader, content_of)
                specs = self.readable(header)
            content_of_ids = content_of.get(pb.PullRequest.IDS_FIELD_NUMBER, _EMPTY)
            ids = array_of(content_of_ids.clone(), torch.int64)
            if header.want == pb.PullHeader.ROWS:
                if header.tables and not is_first:
                    raise ValueError("a read of several tables has one request")
                yield from map(_filled, self.parts(header, specs, ids, PART_BYTES))
            else:
                part_size = PART_IDS
                if header.want == pb.PullHeader.FOUND_ROWS:
                    part_size = rows_a_part(_row_bytes(specs[0]))
                for begin in range(0, max(1, len(ids)), part_size):
                    end = begin + part_size
                    reply = self.existing_rows(header, ids[begin:end])
                    yield reply.SerializeToString()

    def parts(
        self,
        header: pb.PullHeader,
        specs: Sequence[TableSpec],
        ids: Tensor,
        most_bytes: int,
    ) -> list[PartRead]:
        """Returns the parts of a read of rows.

        Args:
            header: The header of the read.
            specs: What :meth:`readable` has returned for the header.
            ids: (N,) int64. The ids of all tables.
            most_bytes: The largest size in bytes of a part.

        Raises:
            ValueError: The ids do not fit the header.
        """
        # the shortest way: most calls read a few rows of a table
        if not header.tables and ids.numel() <= PART_IDS:
            dim = specs[0].dim
            dtype = value_dtype(specs[0].dtype)
            size = ids.numel() * dim * dtype.itemsize
            if size <= most_bytes:
                reads = [RowRead(header.table, ids, "init")]
                read = partial(
                    self._read,
                    header.epoch,
                    reads,
                    [(dim, dtype)],
                    [0],
                )
                return [PartRead(size, read)]

        tables = header.tables or [pb.TableIds(table=header.table, ids=len(ids))]
        counts = _checked_counts(tables, ids)
        table_ids = torch.split(ids, counts)
        row_bytes = [_row_bytes(spec) for spec in specs]
        parts = []
        for part in pieces(row_bytes, counts, most_bytes):
            reads = []
            shapes = []
            for number, begin, end in part:
                table = tables[number]
                spec = specs[number]
                missing: Literal["init", "zeros"] = "zeros" if table.zeros else "init"
                part_ids = table_ids[number][begin:end]
                reads.append(RowRead(table.table, part_ids, missing))
                shapes.append((spec.dim, value_dtype(spec.dtype)))

            sizes = [row_bytes[piece.table] for piece in part]
            part_counts = [len(read.ids) for read in reads]
            begins, size = places_of_tables(sizes, part_counts)
            read = partial(self._read, header.epoch, reads, shapes, begins)
            parts.append(PartRead(size, read))
        return parts

    def _read(
        self,
        epoch: str,
        reads: Sequence[RowRead],
        shapes: Sequence[tuple[int, torch.dtype]],
        begins: Sequence[int],
        memory: Tensor,
    ) -> None:
        """Writes rows to ``memory``, (bytes,) uint8: those of each read in its dim and
        dtype, where they begin.
        """
        out = []
        for read, (dim, dtype), begin in zip(reads, shapes, begins, strict=True):
            self._observer.ids("pull", read.table, len(read.ids))
            end = begin + len(read.ids) * dim * dtype.itemsize
            out.append(array_of(memory[begin:end], dtype, dim))
        self._tables.read_each(reads, out)
        # the rows may be those of an epoch that has begun meanwhile
        self._check_epoch(epoch)

    def write(self, requests: Iterator[bytes]) -> bytes:
        """Writes, updates or deletes rows.

        See ``Write`` in recstore.proto; see :meth:`pull`.
        """
        request = next(requests, b"")
        content_of = fields(request)
        header = _header(pb.WriteHeader, content_of)
        specs = self.writable(header)
        messages = []  # their memory is used until the end
        parts_of: dict[int, list[Tensor]] = {number: [] for number in _ARRAYS}
        size = 0
        while True:
            messages.append(request)
            for number, parts in parts_of.items():
                part = content_of.get(number, _EMPTY)
                parts.append(part)
                size += len(part)
            content_of_ids = content_of.get(pb.WriteRequest.IDS_FIELD_NUMBER, _EMPTY)
            self._check_size(size, len(content_of_ids))
            try:
                request = next(requests)
            except StopIteration:
                break
            content_of = fields(request)
        arrays = [_in_one_piece(parts) for parts in parts_of.values()]
        deleted = self.apply(header, specs, arrays)
        reply: bytes = pb.WriteReply(deleted=deleted).SerializeToString()
        return reply

    def readable(self, header: pb.PullHeader) -> list[TableSpec]:
        """Returns the specifications of the tables that a read is for.

        Raises:
            ServerRestartedError: The read is for another epoch.
            ValueError: There is no such table.
        """
        self._check_epoch(header.epoch)
        if header.tables and header.want != pb.PullHeader.ROWS:
            raise ValueError("a read of several tables must be of ROWS")
        return self._specs(header)

    def writable(self, header: pb.WriteHeader) -> list[TableSpec]:
        """Returns the specifications of the tables that a write is for.

        See :meth:`readable` for the errors.
        """
        self._check_epoch(header.epoch)
        if header.tables and header.kind != pb.WriteHeader.UPDATE:
            raise ValueError("a write of several tables must be an UPDATE")
        return self._specs(header)

    def existing_rows(self, header: pb.PullHeader, ids: Tensor) -> pb.PullReply:
        """Returns which of ``ids``, (N,) int64, have a row, and their rows if
        ``header.want`` says so.
        """
        if header.want == pb.PullHeader.FOUND:
            has_row = self._tables.exists(header.table, ids)
            reply = pb.PullReply(found=to_bytes(has_row))
        elif header.want == pb.PullHeader.FOUND_ROWS:
            self._observer.ids("pull", header.table, len(ids))
            has_row, rows = self._tables.found_rows(header.table, ids)
            reply = pb.PullReply(found=to_bytes(has_row), rows=to_bytes(rows))
        else:
            raise ValueError(
                f"want must be ROWS, FOUND or FOUND_ROWS, got {header.want}"
            )
        self._check_epoch(header.epoch)
        return reply

    def apply(
        self,
        header: pb.WriteHeader,
        specs: Sequence[TableSpec],
        arrays: Sequence[Tensor],
        from_primary: bool = False,
    ) -> int:
        """Carries out a write, once for its number.

        Args:
            header: The header of the write.
            specs: What :meth:`writable` has returned for the header.
            arrays: (bytes,) uint8 each. The ids, the weights or gradients, the ids that
                have an initial row, and the initial rows. See ``WriteRequest`` in
                recstore.proto.
            from_primary: See :meth:`SetCalls.write_once`. Default: False.

        Returns:
            The number of deleted rows.

        Raises:
            ValueError: The arrays do not fit the header or each other. No row has
                changed.
        """
        ids_bytes, rows_bytes, initial_ids_bytes, initial_rows_bytes = arrays
        self._check_size(sum(map(len, arrays)), len(ids_bytes))
        ids = array_of(ids_bytes, torch.int64)
        if len(ids) != header.ids:
            raise ValueError(
                f"{len(ids)} ids were received, {header.ids} were announced"
            )
        if header.tables:
            updates = _updates(header, specs, ids, rows_bytes)
            if len(initial_ids_bytes) or len(initial_rows_bytes):
                raise ValueError("a write of several tables has no initial rows")
            for update in updates:
                self._observer.ids("update", update.table, len(update.ids))
            action = _without_deletes(partial(self._tables.update_each, updates))
        else:
            operation, action = self._action(header, specs[0], ids, arrays)
            self._observer.ids(operation, header.table, len(ids))
        return self._once(header, arrays, from_primary, action)

    def _action(
        self,
        header: pb.WriteHeader,
        spec: TableSpec,
        ids: Tensor,
        arrays: Sequence[Tensor],
    ) -> tuple[str, Callable[[], int]]:
        """Returns the name of a write of one table, and the function that makes it."""
        _, rows_bytes, initial_ids_bytes, initial_rows_bytes = arrays
        name = header.table
        dtype = torch.float32 if header.float32 else value_dtype(spec.dtype)
        if header.kind == pb.WriteHeader.PUSH:
            values = _rows_of_ids(rows_bytes, ids, dtype, spec.dim)
            push = partial(self._tables.push, name, ids, values)
            return "push", _without_deletes(push)
        if header.kind == pb.WriteHeader.UPDATE:
            grads = _rows_of_ids(rows_bytes, ids, dtype, spec.dim)
            initial_ids = array_of(initial_ids_bytes, torch.int64)
            initial_rows = _rows_of_ids(
                initial_rows_bytes,
                initial_ids,
                torch.float32,
                spec.dim,
            )
            initial = (initial_ids, initial_rows) if len(initial_ids) else None
            update = partial(
                self._tables.update,
                name,
                ids,
                grads,
                initial,
            )
            return "update", _without_deletes(update)
        if header.kind == pb.WriteHeader.DELETE:
            return "delete", partial(self._tables.delete, name, ids)
        raise ValueError(f"kind must be PUSH, UPDATE or DELETE, got {header.kind}")

    def _check_size(self, size: int, ids_bytes: int) -> None:
        """Checks the size of a write, because other calls on the table wait for it.

        Raises:
            ValueError: The arrays have more than the largest number of bytes, or of
                ids.
        """
        most_bytes = self._max_write_bytes
        most_ids = most_bytes // BYTES_A_WRITTEN_ID
        if size > most_bytes or ids_bytes > 8 * most_ids:
            raise ValueError(
                f"a write may have at most {most_ids} ids and {most_bytes} bytes"
                " (--max-write): split it"
            )

    def _specs(self, header: pb.PullHeader | pb.WriteHeader) -> list[TableSpec]:
        """Returns the specification of each table of a call."""
        if header.table and header.tables:
            raise ValueError("a call has either a table or several tables")
        names = [header.table]
        if header.tables:
            names = [table.table for table in header.tables]
        specs = []
        for name in names:
            spec = self._tables.spec(name)
            if spec is None:
                raise self._tables.no_table(name)
            specs.append(spec)
        return specs


def _row_bytes(spec: TableSpec) -> int:
    """Returns the size in bytes of a row that a client reads."""
    return spec.dim * value_dtype(spec.dtype).itemsize


def _checked_counts(tables: Sequence[pb.TableIds], ids: Tensor) -> list[int]:
    """Returns the number of ids of each table."""
    counts = [table.ids for table in tables]
    if sum(counts) != len(ids):
        raise ValueError(
            f"{len(ids)} ids were received, but the header has {sum(counts)}"
        )
    return counts


def _rows_of_ids(
    content: Tensor,
    ids: Tensor,
    dtype: torch.dtype,
    dim: int,
) -> Tensor:
    """Returns the rows of ``ids``, (N, dim), from their bytes."""
    rows = array_of(content, dtype, dim)
    if len(rows) != len(ids):
        raise ValueError(
            f"{len(ids)} ids and {len(rows)} rows were received: there must be a row"
            " for each id"
        )
    return rows


def _updates(
    header: pb.WriteHeader,
    specs: Sequence[TableSpec],
    ids: Tensor,
    rows: Tensor,
) -> list[RowUpdate]:
    """Returns the updates of a write of several tables, from its ids and the bytes of
    its rows.
    """
    names = [table.table for table in header.tables]
    for name, spec in zip(names, specs, strict=True):
        if spec.initial_rows:
            raise NoInitialRow(name)
    if len(set(names)) < len(names):
        raise ValueError("an update of several tables must have each table once")
    counts = _checked_counts(header.tables, ids)
    dtypes = []
    row_bytes = []
    for spec in specs:
        dtype = torch.float32 if header.float32 else value_dtype(spec.dtype)
        dtypes.append(dtype)
        row_bytes.append(spec.dim * dtype.itemsize)

    begins, size = places_of_tables(row_bytes, counts)
    if size != len(rows):
        raise ValueError(
            f"{len(rows)} bytes of rows were received: there must be a row for each id,"
            f" of {size} bytes"
        )
    table_ids = torch.split(ids, counts)
    updates = []
    for number, table in enumerate(header.tables):
        begin = begins[number]
        end = begin + counts[number] * row_bytes[number]
        grads = array_of(rows[begin:end], dtypes[number], specs[number].dim)
        rate = table.learning_rate if table.HasField("learning_rate") else None
        if rate is not None and not (math.isfinite(rate) and rate >= 0):
            raise ValueError(
                f"the learning rate must be finite and not negative, got {rate}"
            )
        update = RowUpdate(
            table=table.table,
            ids=table_ids[number],
            grads=grads,
            learning_rate=rate,
        )
        updates.append(update)
    return updates


def _header(kind: type[_Header], content_of: dict[int, Tensor]) -> _Header:
    """Returns the header of a message, from the fields of the message."""
    try:
        header: _Header = kind.FromString(content(content_of.get(1)))
    except DecodeError:
        raise ValueError("the header is not one of the protocol") from None
    return header


def _filled(part: PartRead) -> bytes:
    """Returns the reply with a part of a read of rows."""
    if not part.size:
        message, _ = new_message([])
        return message
    message, memory = new_message([(pb.PullReply.ROWS_FIELD_NUMBER, part.size)])
    part.read(memory[0])
    return message


def _in_one_piece(parts: list[Tensor]) -> Tensor:
    """Returns parts, (size,) uint8, one after the other in memory that is aligned and
    does not depend on messages.
    """
    size = sum(map(len, parts))
    joined = row_ops.rows_empty(1, size)[0]
    memory = joined.numpy()
    begin = 0
    for part in parts:
        memory[begin : begin + len(part)] = part.numpy()
        begin += len(part)
    return joined


def _without_deletes(write: Callable[[], None]) -> Callable[[], int]:
    """Returns an action that makes a write and returns 0, the number of deleted rows."""

    def action() -> int:
        write()
        return 0

    return action
