"""The gRPC methods of the parameter server, and the statuses of their errors."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, NoReturn

import grpc

from torchrec_recstore_service.server.applied import AppliedRequests
from torchrec_recstore_service.server.data_directory import DataDirectory
from torchrec_recstore_service.server.handlers import of_bytes
from torchrec_recstore_service.server.listening import GrpcServer, ListenOptions
from torchrec_recstore_service.server.looks import look
from torchrec_recstore_service.server.native import (
    CallCounts,
    CallRefusedError,
    ServerStoppingError,
)
from torchrec_recstore_service.server.native_rows import NativeRows
from torchrec_recstore_service.server.pair import Pair, PairOptions
from torchrec_recstore_service.server.row_calls import RowCalls
from torchrec_recstore_service.server.set_calls import SetCalls
from torchrec_recstore_service.tables.hosted import HostedTables
from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire.protocol import (
    ERROR_KEY,
    NO_INITIAL_ROW,
    PART_IDS,
    REMOTE_ERRORS,
    WRITE_BYTES,
    NoInitialRow,
    ServerRestartedError,
    Status,
    shortened,
    to_bytes,
)
from torchrec_recstore_service.wire.recstore_pb2_grpc import ParameterServerServicer
from torchrec_recstore_service.wire.table_spec import TableSpec

_NAME_BYTES = 1024  # of a table
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
        observer: The counts of calls and ids.
        max_write_bytes: The largest size in bytes of the arrays of a write. The server
            collects all parts of a write before it carries out the write. Default: 128
            MiB.
    """

    def __init__(
        self,
        tables: HostedTables,
        directory: DataDirectory,
        observer: CallCounts,
        max_write_bytes: int = WRITE_BYTES,
    ) -> None:
        self._tables = tables
        self._directory = directory
        self._looking = threading.Lock()
        self._observer = observer
        self._applied = AppliedRequests()
        self._pair = Pair()
        self._set = SetCalls(
            tables,
            directory,
            applied=self._applied,
            pair=self._pair,
        )
        self._rows = RowCalls(
            tables,
            once=self._set.write_once,
            observer=observer,
            check_epoch=self._set.check,
            max_write_bytes=max_write_bytes,
        )
        self._native = NativeRows(
            tables,
            applied=self._applied,
            gate=self._set.gate,
            pair=self._pair,
            counts=observer,
            calls=self._rows,
            status=_status,
            describe=self._described,
            max_write_bytes=max_write_bytes,
        )
        tables.alone = self._set.gate.exclusive

    def gauges(self) -> dict[str, tuple[str, Callable[[], float]]]:
        """Returns numbers for the metrics. See :meth:`GrpcServer.gauges`."""
        return {
            **self._native.gauges(),
            "tables": ("The number of tables.", lambda: len(self._tables.specs())),
            "load_pending": (
                (
                    "Whether rows are in memory that were read for a load, and that no"
                    " call sees yet: 1 or 0."
                ),
                lambda: self._set.loading,
            ),
            "received_bytes": (
                (
                    "The size of the files that the server has received of a save of"
                    " other servers."
                ),
                lambda: self._set.received_bytes,
            ),
            "clients": (
                "The number of clients that may repeat a write.",
                lambda: self._applied.clients,
            ),
            "backups": (
                "The number of servers that have all rows beside this one.",
                lambda: bool(self._pair.backup),
            ),
        }

    def begin(
        self,
        options: ListenOptions,
        listening: GrpcServer,
        pair: PairOptions | None = None,
    ) -> None:
        """See :meth:`SetCalls.begin`.

        Calls on rows have the token and the bounds of those by gRPC.
        """
        self._native.start(options, listening)
        if pair is None:
            self._set.begin()
        else:
            self._pair.begin(
                pair,
                listening=options,
                server=listening,
                rows=self._native,
                state=self._set,
                directory=self._directory,
            )

    def start(self, serving: Callable[[bool], object]) -> None:
        """Answers clients from now on.

        The servers of a pair find out first which of them does.
        """
        if self._pair.is_on:
            self._pair.start()
        else:
            serving(True)

    def is_first(self) -> bool:
        """Returns whether the server is in an epoch and is the first server of its set."""
        return self._set.is_first()

    def save_to_stop(self) -> None:
        """Refuses new writes, waits for the running writes, and saves all tables.

        The next server on the same directory continues with these tables and answers
        repeated requests.

        Raises:
            Exception: The tables cannot be saved. The server takes writes again.
        """
        self._applied.close()
        try:
            if self._pair.stop_following():
                self._set.stop()
                self._pair.stopped()
        except BaseException:
            self._applied.reopen()
            self._pair.stop_failed()
            raise

    def close(self) -> None:
        """Ends the calls by shared memory and by TCP, and frees the tables."""
        self._native.stop()
        self._tables.close()

    def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeReply:
        """See recstore.proto."""
        with self._call("Describe", context):
            return self._set.describe()

    def Create(self, request: pb.CreateRequest, context: Any) -> pb.Empty:
        """See recstore.proto."""
        with self._call("Create", context):
            size = len(request.table.encode())
            if not 0 < size <= _NAME_BYTES:
                raise ValueError(
                    "the name of a table must have at least 1 and at most"
                    f" {_NAME_BYTES} bytes, got {size}"
                )
            spec = TableSpec.from_json(request.spec)
            self._set.create(request, spec)
            return pb.Empty()

    def Drop(self, request: pb.DropRequest, context: Any) -> pb.Empty:
        """See recstore.proto."""
        with self._call("Drop", context):
            self._set.drop(request)
            return pb.Empty()

    @of_bytes
    def Pull(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """See recstore.proto."""
        with self._call("Pull", context):
            yield from self._rows.pull(requests)

    @of_bytes
    def Write(self, requests: Iterator[bytes], context: Any) -> bytes:
        """See recstore.proto."""
        with self._call("Write", context):
            return self._rows.write(requests)

    def Ids(self, request: pb.IdsRequest, context: Any) -> Iterator[pb.IdsReply]:
        """See recstore.proto."""
        with self._call("Ids", context):
            self._set.check(request.epoch)
            ids = self._tables.ids(request.table)
            self._set.check(request.epoch)
            for begin in range(0, len(ids), PART_IDS):
                part = ids[begin : begin + PART_IDS]
                yield pb.IdsReply(ids=to_bytes(part))

    def Stats(self, request: pb.StatsRequest, context: Any) -> pb.StatsReply:
        """See recstore.proto."""
        with self._call("Stats", context):
            self._set.check(request.epoch)
            return pb.StatsReply(counts=asdict(self._tables.stats(request.table)))

    def Look(self, request: pb.LookRequest, context: Any) -> pb.LookReply:
        """See recstore.proto."""
        with self._call("Look", context):
            self._set.check(request.epoch)
            # one after the other, because a look at a large table takes seconds of a
            # processor
            with self._looking:
                return self._tables.call_without_lock(
                    request.table,
                    partial(look, request),
                )

    def Save(self, request: pb.SaveRequest, context: Any) -> pb.SaveReply:
        """See recstore.proto."""
        with self._call("Save", context):
            return self._set.save(request, context.is_active)

    def Load(self, request: pb.LoadRequest, context: Any) -> pb.Empty:
        """See recstore.proto."""
        with self._call("Load", context):
            self._set.load(request)
            return pb.Empty()

    def Resume(self, request: pb.ResumeRequest, context: Any) -> pb.ResumeReply:
        """See recstore.proto."""
        with self._call("Resume", context):
            return self._set.resume(request)

    def ReadFile(self, request: pb.ReadFileRequest, context: Any) -> pb.ReadFileReply:
        """See recstore.proto."""
        with self._call("ReadFile", context):
            return self._set.read_file(request)

    def WriteFile(self, request: pb.WriteFileRequest, context: Any) -> pb.Empty:
        """See recstore.proto."""
        with self._call("WriteFile", context):
            self._set.write_file(request)
            return pb.Empty()

    def Replicate(
        self,
        request: pb.ReplicateRequest,
        context: Any,
    ) -> pb.ReplicateReply:
        """See recstore.proto."""
        with self._call("Replicate", context):
            return self._pair.replicate(request, context.invocation_metadata())

    def Attach(self, request: pb.AttachRequest, context: Any) -> pb.AttachReply:
        """See recstore.proto."""
        if request.port:
            return self._native.port_offer()
        with self._call("Attach", context):
            return self._native.offer()

    def _described(self) -> pb.DescribeReply:
        """Returns what ``Describe`` returns to a client that does not call by gRPC."""
        self._pair.check_primary()
        return self._set.describe()

    @contextmanager
    def _call(self, method: str, context: Any) -> Iterator[None]:
        """Reports errors to the client, and the call to the observer."""
        begin = time.perf_counter()
        outcome = "ok"
        try:
            if self._pair.is_on and method != "Replicate":
                self._pair.check_call(context.invocation_metadata())
            yield
        except GeneratorExit:  # the client has disconnected
            outcome = "cancelled"
            raise
        except CallRefusedError:
            outcome = "refused"
            raise
        except Exception as error:
            # the request could not be read, because the client has disconnected
            if not context.is_active():
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
    # clients then repeat the call at the next server
    if isinstance(error, ServerStoppingError):
        return _new_status(grpc.StatusCode.UNAVAILABLE, str(error))
    kind = _kind_of(error)
    if kind is None:
        _log.error("%s failed", method, exc_info=error)
        details = f"{method} failed: {type(error).__name__}: {error}"
        return _new_status(grpc.StatusCode.INTERNAL, details)
    code = next(code for base, code in _CODES.items() if issubclass(kind, base))
    name = kind.__name__
    if isinstance(error, NoInitialRow):
        name = NO_INITIAL_ROW
    return _new_status(code, str(error), name)


def _new_status(
    code: grpc.StatusCode,
    details: str,
    name: str = "",
) -> Status:
    return Status(code.value[0], shortened(details), name)


def _kind_of(error: Exception) -> type[Exception] | None:
    """Returns the class of error that a client raises.

    None if the error is a fault of the server.
    """
    for kind in REMOTE_ERRORS.values():
        if type(error) is kind:
            return kind
    for kind in _CODES:
        if isinstance(error, kind):
            return kind
    return None


def _abort(context: Any, status: Status) -> NoReturn:
    if status.error:
        metadata = ((ERROR_KEY, status.error),)
        context.set_trailing_metadata(metadata)
    codes_by_number = {code.value[0]: code for code in grpc.StatusCode}
    context.abort(codes_by_number[status.code], status.details)
    raise AssertionError("abort raises")
