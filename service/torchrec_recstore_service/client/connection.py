"""The connection to one parameter server, which repeats calls where that is safe.

Tests: tests/service/test_connections.py and test_faults.py.
"""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import grpc
import torch
from torch import Tensor

from torchrec_recstore.network import Backoff
from torchrec_recstore.utils import leave_to_parent
from torchrec_recstore_service.client.client_epoch import ClientEpoch, Runs, writes_lost
from torchrec_recstore_service.client.row_connections import (
    DoesNotFitError,
    RowConnections,
    ServedError,
)
from torchrec_recstore_service.client.row_port import RowPort
from torchrec_recstore_service.client.shared_memory import shared_memory
from torchrec_recstore_service.client.streams import Streams
from torchrec_recstore_service.client.tcp_rows import TcpConnection
from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire.access import Access, channel_of, tls_context
from torchrec_recstore_service.wire.agreement import run_label
from torchrec_recstore_service.wire.protocol import (
    ERROR_KEY,
    NO_INITIAL_ROW,
    REMOTE_ERRORS,
    SERVER_RESUMED,
    TOKEN_KEY,
    VERSION,
    VERSION_KEY,
    NoInitialRow,
    ServerRestartedError,
    ServiceError,
    array_of,
    from_bytes,
    token_value,
)
from torchrec_recstore_service.wire.recstore_pb2_grpc import ParameterServerStub
from torchrec_recstore_service.wire.table_rows import TableRows

# the deadline of a save or load, whose time is not known; keepalive detects a dead
# server
_LONG_CALL_S = 24 * 3600.0
# the largest numbers of connections for rows to one server; more calls at the same time
# than these go by gRPC
_MOST_BY_MEMORY = 8
_MOST_BY_TCP = 64
# the time after which a call that one server of a pair has not answered goes to the
# other one
_HANGS_S = 8.0
_PASSING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
_Result = TypeVar("_Result")


