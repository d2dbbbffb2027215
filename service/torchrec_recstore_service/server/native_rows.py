"""Calls on rows by TCP and by shared memory, which the native library answers without
Python: csrc/row_server.h.

Python answers the calls for which the library has no function: those on tables with a
cold store or with initial rows, those with an error in the request, and those about the
server itself.

Tests: tests/service/test_native_rows.py, tests/service/test_shared_memory.py.
"""

from __future__ import annotations

import ctypes
import logging
import ssl
import threading
from collections.abc import Callable
from ctypes import byref
from pathlib import Path

import torch
from torch import Tensor

from torchrec_recstore.row_types import value_dtype
from torchrec_recstore_service.server.applied import AppliedRequests
from torchrec_recstore_service.server.listening import (
    GRACE_S,
    GrpcServer,
    ListenOptions,
    host_and_port,
)
from torchrec_recstore_service.server.native import (
    CallCounts,
    Native,
    NativeStatus,
    PythonCall,
    RunGate,
)
from torchrec_recstore_service.server.row_calls import PartRead, RowCalls
from torchrec_recstore_service.tables.hosted import HostedTables
from torchrec_recstore_service.tables.hosted_table import Hosted
from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire import row_ops
from torchrec_recstore_service.wire.protocol import (
    BYTES_A_WRITTEN_ID,
    PART_BYTES,
    Status,
    array_of,
)
from torchrec_recstore_service.wire.segment import (
    MESSAGE_BYTES,
    SEGMENT_BYTES,
    is_available,
)
from torchrec_recstore_service.wire.table_rows import aligned

_PYTHON_CALLS = 8  # threads for the calls that Python answers
_LOOK_S = 0.5  # time after which a change of the token or of the certificates is seen

_log = logging.getLogger(__name__)


