"""The gRPC methods of the parameter server, which call the tables and turn errors into gRPC statuses."""

from __future__ import annotations

import logging
import shutil
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn
from urllib.parse import quote

import grpc
import torch
from torch import Tensor

from torchrec_recstore.row_types import value_dtype
from torchrec_recstore.rpc import recstore_pb2 as pb
from torchrec_recstore.rpc.protocol import (
    ERROR_KEY,
    NO_INITIAL_ROW,
    PART_IDS,
    REMOTE_ERRORS,
    ServerRestartedError,
    from_bytes,
    rows_a_part,
    to_bytes,
)
from torchrec_recstore.rpc.recstore_pb2_grpc import ParameterServerServicer
from torchrec_recstore.rpc.table_spec import TableSpec
from torchrec_recstore.service.backend import NoInitialRow
from torchrec_recstore.service.checkpoints import DataDirectory
from torchrec_recstore.service.hosted import HostedBackend
from torchrec_recstore.service.metrics import Observer

MAX_REQUEST_BYTES = 2**31
STOPPED = ("stopped-0", "stopped-1")
"""The names of the checkpoints that servers write when they stop.

The names alternate, because not every file system can replace a directory.
"""

_CLIENTS = 10_000
_ERROR_BYTES = 4000
_CODES = {
    ValueError: grpc.StatusCode.INVALID_ARGUMENT,
    TypeError: grpc.StatusCode.INVALID_ARGUMENT,
    MemoryError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    FileExistsError: grpc.StatusCode.ALREADY_EXISTS,
    FileNotFoundError: grpc.StatusCode.NOT_FOUND,
    OSError: grpc.StatusCode.INTERNAL,
    ServerRestartedError: grpc.StatusCode.FAILED_PRECONDITION,
}

_log = logging.getLogger(__name__)


class ServerStoppingError(RuntimeError):
    """The server is stopping and accepts no more writes."""


@dataclass
class _Client:
    done_before: int = 0
    answers: dict[int, Future[int]] = field(default_factory=dict)