class Connection:
    """The connection to one server, with the calls on its tables.

    A call is repeated as long as the server cannot be reached. Repeating a write is
    safe, because it has a number, and the server does not apply a number twice. Every
    call on tables is for an epoch of the set of servers. A server that is not in this
    epoch refuses the call: it was started again and has lost writes, or a save was
    loaded.

    All methods raise :class:`ServiceError`, and the errors of the server's method.
    Several threads may call them at the same time.

    Args:
        address: The address of the server, ``host:port``, or ``host:port/host:port``
            for a pair that is replicated.
        access: The credentials, certificates and timeout.
        epoch: The epoch of the calls. Default: None, for a connection without calls on
            tables.
    """

    def __init__(
        self,
        address: str,
        access: Access,
        epoch: ClientEpoch | None = None,
    ) -> None:
        self.address = address
        self._access = access
        self._epoch = epoch or ClientEpoch(lambda table: Runs("", {}))
        context = None if access.tls_ca is None else tls_context(access)
        self._sides = [
            Side(address_of_one, access, context)
            for address_of_one in address.split("/")
        ]
        self._side = self._sides[0]  # the server that has answered last
        self._process = os.getpid()
        # the destructor of a channel waits for locks and threads of gRPC
        leave_to_parent(self)

    def describe(self, table: str = "") -> pb.DescribeReply:
        """Returns the server's state and tables. Errors name ``table``."""
        request = pb.DescribeRequest()
        reply: pb.DescribeReply = self._call(
            table,
            lambda left_s: self._unary("Describe", request, left_s),
        )
        return reply

    def rows_address(self) -> str:
        """Returns the address of the server's port for rows, or those of its pair in
        the form of :attr:`address`.

        Raises:
            ValueError: The server takes no calls on rows by TCP.
        """
        request = pb.AttachRequest(port=True)

        def rows_address(side: Side) -> str:
            offer = self._call("", partial(side.unary, "Attach", request))
            address = side.row_port.address(offer)
            if address is None:
                raise ValueError(f"server {side.address} takes no calls on rows by TCP")
            return address

        return "/".join(map(rows_address, self._sides))

    def create(self, table: str, spec: str) -> None:
        """Creates a table. ``spec`` is the JSON of a :class:`TableSpec`."""

        def attempt(run: str, left_s: float) -> None:
            request = pb.CreateRequest(table=table, spec=spec, epoch=run)
            self._unary("Create", request, left_s)

        self._in_epoch(table, attempt)

    def drop(self, table: str, run: str) -> None:
        """Deletes a table and its rows in a run of the server.

        A table that does not exist is ignored.
        """
        request = pb.DropRequest(table=table, epoch=run)
        self._call(table, lambda left_s: self._unary("Drop", request, left_s))

    def pull(self, call: TableRows) -> None:
        """Reads rows into the memory of ``call``.

        An id without a row reads as its initial row, or as zeros.
        """

        def attempt(run: str, left_s: float) -> bool:
            fits: bool = self._carry(left_s, "pull", run, call)
            return fits

        if not self._in_epoch(call.label, attempt):
            raise self._unfit(call.label)

    def existing_rows(
        self,
        table: str,
        ids: Tensor,
        row_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        """Reads the rows of the ids that have one.

        Args:
            table: The name of the table.
            ids: (N,) int64. The ids to look for.
            row_bytes: The size of a row in bytes. If it is 0, no rows are read.

        Returns:
            Which ids have a row, (N,) bool, and the rows of these ids, (n, row bytes)
            uint8.
        """
        want = pb.PullHeader.FOUND_ROWS if row_bytes else pb.PullHeader.FOUND

        def attempt(run: str, left_s: float) -> tuple[Tensor, Tensor]:
            header = pb.PullHeader(table=table, epoch=run, want=want)
            content, rows = self._carry(
                left_s,
                "existing_rows",
                header,
                ids,
                row_bytes,
            )
            has_row = array_of(content, torch.bool)
            row_count = int(has_row.sum())
            if len(has_row) != len(ids) or len(rows) != row_count * row_bytes:
                raise self._unfit(table)
            return has_row, rows.view(-1, max(1, row_bytes))

        return self._in_epoch(table, attempt)

    def write(
        self,
        kind: pb.WriteHeader.Kind,
        call: TableRows,
        initial: TableRows | None = None,
        float32: bool = False,
    ) -> int:
        """Writes, updates or deletes rows.

        This is one write, with one number, also for several tables.

        Args:
            kind: The kind of the write. Several tables can only be updated.
            call: The ids and rows. The rows have no columns for a delete.
            initial: Distinct ids and their rows, float32. Those of these ids that have
                no row get one before the update. Default: None.
            float32: Whether the rows are float32 even if the table has another data
                type. Default: False.

        Returns:
            The number of deleted rows.
        """
        tables = {"table": call.label} if call.is_plain else {"tables": call.headers()}

        def attempt(run: str, left_s: float) -> int:
            header = pb.WriteHeader(
                **tables,
                epoch=run,
                client=self._epoch.client,
                request=number,
                done_before=self._epoch.done_before,
                kind=kind,
                ids=len(call.ids),
                float32=float32,
            )
            deleted: int = self._carry(left_s, "write", header, call, initial)
            return deleted

        with self._epoch.write() as number:
            return self._in_epoch(call.label, attempt, number)

    def ids(self, table: str) -> Tensor:
        """Returns the ids that have a row, (N,) int64, ascending."""

        def attempt(run: str, left_s: float) -> Tensor:
            request = pb.IdsRequest(table=table, epoch=run)
            replies = self._side.stub.Ids(
                request,
                timeout=left_s,
                metadata=self._side.metadata,
            )
            return from_bytes([reply.ids for reply in replies], torch.int64)

        return self._in_epoch(table, attempt)

    def stats(self, table: str) -> dict[str, int]:
        """Returns the statistics of a table, by the names of ``TableStats``."""

        def attempt(run: str, left_s: float) -> dict[str, int]:
            request = pb.StatsRequest(table=table, epoch=run)
            return dict(self._unary("Stats", request, left_s).counts)

        return self._in_epoch(table, attempt)

    def look(
        self,
        table: str,
        by: str,
        count: int,
        row: bytes = b"",
        but: int = 0,
    ) -> pb.LookReply:
        """Looks through all rows of a table. See ``LookRequest``."""

        def attempt(run: str, left_s: float) -> pb.LookReply:
            request = pb.LookRequest(
                table=table,
                epoch=run,
                by=by,
                count=count,
                row=row,
                but=but,
            )
            reply: pb.LookReply = self._unary("Look", request, left_s)
            return reply

        return self._in_epoch(table, attempt)

    def save(self, request: pb.SaveRequest, label: str) -> pb.SaveReply:
        """Makes a phase of a save, in the epoch with this label.

        A phase can be repeated.
        """

        def attempt(run: str, left_s: float) -> pb.SaveReply:
            request.epoch = run
            reply: pb.SaveReply = self._unary("Save", request, left_s)
            return reply

        return self._call("", attempt, label, timeout_s=_LONG_CALL_S)

    def load(self, request: pb.LoadRequest) -> None:
        """Makes a phase of a load. A phase can be repeated."""
        self._call(
            "",
            lambda left_s: self._unary("Load", request, left_s),
            timeout_s=_LONG_CALL_S,
        )

    def resume(self, request: pb.ResumeRequest) -> pb.ResumeReply:
        """Makes a phase of the resuming of a server that was stopped.

        A phase can be repeated.
        """
        reply: pb.ResumeReply = self._call(
            "",
            lambda left_s: self._unary("Resume", request, left_s),
        )
        return reply

    def read_file(
        self,
        save: pb.Saved,
        file: str = "",
        offset: int = 0,
    ) -> pb.ReadFileReply:
        """Reads a piece of a file of a save, or the names of its files."""
        request = pb.ReadFileRequest(save=save, file=file, offset=offset)
        reply: pb.ReadFileReply = self._call(
            "",
            lambda left_s: self._unary("ReadFile", request, left_s),
        )
        return reply

    def write_file(self, request: pb.WriteFileRequest) -> None:
        """Writes a piece of a file of a save of other servers."""
        self._call("", lambda left_s: self._unary("WriteFile", request, left_s))

    def check_process(self) -> None:
        """Raises an error in a forked process, because its requests would have the
        numbers of the parent's requests.

        Raises:
            ValueError: Another process created the connection.
        """
        if os.getpid() != self._process:
            raise ValueError(
                f"{self._named('')}: the client was made in another process; make one"
                " in each process"
            )

    def close(self) -> None:
        """Closes the connection."""
        for side in self._sides:
            side.close()

    def _unary(
        self,
        method: str,
        request: Any,
        left_s: float,
    ) -> Any:
        return self._side.unary(method, request, left_s)

    def _carry(
        self,
        left_s: float,
        method: str,
        *arguments: Any,
    ) -> Any:
        """Calls a method of a connection by shared memory if that is possible, else by
        TCP, else of :class:`Streams`.

        Args:
            left_s: The time left in seconds.
            method: The name of the method.
            arguments: Its arguments.
        """
        side = self._side
        for transport in side.transports:
            connection = transport.take(left_s)
            if connection is None:
                continue
            # whether the connection can be used for the next call
            is_reusable = False
            try:
                result = getattr(connection, method)(*arguments, left_s)
                is_reusable = result is not False  # unread replies may follow
                return result
            except DoesNotFitError:
                is_reusable = True
            except ServedError:
                is_reusable = True
                raise
            finally:
                if is_reusable:
                    transport.give_back(connection)
                else:
                    transport.drop(connection)
        return getattr(side.streams, method)(*arguments, left_s)

    def _unfit(self, table: str) -> ServiceError:
        return ServiceError(
            f"{self._named(table)} has answered with a wrong number of rows"
        )

    def _in_epoch(
        self,
        table: str,
        attempt: Callable[[str, float], _Result],
        write: int | None = None,
    ) -> _Result:
        """Makes a call that may be repeated in another epoch.

        Args:
            table: The name of the table, for errors.
            attempt: A function that makes the call once. Its arguments are the label of
                the run, and the time left in seconds.
            write: The number of the write, by which the server applies it once.
                Default: None, for a read.
        """
        label = self._epoch.runs.label or self._epoch.label(table)
        try:
            return self._call(table, attempt, label)
        except ServerRestartedError as error:
            # the lost answer's attempt may be in the save that was loaded
            if write is not None and error.repeated:
                raise writes_lost(error) from None
            label = self._epoch.after(error, label, table, write)
        return self._call(table, attempt, label)

    def _call(
        self,
        table: str,
        attempt: Callable[..., _Result],
        label: str | None = None,
        timeout_s: float | None = None,
    ) -> _Result:
        """Calls ``attempt``, and repeats it as long as the server cannot be reached and
        there is time left.

        Args:
            table: The name of the table, for errors.
            attempt: A function that makes the call once. Its last argument is the time
                left in seconds.
            label: The label of the epoch of the call. ``attempt`` then gets the label
                of the server's run before the time. Default: None, for a call that is for
                no epoch.
            timeout_s: The timeout of one attempt in seconds. The time for repetitions
                then begins with the first failure. Default: None, which means that all
                attempts share the timeout of ``access``.
        """
        if os.getpid() != self._process:
            self.check_process()
        end = time.monotonic() + self._access.timeout_s
        longest_s = float("inf")  # of an attempt
        if len(self._sides) > 1 and timeout_s is None:
            longest_s = min(_HANGS_S, self._access.timeout_s)
        left_s = min(longest_s, timeout_s or self._access.timeout_s)
        failures: _Failures | None = None
        while True:
            runs = self._epoch.runs
            side = self._side
            try:
                if label is None:
                    return attempt(left_s)
                run = run_label(label, runs.by_address.get(self.address, ""))
                return attempt(run, left_s)
            except grpc.RpcError as error:
                is_repetition = failures is not None
                if failures is None:
                    time_s = end - time.monotonic()
                    if timeout_s is not None:
                        time_s = self._access.timeout_s
                    failures = _Failures(Backoff(time_s))
                failures.add(side, error)
                if not self._may_pass(error) or failures.backoff.left_s <= 0:
                    cause = error if timeout_s is not None else failures.cause(error)
                    raised = self._error(table, cause, failures.answers)
                    if isinstance(raised, ServerRestartedError):
                        raised.repeated = is_repetition
                    raise raised from None
                if _kind(error) == SERVER_RESUMED:
                    self._epoch.resumed(runs, table)
                else:
                    self._turn_from(side)
            except ValueError as error:
                if "closed channel" in str(error):
                    raise ValueError(
                        f"{self._named(table)}: the client is closed"
                    ) from None
                raise
            failures.backoff.pause()
            left_s = min(longest_s, timeout_s or max(0.001, failures.backoff.left_s))

    def _turn_from(self, side: Side) -> None:
        """Lets later attempts call the other server of a pair, which may be the primary
        now, unless another call has done so.
        """
        if len(self._sides) > 1 and self._side is side:
            self._side = self._sides[1 - self._sides.index(side)]

    def _may_pass(self, error: grpc.RpcError) -> bool:
        """Returns whether a repetition of a call may succeed."""
        code = error.code()
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:  # the other server may answer
            return len(self._sides) > 1
        return code in _PASSING

    def _error(
        self,
        table: str,
        error: grpc.RpcError,
        answers: Mapping[Side, str] | None = None,
    ) -> Exception:
        code = error.code()
        details = error.details() or ""
        kind = _kind(error)
        named = self._named(table)
        if kind == NO_INITIAL_ROW:
            return NoInitialRow(table)
        if kind in REMOTE_ERRORS:
            return REMOTE_ERRORS[kind](f"{named}: {details}")
        if code is grpc.StatusCode.UNAVAILABLE:
            if answers is not None and len(answers) > 1:
                details = "; ".join(
                    f"{side.address}: {answer}" for side, answer in answers.items()
                )
            return ServiceError(
                f"{named} cannot be reached for {self._access.timeout_s:g} s: {details}"
            )
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return ServiceError(
                f"{named} has not answered within {self._access.timeout_s:g} s"
            )
        status = code.name.lower().replace("_", " ")
        return ServiceError(f"{named}: {details} ({status})", kind)

    def _named(self, table: str) -> str:
        server = f"server {self.address}"
        return f"table {table!r} on {server}" if table else server


@dataclass
class _Failures:
    """The failed attempts of a call."""

    backoff: Backoff
    unreached: grpc.RpcError | None = None
    """The error of the last attempt that has not reached a server."""
    answers: dict[Side, str] = field(default_factory=dict)
    """The last one of each server of a pair."""

    def add(self, side: Side, error: grpc.RpcError) -> None:
        """Notes the failure of an attempt."""
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            self.unreached = error
            self.answers[side] = error.details() or ""

    def cause(self, last: grpc.RpcError) -> grpc.RpcError:
        """Returns the error that says best why the call has failed.

        The last attempt has only the rest of the time, which may end while it connects.
        """
        is_late = last.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        return self.unreached if is_late and self.unreached is not None else last


class Side:
    """The channel and the connections for rows to one server, which may be one of a pair."""

    def __init__(
        self,
        address: str,
        access: Access,
        context: ssl.SSLContext | None,
    ) -> None:
        self.address = address
        self._channel = channel_of(address, access)
        self.stub: Any = ParameterServerStub(self._channel)  # type: ignore[no-untyped-call]
        self.metadata = [(VERSION_KEY, VERSION)]
        if access.token is not None:
            self.metadata.append((TOKEN_KEY, token_value(access.token)))
        self.streams = Streams(self._channel, self.metadata)
        attach = partial(self.unary, "Attach", pb.AttachRequest())
        self.row_port = RowPort(
            address,
            token=access.token,
            context=context,
            attach=attach,
        )
        self.transports: list[RowConnections] = []
        """The ways of rows to the server, fastest first, beside gRPC."""
        if access.shared_memory:
            by_memory = RowConnections(attach, shared_memory, _MOST_BY_MEMORY)
            self.transports.append(by_memory)
        by_tcp = RowConnections(attach, self._by_tcp, _MOST_BY_TCP)
        self.transports.append(by_tcp)

    def unary(
        self,
        method: str,
        request: Any,
        left_s: float,
    ) -> Any:
        """Calls a method of gRPC, with the time left in seconds.

        Raises grpc.RpcError.
        """
        function = getattr(self.stub, method)
        return function(request, timeout=left_s, metadata=self.metadata)

    def _by_tcp(self, offer: pb.AttachReply) -> TcpConnection | None:
        return self.row_port.connect(offer)

    def close(self) -> None:
        """Closes the channel and the connections."""
        for transport in self.transports:
            transport.close()
        self._channel.close()


def _kind(error: grpc.RpcError) -> str:
    kind: str = dict(error.trailing_metadata() or ()).get(ERROR_KEY, "")
    return kind
