"""The gRPC methods of the parameter server, which call the tables and turn errors into gRPC statuses."""

from __future__ import annotations

import logging
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, NoReturn

import grpc

from torchrec_recstore.rpc import recstore_pb2 as pb
from torchrec_recstore.rpc.protocol import (
    ERROR_KEY,
    NO_INITIAL_ROW,
    PART_IDS,
    REMOTE_ERRORS,
    ServerRestartedError,
    Status,
    shortened,
    to_bytes,
)
from torchrec_recstore.rpc.recstore_pb2_grpc import ParameterServerServicer
from torchrec_recstore.rpc.table_spec import TableSpec
from torchrec_recstore.service.applied import AppliedRequests, ServerStoppingError
from torchrec_recstore.service.backend import NoInitialRow
from torchrec_recstore.service.calls import CallRefusedError
from torchrec_recstore.service.checkpoints import DataDirectory
from torchrec_recstore.service.hosted import HostedBackend
from torchrec_recstore.service.metrics import Observer
from torchrec_recstore.service.row_calls import RowCalls
from torchrec_recstore.service.shared_memory import SharedMemoryServer

MAX_REQUEST_BYTES = 2**31
_NAME_BYTES = 1024  # of a table
STOPPED = ("stopped-0", "stopped-1")
"""The names of the checkpoints that servers write when they stop.

The names alternate, because not every file system can replace a directory.
"""

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
        self._saving = threading.Lock()
        self._applied = AppliedRequests()
        self._rows = RowCalls(tables, self._applied.once, observer, self._check_incarnation, max_request_bytes)
        self._memory = SharedMemoryServer(self._rows, observer, _status)
        self._incarnation = uuid.uuid4().hex
        if directory.last is not None:
            tables.load(directory.checkpoint(directory.last))
        stopped = directory.stopped
        if stopped is not None and stopped["checkpoint"] == directory.last:
            self._incarnation = stopped["incarnation"]
            self._applied.from_json(stopped["applied"])

    def gauges(self) -> dict[str, tuple[str, Callable[[], float]]]:
        """Returns numbers for the metrics. See :meth:`GrpcServer.gauges`."""
        return {
            "tables": ("The number of tables.", lambda: len(self._tables.specs())),
            "clients": ("The number of clients that may repeat a write.", lambda: self._applied.clients),
        }

    def begin(self) -> None:
        """Deletes the state of the stopped server from the disk.

        It must be called after everything that can fail at the start, and before the first call is taken.
        """
        if self._directory.stopped is not None:
            self._directory.set_last(self._directory.last)
        self._memory.start()

    def stop(self) -> None:
        """Refuses new writes, waits for the running writes, and saves all tables.

        The next server on the same directory continues with these tables and answers repeated requests.
        """
        self._memory.stop()
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
            size = len(request.table.encode())
            if not 0 < size <= _NAME_BYTES:
                raise ValueError(
                    f"the name of a table must have at least 1 and at most {_NAME_BYTES} bytes, got {size}"
                )
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
            yield from self._rows.pull(requests)

    def Write(self, requests: Iterator[pb.WriteRequest], context: Any) -> pb.WriteReply:
        """See recstore.proto."""
        with self._call("Write", context):
            return self._rows.write(requests)

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

    def Attach(self, request: pb.AttachRequest, context: Any) -> pb.AttachReply:
        """See recstore.proto."""
        with self._call("Attach", context):
            return self._memory.offer()

    def _check_incarnation(self, expected: str) -> None:
        if expected and expected != self._incarnation:
            raise ServerRestartedError(
                "the server was restarted from its last checkpoint, and later writes are lost: load a checkpoint"
            )

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
        except CallRefusedError:
            outcome = "refused"
            raise
        except Exception as error:
            if not context.is_active():  # the request could not be read, because the client has disconnected
                outcome = "cancelled"
                raise
            outcome = type(error).__name__
            _abort(context, _status(method, error))
        finally:
            self._observer.call(method, outcome, time.perf_counter() - begin)


def _status(method: str, error: Exception) -> Status:
    """Returns what a client is told of an error."""
    if isinstance(error, CallRefusedError):
        return Status(error.code.value[0], str(error), error.kind)
    kinds = (kind for kind in REMOTE_ERRORS.values() if type(error) is kind)
    kind = next(kinds, None) or next((kind for kind in _CODES if isinstance(error, kind)), None)
    details, name = str(error), ""
    code = grpc.StatusCode.INTERNAL
    if isinstance(error, ServerStoppingError):  # clients then repeat the call at the next server
        code = grpc.StatusCode.UNAVAILABLE
    elif kind is None:
        _log.error("%s failed", method, exc_info=error)
        details = f"{method} failed: {type(error).__name__}: {error}"
    else:
        code = next(code for known, code in _CODES.items() if issubclass(kind, known))
        name = NO_INITIAL_ROW if isinstance(error, NoInitialRow) else kind.__name__
    return Status(code.value[0], shortened(details), name)


def _abort(context: Any, status: Status) -> NoReturn:
    if status.error:
        context.set_trailing_metadata(((ERROR_KEY, status.error),))
    context.abort(next(code for code in grpc.StatusCode if code.value[0] == status.code), status.details)
    raise AssertionError("abort raises")
