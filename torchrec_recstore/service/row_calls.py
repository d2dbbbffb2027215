"""The calls of the parameter server that read and write rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from torchrec_recstore.row_types import value_dtype
from torchrec_recstore.rpc import recstore_pb2 as pb
from torchrec_recstore.rpc.protocol import PART_IDS, from_bytes, rows_a_part, to_bytes
from torchrec_recstore.rpc.table_spec import TableSpec
from torchrec_recstore.service.hosted import HostedBackend
from torchrec_recstore.service.metrics import Observer


class _Once(Protocol):
    def __call__(self, client: str, request: int, done_before: int, action: Callable[[], int]) -> int: ...


class RowCalls:
    """The calls that read and write rows of the tables of a server.

    Args:
        tables: The tables.
        once: The function that carries out each numbered write once. See :class:`AppliedRequests`.
        observer: The observer that the ids of each call are reported to.
        check_incarnation: The function that raises an error if a call is for another incarnation of the server. The
            empty string means that any incarnation may answer.
        max_request_bytes: The largest size in bytes of a write.
    """

    def __init__(
        self,
        tables: HostedBackend,
        once: _Once,
        observer: Observer,
        check_incarnation: Callable[[str], None],
        max_request_bytes: int,
    ) -> None:
        self._tables = tables
        self._once = once
        self._observer = observer
        self._check_incarnation = check_incarnation
        self._max_request_bytes = max_request_bytes

    def pull(self, requests: Iterator[pb.PullRequest]) -> Iterator[pb.PullReply]:
        """Reads rows. See ``Pull`` in recstore.proto."""
        header: pb.PullHeader | None = None
        for request in requests:
            if header is None:
                header = request.header
                self._check_incarnation(header.incarnation)
                spec = self._spec(header.table)
                size = PART_IDS
                if header.want != pb.PullHeader.FOUND:
                    size = rows_a_part(spec.dim * value_dtype(spec.dtype).itemsize)
            ids = from_bytes([request.ids], torch.int64)
            for place in range(0, len(ids), size):
                yield self._pulled(header, ids[place : place + size])

    def write(self, requests: Iterator[pb.WriteRequest]) -> pb.WriteReply:
        """Writes, updates or deletes rows. See ``Write`` in recstore.proto."""
        header = next(requests, pb.WriteRequest()).header
        self._check_incarnation(header.incarnation or "none")
        spec = self._spec(header.table)
        action = self._write(header, spec, requests)
        return pb.WriteReply(deleted=self._once(header.client, header.request, header.done_before, action))

    def _spec(self, table: str) -> TableSpec:
        spec = self._tables.spec(table)
        if spec is None:
            raise self._tables.no_table(table)
        return spec

    def _pulled(self, header: pb.PullHeader, ids: Tensor) -> pb.PullReply:
        if header.want == pb.PullHeader.ROWS:
            self._observer.ids("pull", header.table, len(ids))
            return pb.PullReply(rows=to_bytes(self._tables.pull(header.table, ids)))
        if header.want == pb.PullHeader.FOUND:
            return pb.PullReply(found=to_bytes(self._tables.exists(header.table, ids)))
        if header.want == pb.PullHeader.FOUND_ROWS:
            self._observer.ids("pull", header.table, len(ids))
            found, rows = self._tables.found_rows(header.table, ids)
            return pb.PullReply(found=to_bytes(found), rows=to_bytes(rows))
        raise ValueError(f"want must be ROWS, FOUND or FOUND_ROWS, got {header.want}")

    def _write(self, header: pb.WriteHeader, spec: TableSpec, requests: Iterator[pb.WriteRequest]) -> Callable[[], int]:
        """Collects all parts of a write and returns the function that carries it out."""
        gathered = {"ids": [], "rows": [], "initial_ids": [], "initial_rows": []}  # type: dict[str, list[bytes]]
        size = 0
        for request in requests:
            for name, parts in gathered.items():
                parts.append(getattr(request, name))
                size += len(parts[-1])
            if size > self._max_request_bytes:
                raise ValueError(f"a write may have at most {self._max_request_bytes} bytes: split it")
        ids = from_bytes(gathered["ids"], torch.int64)
        if len(ids) != header.ids:
            raise ValueError(f"{len(ids)} ids were received, {header.ids} were announced")
        name = header.table

        def rows(part: str, of: Tensor, dtype: torch.dtype) -> Tensor:
            matrix = from_bytes(gathered[part], dtype, spec.dim)
            if len(matrix) != len(of):
                raise ValueError(f"{len(of)} ids and {len(matrix)} rows were received: there must be a row for each id")
            return matrix

        dtype = torch.float32 if header.float32 else value_dtype(spec.dtype)
        if header.kind == pb.WriteHeader.PUSH:
            values = rows("rows", ids, dtype)
            self._observer.ids("push", name, len(ids))
            return _nothing_deleted(lambda: self._tables.push(name, ids, values))
        if header.kind == pb.WriteHeader.UPDATE:
            grads = rows("rows", ids, dtype)
            initial_ids = from_bytes(gathered["initial_ids"], torch.int64)
            initial_rows = rows("initial_rows", initial_ids, torch.float32)
            initial = (initial_ids, initial_rows) if len(initial_ids) else None
            self._observer.ids("update", name, len(ids))
            return _nothing_deleted(lambda: self._tables.update(name, ids, grads, initial))
        if header.kind == pb.WriteHeader.DELETE:
            self._observer.ids("delete", name, len(ids))
            return lambda: self._tables.delete(name, ids)
        raise ValueError(f"kind must be PUSH, UPDATE or DELETE, got {header.kind}")


def _nothing_deleted(write: Callable[[], None]) -> Callable[[], int]:
    def action() -> int:
        write()
        return 0

    return action