class AppliedRequests:
    """The writes that have been carried out or are running. A repeated write is answered without a second execution.

    Clients number their requests. With each request, a client sends the number below which it repeats no request.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clients: OrderedDict[str, _Client] = OrderedDict()
        self._closed = False

    def once(self, client: str, request: int, done_before: int, action: Callable[[], int]) -> int:
        """Calls ``action`` and returns its result, or returns the first result if the request is repeated.

        A request that raised an error may be repeated; ``action`` is then called again.

        Args:
            client: The name of the client.
            request: The number of the request.
            done_before: The number below which the client repeats no request.
            action: The function that carries out the request.

        Raises:
            ValueError: ``request`` is below the number below which the client repeats no request.
            ServerStoppingError: :meth:`close` has been called.
        """
        with self._lock:
            self.check_open()
            known = self._clients.setdefault(client, _Client())
            self._clients.move_to_end(client)
            while len(self._clients) > _CLIENTS:
                self._clients.popitem(last=False)
            if done_before > known.done_before:
                known.done_before = done_before
                for number in [number for number in known.answers if number < done_before]:
                    del known.answers[number]
            if request < known.done_before:
                raise ValueError(f"request {request} of client {client!r} has been answered already")
            answer = known.answers.get(request)
            mine = answer is None
            if answer is None:
                answer = known.answers[request] = Future()
        if not mine:
            return answer.result()
        try:
            answer.set_result(action())
        except BaseException as error:
            with self._lock:
                known.answers.pop(request, None)
            answer.set_exception(error)
        return answer.result()

    def check_open(self) -> None:
        """Raises ServerStoppingError if :meth:`close` has been called."""
        if self._closed:
            raise ServerStoppingError("the server stops")

    def close(self) -> None:
        """Refuses new requests and waits for the running requests."""
        with self._lock:
            self._closed = True
            answers = [answer for client in self._clients.values() for answer in client.answers.values()]
        wait(answers)

    def to_json(self) -> dict[str, Any]:
        """Returns the requests that have been carried out, for :meth:`from_json`. Call :meth:`close` before."""
        with self._lock:
            return {
                name: {
                    "done_before": client.done_before,
                    "answers": {str(number): answer.result() for number, answer in client.answers.items()},
                }
                for name, client in self._clients.items()
            }

    def from_json(self, document: dict[str, Any]) -> None:
        """Adds the requests that another server has carried out."""
        for name, entry in document.items():
            client = self._clients[name] = _Client(entry["done_before"])
            for number, deleted in entry["answers"].items():
                client.answers[int(number)] = Future()
                client.answers[int(number)].set_result(deleted)


class ParameterServer(ParameterServerServicer):
    """The gRPC service of a parameter server.

    Args:
        tables: The tables that are served.
        directory: The directory for checkpoints.
        observer: The observer that every call is reported to.
        max_request_bytes: The largest size in bytes of a write. The server collects all parts of a write before it
            carries out the write. Default: 2 GiB.
    """

    def __init__(
        self,
        tables: HostedBackend,
        directory: DataDirectory,
        observer: Observer,
        max_request_bytes: int = MAX_REQUEST_BYTES,
    ) -> None:
        self._tables = tables
        self._directory = directory
        self._observer = observer
        self._max_request_bytes = max_request_bytes
        self._saving = threading.Lock()
        self._applied = AppliedRequests()
        self._incarnation = uuid.uuid4().hex
        if directory.last is not None:
            tables.load(directory.checkpoint(directory.last))
        stopped = directory.stopped
        if stopped is not None and stopped["checkpoint"] == directory.last:
            self._incarnation = stopped["incarnation"]
            self._applied.from_json(stopped["applied"])

    def begin(self) -> None:
        """Deletes the state of the stopped server from the disk.

        It must be called after everything that can fail at the start, and before the first call is taken.
        """
        if self._directory.stopped is not None:
            self._directory.set_last(self._directory.last)

    def stop(self) -> None:
        """Refuses new writes, waits for the running writes, and saves all tables.

        The next server on the same directory continues with these tables and answers repeated requests.
        """
        self._applied.close()
        with self._saving:
            self._save_stopped()
        self._tables.close()

    def _save_stopped(self) -> None:
        if self._tables.specs() or self._directory.last is not None:
            # The name must differ from the last checkpoint, from which the next server starts if this save fails.
            name = next(name for name in STOPPED if name != self._directory.last)
            path = self._directory.checkpoint(name)
            shutil.rmtree(path, ignore_errors=True)
            self._tables.save(path)
            stopped = {"checkpoint": name, "incarnation": self._incarnation, "applied": self._applied.to_json()}
            self._directory.set_last(name, stopped)

    def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeReply:
        """See recstore.proto."""
        with self._call("Describe", context):
            tables = {name: spec.to_json() for name, spec in self._tables.specs().items()}
            return pb.DescribeReply(incarnation=self._incarnation, tables=tables)

    def Create(self, request: pb.CreateRequest, context: Any) -> pb.Empty:
        """See recstore.proto."""
        with self._call("Create", context):
            if not request.table:
                raise ValueError("a table needs a name")
            self._tables.create(request.table, TableSpec.from_json(request.spec))
            return pb.Empty()

    def Drop(self, request: pb.DropRequest, context: Any) -> pb.Empty:
        """See recstore.proto."""
        with self._call("Drop", context):
            if self._tables.spec(request.table) is not None:
                self._tables.drop(request.table)
            return pb.Empty()

    def Pull(self, requests: Iterator[pb.PullRequest], context: Any) -> Iterator[pb.PullReply]:
        """See recstore.proto."""
        with self._call("Pull", context):
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

    def Write(self, requests: Iterator[pb.WriteRequest], context: Any) -> pb.WriteReply:
        """See recstore.proto."""
        with self._call("Write", context):
            header = next(requests, pb.WriteRequest()).header
            self._check_incarnation(header.incarnation or "none")
            spec = self._spec(header.table)
            action = self._write(header, spec, requests)
            deleted = self._applied.once(header.client, header.request, header.done_before, action)
            return pb.WriteReply(deleted=deleted)

    def Ids(self, request: pb.IdsRequest, context: Any) -> Iterator[pb.IdsReply]:
        """See recstore.proto."""
        with self._call("Ids", context):
            self._check_incarnation(request.incarnation)
            ids = self._tables.ids(request.table)
            for place in range(0, len(ids), PART_IDS):
                yield pb.IdsReply(ids=to_bytes(ids[place : place + PART_IDS]))

    def Stats(self, request: pb.StatsRequest, context: Any) -> pb.StatsReply:
        """See recstore.proto."""
        with self._call("Stats", context):
            self._check_incarnation(request.incarnation)
            return pb.StatsReply(counts=asdict(self._tables.stats(request.table)))

    def Save(self, request: pb.SaveRequest, context: Any) -> pb.Empty:
        """See recstore.proto."""
        with self._call("Save", context):
            self._check_incarnation(request.incarnation or "none")
            path = self._directory.checkpoint(request.name)
            if request.name in STOPPED:
                raise ValueError(f"a server that stops saves as {request.name!r}: choose another name")

            def save() -> int:
                with self._saving:
                    self._tables.save(path, request.overwrite)
                    self._directory.set_last(request.name)
                return 0

            self._applied.once(request.client, request.request, request.done_before, save)
            return pb.Empty()

    def Load(self, request: pb.LoadRequest, context: Any) -> pb.Empty:
        """See recstore.proto."""
        with self._call("Load", context):
            path = self._directory.checkpoint(request.name)
            with self._saving:
                self._applied.check_open()
                self._tables.load(path)
                self._directory.set_last(request.name)
            return pb.Empty()

    def _check_incarnation(self, expected: str) -> None:
        if expected and expected != self._incarnation:
            raise ServerRestartedError(
                "the server was restarted from its last checkpoint, and later writes are lost: load a checkpoint"
            )

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

    @contextmanager
    def _call(self, method: str, context: Any) -> Iterator[None]:
        """Reports errors to the client, and the call to the observer."""
        begin = time.perf_counter()
        outcome = "ok"
        try:
            yield
        except GeneratorExit:  # the client has disconnected
            outcome = "cancelled"
            raise
        except Exception as error:
            if not context.is_active():  # the request could not be read, because the client has disconnected
                outcome = "cancelled"
                raise
            outcome = type(error).__name__
            _abort(context, method, error)
        finally:
            self._observer.call(method, outcome, time.perf_counter() - begin)


def _abort(context: Any, method: str, error: Exception) -> NoReturn:
    kinds = (kind for kind in REMOTE_ERRORS.values() if type(error) is kind)
    kind = next(kinds, None) or next((kind for kind in _CODES if isinstance(error, kind)), None)
    details = str(error)
    code = grpc.StatusCode.INTERNAL
    if kind is None and not isinstance(error, ServerStoppingError):
        _log.error("%s failed", method, exc_info=error)
        details = f"{method} failed: {type(error).__name__}: {error}"
    elif kind is not None:
        code = next(code for known, code in _CODES.items() if issubclass(kind, known))
        name = NO_INITIAL_ROW if isinstance(error, NoInitialRow) else kind.__name__
        context.set_trailing_metadata(((ERROR_KEY, name),))
    if isinstance(error, ServerStoppingError):  # clients then repeat the call at the next server
        code = grpc.StatusCode.UNAVAILABLE
    context.abort(code, _shortened(details))
    raise AssertionError("abort raises")


def _shortened(details: str) -> str:
    """Removes the middle of a long message, because gRPC sends it in a header, as percent-encoded UTF-8."""
    half = _ERROR_BYTES // 2
    if len(quote(details)) <= _ERROR_BYTES:
        return details
    begin, end = details[:half], details[-half:]
    while len(quote(begin)) > half:
        begin = begin[:-1]
    while len(quote(end)) > half:
        end = end[1:]
    return f"{begin} ... {end}"


def _nothing_deleted(write: Callable[[], None]) -> Callable[[], int]:
    def action() -> int:
        write()
        return 0

    return action