class NativeRows:
    """The listeners for calls on rows by TCP and by shared memory, and the tables that
    the library reads and writes.

    Args:
        tables: The tables.
        applied: The writes that have been carried out.
        gate: The run of the server.
        pair: The part of the server in its pair.
        counts: The counts of calls.
        calls: The calls on rows in Python.
        status: The function that returns what a client is told of an error, by the
            method and the error.
        describe: The function that returns the state of the server.
        max_write_bytes: The largest size in bytes of the arrays of a write.
    """

    def __init__(
        self,
        tables: HostedTables,
        applied: AppliedRequests,
        gate: RunGate,
        pair: Native,
        counts: CallCounts,
        calls: RowCalls,
        status: Callable[[str, Exception], Status],
        describe: Callable[[], pb.DescribeReply],
        max_write_bytes: int,
    ) -> None:
        self._python = calls
        self._status = status
        self._describe = describe
        self._counts = counts
        self._max_write_bytes = max_write_bytes
        self._used_by_library = (applied, gate, pair)
        self._calls = Native(
            "calls",
            row_ops.row_api(),
            applied.handle,
            gate.handle,
            pair.handle,
            counts.handle,
            max_write_bytes,
            max_write_bytes // BYTES_A_WRITTEN_ID,
        )
        if self._calls.handle is None:
            raise ImportError(
                "torchrec_recstore and torchrec_recstore_service do not fit together:"
                " install the same version of both"
            )
        self._server: Native | None = None
        self._listening: GrpcServer | None = None
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self.port = 0
        """The port. 0: the server takes no calls by TCP beside those by gRPC."""
        self.name = ""
        """The name of this start of the server, which is random.

        Connections by TCP name it.
        """
        self.advertised = ""
        """Where clients reach the port from outside: see
        :attr:`ListenOptions.advertise_rows`.
        """
        tables.watch(
            self._add, lambda name: self._calls.invoke("remove", name.encode())
        )

    def start(self, options: ListenOptions, listening: GrpcServer) -> None:
        """Takes calls.

        Args:
            options: The address, who may call the server, and how much at a time.
            listening: The server for the other calls, with the token, the certificates
                and the memory of requests.

        Raises:
            OSError: The address cannot be listened on.
        """
        status = NativeStatus()
        self._memory = listening.memory
        server = Native(
            "server",
            self._calls.handle,
            self._counts.handle,
            self._memory.handle,
            options.max_calls,
            options.max_connections,
            self._max_write_bytes,
            byref(status),
        )
        self._server = server
        status.check()
        self._listening = listening
        self.name = server.invoke("name").decode()
        self.advertised = options.advertise_rows or ""
        self._set_token()
        if is_available():
            server.checked("listen_memory", SEGMENT_BYTES, MESSAGE_BYTES)
        if listening.certificates is None or self._set_certificates(options):
            host = host_and_port(options.listen)[0]
            try:
                self.port = server.checked("listen", host.encode(), options.rows_port)
            except OSError as error:
                raise OSError(f"--rows-port {options.rows_port}: {error}") from None
        targets = [self._answer_calls] * _PYTHON_CALLS
        targets.append(lambda: self._look(options, listening))
        for number, target in enumerate(targets):
            name = f"recstore-rows-{number}"
            thread = threading.Thread(target=target, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def offer(self) -> pb.AttachReply:
        """Returns how clients make connections for rows.

        See ``Attach`` in recstore.proto.
        """
        if self._server is None:
            return pb.AttachReply()
        self._set_token()  # the client has the present one
        text = ctypes.create_string_buffer(128)
        self._server.invoke("memory_offer", text, len(text))
        name, secret = text.value.split(b" ")
        offer = self.port_offer()
        offer.socket = name.decode()
        offer.secret = secret
        return offer

    def port_offer(self) -> pb.AttachReply:
        """Returns how clients make connections by TCP.

        See ``Attach`` in recstore.proto.
        """
        return pb.AttachReply(
            rows_port=self.port,
            server=self.name,
            rows_address=self.advertised,
        )

    def set_backup(self, backup: bool, secret: str) -> None:
        """Sets whether only calls of the primary are taken, which have ``secret`` in
        place of the token.
        """
        if self._server is not None:
            self._server.invoke("set_backup", backup, secret.encode())

    @property
    def libssl(self) -> str:
        """The path of Python's libssl, or "" if that is a part of Python."""
        return _libssl()

    def gauges(self) -> dict[str, tuple[str, Callable[[], float]]]:
        """Returns numbers for the metrics. See :meth:`GrpcServer.gauges`."""

        def number(function: str) -> Callable[[], float]:
            return lambda: 0 if self._server is None else self._server.invoke(function)

        return {
            "row_connections": (
                "The number of connections for rows by TCP.",
                number("connections"),
            ),
            "row_calls_running": (
                "The number of calls on rows by TCP that run.",
                number("running"),
            ),
            "row_calls_ended": (
                (
                    "The number of calls on rows that were ended because their client"
                    " was slow."
                ),
                number("ended"),
            ),
            "shared_memory_connections": (
                "The number of connections by shared memory.",
                number("memory_connections"),
            ),
            "shared_memory_calls_running": (
                "The number of calls by shared memory that run.",
                number("memory_running"),
            ),
            "shared_memory_bytes": (
                "The size of the memory that clients share with this server.",
                number("memory_bytes"),
            ),
        }

    def stop(self) -> None:
        """Refuses new calls, and waits for the running ones."""
        self._stopping.set()
        if self._server is not None:
            self._server.invoke("stop", GRACE_S)
            for thread in self._threads:
                thread.join()
            self._server.free()
        self._calls.free()

    def _add(self, hosted: Hosted) -> None:
        """Lets the library read and write a table, if it has the functions for it."""
        spec = hosted.spec
        if spec.initial_rows or spec.temporary or hosted.group.cold_rows.tiers:
            return
        self._calls.invoke(
            "add",
            hosted.name.encode(),
            hosted.table.handle,
            hosted.group.handle,
            spec.dim,
            value_dtype(spec.dtype).itemsize,
            hosted.table.optimizer.lr,
        )

    def _set_token(self) -> None:
        assert self._server is not None
        assert self._listening is not None
        token = self._listening.token
        self._server.invoke("set_token", b"" if token is None else token.value.encode())

    def _set_certificates(self, options: ListenOptions) -> bool:
        assert self._server is not None
        try:
            self._server.checked(
                "set_tls",
                _libssl().encode(),
                _path_bytes(options.tls_cert),
                _path_bytes(options.tls_key),
                _path_bytes(options.client_ca),
            )
        except OSError as error:
            _log.warning(
                "calls on rows from other hosts go by gRPC, which takes several times"
                " as long: %s",
                error,
            )
            return False
        return True

    def _look(self, options: ListenOptions, listening: GrpcServer) -> None:
        """Tells the library of a new token and of new certificates, and ends late calls
        that hold its memory.
        """
        assert self._server is not None
        watched = listening.certificates
        certificates = None if watched is None else watched.value
        while not self._stopping.wait(_LOOK_S):
            if self._server.invoke("waiting"):
                listening.end_late()  # calls by gRPC may hold the memory
            self._set_token()
            present = None if watched is None else watched.value
            # else the files change at this moment
            if present is not certificates and self._set_certificates(options):
                certificates = present

    def _answer_calls(self) -> None:
        assert self._server is not None
        call = PythonCall()
        while self._server.invoke("next", byref(call)):
            try:
                self._answer(call)
            except Exception as error:
                status = self._status("Rows", error)
                self._reply(call, pb.SegmentReply(last=True), status=status)

    def _answer(self, call: PythonCall) -> None:
        request = pb.SegmentRequest.FromString(
            ctypes.string_at(call.message, call.message_bytes)
        )
        if request.WhichOneof("call") in ("describe", "attach"):
            is_describe = request.HasField("describe")
            answer = self._describe() if is_describe else self.offer()
            content = answer.SerializeToString()
            reply = pb.SegmentReply(last=True, found=len(content))
            self._reply(call, reply, _address(content))
            return
        # Copies, because a cold store may keep them longer than the call.
        arrays = [
            _memory(address, size).clone()
            for address, size in zip(call.arrays, call.sizes, strict=True)
        ]
        if request.HasField("write"):
            header = request.write
            specs = self._python.writable(header)
            deleted = self._python.apply(
                header,
                specs,
                arrays,
                bool(call.from_primary),
            )
            self._reply(call, pb.SegmentReply(last=True, deleted=deleted))
            return
        self._answer_pull(call, request.pull, arrays[0])

    def _answer_pull(
        self,
        call: PythonCall,
        header: pb.PullHeader,
        id_bytes: Tensor,
    ) -> None:
        specs = self._python.readable(header)
        ids = array_of(id_bytes, torch.int64)
        parts: list[PartRead] = []
        if header.want == pb.PullHeader.ROWS:
            parts = self._python.parts(header, specs, ids, PART_BYTES)
        size = sum(aligned(part.size) for part in parts)
        if header.want == pb.PullHeader.FOUND_ROWS:
            row_bytes = specs[0].dim * value_dtype(specs[0].dtype).itemsize
            size = len(ids) * (1 + row_bytes)
        if 0 < call.room < size:
            raise ValueError(
                f"{size} bytes do not fit into the {call.room} bytes of the shared"
                " memory"
            )
        if header.want != pb.PullHeader.ROWS:
            reply = self._python.existing_rows(header, ids)
            # protobuf makes them anew each time; _reply needs their memory
            has_row = reply.found
            rows = reply.rows
            segment = pb.SegmentReply(last=True, found=len(has_row), rows=len(rows))
            self._reply(
                call,
                segment,
                _address(has_row),
                _address(rows),
            )
            return
        for number, part in enumerate(parts, 1):
            memory = row_ops.rows_empty(1, part.size)[0]
            part.read(memory)
            segment = pb.SegmentReply(last=number == len(parts), rows=part.size)
            if not self._reply(call, segment, rows=memory.data_ptr()):
                return

    def _reply(
        self,
        call: PythonCall,
        reply: pb.SegmentReply,
        found: int | None = None,
        rows: int | None = None,
        status: Status | None = None,
    ) -> bool:
        """Sends a reply, and returns whether the client is still there.

        Args:
            call: The call.
            reply: The message.
            found: The address of the array ``found`` of the reply. Default: None, the
                reply has none.
            rows: The address of the rows of the reply. Default: None, as for ``found``.
            status: The error of the call. Default: None, it has succeeded.
        """
        assert self._server is not None
        if status is None:
            status = Status(code=0, details="", error="")
        has_client = self._server.invoke(
            "reply",
            call.connection,
            status.code,
            status.details.encode(errors="replace"),
            status.error.encode(),
            found,
            reply.found,
            rows,
            reply.rows,
            reply.deleted,
            reply.last,
        )
        return bool(has_client)


def _memory(address: int, size: int) -> Tensor:
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    content = (ctypes.c_char * size).from_address(address)
    return torch.frombuffer(content, dtype=torch.uint8)


def _address(content: bytes) -> int | None:
    if not content:
        return None
    return ctypes.cast(ctypes.c_char_p(content), ctypes.c_void_p).value


def _path_bytes(path: Path | None) -> bytes:
    return b"" if path is None else str(path).encode()


def _libssl() -> str:
    """Returns the path of Python's libssl, or "" if that is a part of Python."""
    assert ssl.OPENSSL_VERSION  # the library is mapped, because Python has loaded it
    with open("/proc/self/maps") as maps:
        return next((line.split()[-1] for line in maps if "/libssl" in line), "")
