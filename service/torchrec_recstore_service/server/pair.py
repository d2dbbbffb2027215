"""Pairs of servers: each write is on both before it is acknowledged, and one goes on
without the other.

One server of a pair is the primary, which answers clients. The other one is its backup,
or a standby, which has no rows that may be used yet. A lease in Redis says which server
is the primary (lease.py), and a record beside it which servers have all rows: only
these may take the lease. The primary writes the record before it acknowledges a write
without its backup, so that a backup that lacks a write never becomes the primary. A
server that cannot renew its lease stops to answer before the lease ends: see RunGate.
Writes go to the backup in C++: csrc/replica.h.

Tests: tests/service/test_pairs.py.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from ctypes import c_uint64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

import grpc
from torch import Tensor

from torchrec_recstore.checkpoint.files import write_synced
from torchrec_recstore.network import host_of
from torchrec_recstore_service.server.data_directory import DataDirectory
from torchrec_recstore_service.server.lease import TTL_S, Lease, Record
from torchrec_recstore_service.server.listening import (
    GrpcServer,
    ListenOptions,
    host_and_port,
)
from torchrec_recstore_service.server.native import (
    CallRefusedError,
    Native,
    RunGate,
    native,
)
from torchrec_recstore_service.server.native_rows import NativeRows
from torchrec_recstore_service.server.peer import LONG_CALL_S, Peer
from torchrec_recstore_service.server.save_names import SaveId
from torchrec_recstore_service.server.take_over import FREE_S, TakeOver
from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire.access import Access
from torchrec_recstore_service.wire.addresses import rows_addresses
from torchrec_recstore_service.wire.protocol import NOT_PRIMARY, REPLICA_KEY

_RENEW_S = 0.5  # the time between two renewals of the lease
_LOOK_S = 0.2  # the time between two looks at the lease of another server
_MARGIN_S = 0.5  # by which the primary stops to answer before its lease ends
_ALIVE_S = 1.0  # the time between two messages of a server that joins
# the time without a message after which the primary does not wait for the server any
# more
_GONE_S = 5.0

_log = logging.getLogger(__name__)


class Role(IntEnum):
    """What a server is. See ``Replica::Role`` in replica.h."""

    SINGLE = 0
    STANDBY = 1
    FOLLOWING = 2
    ALONE = 3
    JOINING = 4
    SYNCED = 5
    LOST = 6


@dataclass(frozen=True)
class PairOptions:
    """The options of a server of a pair.

    Args:
        name: The name of the pair, which both servers have.
        lease: The URL of the Redis server that says which of them is the primary.
        address: The address of this server for the other one.
        tls_ca: The path of a PEM file with the CA certificates of the other server, if
            they use TLS. Default: None.
        take_over: Whether the server begins as the primary although the last one is
            lost with its rows. Default: False.

    Raises:
        ValueError: A value is invalid. The message names the flag.
    """

    name: str
    lease: str
    address: str
    tls_ca: str | None = None
    take_over: bool = False

    def __post_init__(self) -> None:
        if not self.name.isprintable() or not self.name or set(self.name) & set("{}"):
            raise ValueError(
                "--replicate needs a name for the pair, without braces, got"
                f" {self.name!r}"
            )

    def check_fits(self, listening: ListenOptions) -> None:
        """Checks that servers with these options can call each other.

        Raises:
            ValueError: A flag is missing.
        """
        if host_of(self.address, least_port=0).strip("[]") in ("0.0.0.0", "::"):
            raise ValueError(
                f"--replicate needs --advertise: {self.address} is not an address that"
                " can be called"
            )
        if listening.tls_cert is not None and self.tls_ca is None:
            raise ValueError(
                "--replicate needs --tls-ca on a server with TLS, because the servers"
                " call each other"
            )


class TablesState(Protocol):
    """The tables of a server, and its place in the set: :class:`SetCalls`."""

    gate: RunGate
    follows: bool

    def begin(self) -> None:
        """See :meth:`SetCalls.begin`."""

    def place(self) -> dict[str, Any]:
        """See :meth:`SetCalls.place`."""

    def set_place(self, place: Mapping[str, Any]) -> None:
        """See :meth:`SetCalls.set_place`."""

    def copy(self, copy_id: SaveId, begun: Callable[[], object]) -> dict[str, Any]:
        """See :meth:`SetCalls.copy`."""

    def forget_copy(self) -> None:
        """See :meth:`SetCalls.forget_copy`."""

    def follow(
        self,
        copy: pb.Saved,
        state: Mapping[str, Any],
        read: Callable[[str, int], pb.ReadFileReply],
    ) -> None:
        """See :meth:`SetCalls.follow`."""


class Pair(Native):
    """The part of a server in its pair.

    Without :meth:`start`, the server is in none, and nothing here costs time.
    """

    def __init__(self) -> None:
        super().__init__("replica")
        self._lock = threading.RLock()  # for the role and the record
        self._copying = threading.Lock()
        self._on = False
        self._stopping = threading.Event()
        self._id = uuid.uuid4().hex
        self._secret = ""  # of the primary's calls, if this server is a backup
        self._peer: Peer | None = None  # the server that joins or follows
        self._peer_seen = 0.0
        self._record: Record | None = None
        # what this server has logged last of the reason why it does not answer
        self._last_failure = ""
        self._has_begun = False

    @property
    def is_on(self) -> bool:
        """Whether the server is one of a pair."""
        return self._on

    @property
    def role(self) -> Role:
        """What the server is at present."""
        return Role(self.invoke("role"))

    @property
    def is_primary(self) -> bool:
        """Whether the server answers clients, as far as its pair is concerned."""
        return self.role not in (Role.STANDBY, Role.FOLLOWING)

    @property
    def backup(self) -> str:
        """The address of the backup of this server. Empty if it has none."""
        peer = self._peer
        return "" if peer is None or self.role is not Role.SYNCED else peer.address

    def begin(
        self,
        options: PairOptions,
        *,
        listening: ListenOptions,
        server: GrpcServer,
        rows: NativeRows,
        state: TablesState,
        directory: DataDirectory,
    ) -> None:
        """Makes the server one of a pair, before it takes calls. See :meth:`start`.

        Args:
            options: The options.
            listening: The options of the listeners, whose certificate the calls of this
                server use.
            server: The listener for calls by gRPC. It is told whether the server
                answers clients.
            rows: The listener for rows by TCP.
            state: The tables, and the place in the set.
            directory: The data directory.

        Raises:
            ImportError, ValueError: The lease cannot be used.
        """
        self._options = options
        self._listening = listening
        self._server = server
        self._rows = rows
        self._state = state
        self._directory = directory
        self._lease = Lease(options.lease, options.name, self._id)
        self._taking_over = TakeOver() if options.take_over else None
        self._file = directory.path / "pair.json"
        self._address = options.address
        host, _, port = options.address.rpartition(":")
        if not int(port):  # of --listen, and means any free port
            self._address = f"{host}:{server.address.rpartition(':')[2]}"
        if not rows.port:
            raise ValueError(
                "--replicate needs the port for rows, which needs OpenSSL on this"
                " machine"
            )
        self._on = True
        self._state.gate.set_end(-1)
        self._set_role(Role.STANDBY)
        self._thread = self._new_thread()

    def _new_thread(self) -> threading.Thread:
        return threading.Thread(target=self._run, name="recstore-pair", daemon=True)

    def start(self) -> None:
        """Looks for the other server from now on."""
        self._thread.start()

    def stop_following(self) -> bool:
        """Ends the part in the pair before the server stops. No write runs any more.

        Returns:
            Whether this server has to save its tables. Otherwise another one has them
            all.
        """
        if not self._on:
            return True
        with self._lock:
            self._stopping.set()
            role = self.role
            if role in (Role.STANDBY, Role.FOLLOWING):
                self._set_role(Role.STANDBY)
                return False
            if role is Role.SYNCED and self._peer is not None:
                request = pb.ReplicateRequest(
                    phase=pb.ReplicateRequest.TAKE_OVER,
                    server=self._id,
                )
                with suppress(grpc.RpcError):
                    self._peer.call("Replicate", request)
                    self._set_role(Role.STANDBY)
                    return False
            self._end_joining()
            return self.role is Role.ALONE or self._goes_on_alone()

    def stopped(self) -> None:
        """Gives the lease back after the tables were saved."""
        if self._on:
            with suppress(self._lease.error):
                self._lease.release()

    def stop_failed(self) -> None:
        """Goes on after :meth:`stop_following`, because the tables could not be saved."""
        if self._on:
            self._stopping.clear()
            self._thread = self._new_thread()
            self._thread.start()

    # Calls of clients and of the primary.

    def check_call(self, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        """Checks that the server answers a call of a client or of the primary.

        Raises:
            CallRefusedError: It does not.
        """
        if not self._on:
            return
        secret = dict(metadata).get(REPLICA_KEY)
        from_primary = bool(self._secret) and secret == self._secret
        if secret is not None and not from_primary:
            raise CallRefusedError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "the server is not the backup of this one",
            )
        if not from_primary:
            self.check_primary()

    def check_primary(self) -> None:
        """Raises CallRefusedError if the server is one of a pair, and not the primary,
        or its lease has ended.
        """
        if self._on and (self.role < Role.ALONE or self._state.gate.has_ended):
            message = (
                f"the server is not the primary of the pair {self._options.name!r} at"
                " present"
            )
            if self._last_failure:
                message = f"{message}: {self._last_failure}"
            raise CallRefusedError(grpc.StatusCode.UNAVAILABLE, message, NOT_PRIMARY)

    @contextmanager
    def turn(self, from_primary: bool = False) -> Iterator[None]:
        """Returns a context in which no other write is carried out, if the server is
        one of a pair.

        Raises:
            CallRefusedError: The server does not carry out the writes of a client, or
                those of a primary.
        """
        if not self._on:
            yield
            return
        turn = self.checked("begin_turn", from_primary)
        try:
            yield
        finally:
            native["replica_end_turn"](turn)

    def send(self, header: pb.WriteHeader, arrays: Sequence[Tensor]) -> None:
        """Sends a write that was carried out in this turn to the backup.

        ``arrays`` are those of ``WriteRequest``.
        """
        if not self._on:
            return
        sizes = [len(array) for array in arrays]
        request = pb.SegmentRequest(
            write=header,
            ids=sizes[0],
            rows=sizes[1],
            initial_ids=sizes[2],
            initial_rows=sizes[3],
        )
        message = request.SerializeToString()
        addresses = (c_void_p * 4)(*[array.data_ptr() for array in arrays])
        self.invoke(
            "send",
            message,
            len(message),
            addresses,
            (c_uint64 * 4)(*sizes),
        )

    def wait(self) -> None:
        """Waits until the backup, if there is one, has carried out all writes so far.

        Raises:
            CallRefusedError: The server is not the primary any more, or does not know
                yet whether it is.
        """
        if self._on:
            self.checked("wait")

    def repeat(self, method: str, request: Any) -> None:
        """Makes a call that this server has carried out on the backup, too.

        A backup that fails is one no more.
        """
        if not self._on:
            return
        peer = self._peer
        if self.role is Role.SYNCED and peer is not None:
            try:
                peer.call(method, request, LONG_CALL_S)
            except grpc.RpcError as error:
                self._say(
                    f"the backup {peer.address} could not {method}: {error.details()}"
                )
                self.invoke("lose")
        self.wait()

    def changed(self) -> None:
        """Notes that the tables have changed in another way than by writes: the backup
        has to copy them again.
        """
        if not self._on:
            return
        self._end_joining()
        if self.role is Role.SYNCED:
            self.invoke("lose")
        self.wait()

    def member_changed(self) -> None:
        """Tells the backup of the place of this server in its set."""
        self._end_joining()
        if self._on:
            request = pb.ReplicateRequest(
                phase=pb.ReplicateRequest.MEMBER,
                state=json.dumps(self._state.place()),
            )
            self.repeat("Replicate", request)

    def tables_changed(self, method: str, request: Any) -> None:
        """Repeats the creation or the deletion of a table on the backup."""
        self._end_joining()
        self.repeat(method, request)

    def replicate(
        self,
        request: pb.ReplicateRequest,
        metadata: Sequence[tuple[str, str | bytes]],
    ) -> pb.ReplicateReply:
        """Answers a call of the other server. See ``Replicate`` in recstore.proto."""
        phases = pb.ReplicateRequest
        if not self._on:
            raise ValueError(
                "the server is not one of a pair: start it with --replicate"
            )
        if request.phase in (phases.TAKE_OVER, phases.MEMBER):
            secret = dict(metadata).get(REPLICA_KEY)
            if not self._secret or secret != self._secret:
                raise CallRefusedError(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    "the server is not the backup of this one",
                )
            if request.phase == phases.MEMBER:
                self._state.set_place(json.loads(request.state))
            else:
                self._take_over(request.server)
            return pb.ReplicateReply()
        self.check_primary()
        if request.phase == phases.COPY:
            return self._copy(request)
        peer = self._peer
        if peer is None or peer.server != request.server:
            raise CallRefusedError(
                grpc.StatusCode.ABORTED,
                "the server does not join any more: it has to copy again",
            )
        self._peer_seen = time.monotonic()
        if request.phase == phases.FOLLOW:
            self._follow(peer)
        return pb.ReplicateReply()

    # The primary.

    def _copy(self, request: pb.ReplicateRequest) -> pb.ReplicateReply:
        row_addresses = [request.rows] if request.rows else []
        if request.rows_unmapped:
            row_addresses.append(request.rows_unmapped)
        for address in (*row_addresses, request.address):
            # This server connects to the address. Raises ValueError.
            host_and_port(address)
        with self._copying:
            with self._lock:
                # the end of the last start of the backup was not seen yet
                if self.role is Role.SYNCED:
                    self.invoke("lose")
                    raise CallRefusedError(
                        grpc.StatusCode.UNAVAILABLE,
                        "the server has a backup: repeat the call",
                    )
                self._forget_peer()
                peer = Peer(request.address, self._access, request.secret)
                peer.server = request.server
                peer.row_addresses = row_addresses
                peer.rows_server = request.rows_server
                self._peer = peer
            copy_id = SaveId(uuid.uuid4().hex)
            copy = pb.Saved(name="copy", id=copy_id)
            with self._keeping():
                state = self._state.copy(copy_id, lambda: self._set_role(Role.JOINING))
        return pb.ReplicateReply(copy=copy, state=json.dumps(state))

    def _follow(self, peer: Peer) -> None:
        """Sends the backup what it lacks, and lets each write wait for it."""
        with self._keeping():
            self._connect(peer)
        with self._lock:
            assert self._record is not None
            new_record = Record(self._address, (self._id, peer.server))
            is_backup = self.role is Role.SYNCED
            if not is_backup or not self._lease.take(self._record, new_record):
                self.invoke("lose")
                raise CallRefusedError(
                    grpc.StatusCode.ABORTED,
                    "the backup could not be written into the record",
                )
            self._record = new_record
            self._state.forget_copy()
        self._say(f"{peer.address} is the backup")

    def _connect(self, peer: Peer) -> None:
        """Calls ``Replica::follow`` with the first address at which the peer answers."""
        ca = self._options.tls_ca
        library = self._rows.libssl if ca else ""
        cert, key = self._certificate_files if ca else (None, None)
        failures: list[str] = []
        for address in peer.row_addresses:
            host, port = host_and_port(address)
            try:
                self.checked(
                    "follow",
                    host.encode(),
                    port,
                    peer.secret.encode(),
                    peer.rows_server.encode(),
                    library.encode(),
                    (ca or "").encode(),
                    str(cert or "").encode(),
                    str(key or "").encode(),
                )
                return
            except OSError as error:
                # the peer was reached, or does not join any more
                if self.role is not Role.JOINING:
                    raise
                failures.append(f"{address}: {error}")
        self._end_joining()
        raise OSError("; ".join(failures))

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        """Returns a context in which a server that joins is not given up, because it
        waits for this one.
        """
        self._peer_seen = float("inf")
        try:
            yield
        finally:
            self._peer_seen = time.monotonic()

    def _end_joining(self) -> None:
        with self._lock:
            if self._on and self.role is Role.JOINING:
                self._set_role(Role.ALONE)

    def _goes_on_alone(self) -> bool:
        """Writes into the record that this server alone has all rows.

        Returns False if it is the primary no more.
        """
        with self._lock:
            assert self._record is not None
            new_record = Record(self._address, (self._id,))
            if not self._lease.take(self._record, new_record, renews=True):
                self._depose()
                return False
            self._record = new_record
            if self.role in (Role.LOST, Role.SYNCED):
                self._say(f"the backup is lost: {self.invoke('reason').decode()}")
                self._set_role(Role.ALONE)
                self._forget_peer()
            return True

    def _renew(self) -> None:
        begin = time.monotonic()
        assert self._record is not None
        with self._lock:
            if self._lease.take(self._record, self._record, renews=True):
                self._set_end(begin)
            else:
                self._depose()

    def _depose(self) -> None:
        self._say("this server is not the primary any more")
        self._state.gate.set_end(-1)
        self._set_role(Role.STANDBY)
        self._forget_peer()

    def _become_primary(self, old_record: Record | None, holder: str = "") -> bool:
        """Takes the lease.

        Args:
            old_record: The record, which must not have changed.
            holder: The id of the server that gives the lease to this one. Default: "",
                the lease is free.

        Returns:
            Whether this server is the primary now.
        """
        begin = time.monotonic()
        new_record = Record(self._address, (self._id,))
        self._note_start()
        if not self._lease.take(old_record, new_record, holder):
            return False
        self._secret = ""
        self._rows.set_backup(True, "")
        # what the last primary has sent is carried out
        with self._state.gate.exclusive():
            self._record = new_record
            self._set_role(Role.ALONE)
        if not self._has_begun and not self._state.follows:
            self._state.begin()
        self._has_begun = True
        self._set_end(begin)
        self._say("this server is the primary")
        return True

    def _set_end(self, begin: float) -> None:
        self._state.gate.set_end(begin + TTL_S - _MARGIN_S - time.monotonic())

    # The backup.

    def _take_over(self, primary: str) -> None:
        """Becomes the primary, because the present one stops."""
        with self._lock:
            if self._stopping.is_set() or self.role is not Role.FOLLOWING:
                raise CallRefusedError(
                    grpc.StatusCode.ABORTED,
                    "the server stops, or is not the backup",
                )
            _, record = self._lease.read()
            is_in_sync = record is not None and self._id in record.in_sync
            if not is_in_sync or not self._become_primary(record, primary):
                raise CallRefusedError(
                    grpc.StatusCode.ABORTED,
                    "the server is not the backup any more",
                )

    def _join(self, record: Record) -> None:
        """Copies the tables of the primary, and follows it."""
        secret = secrets.token_hex(16)
        peer = Peer(record.address, self._access)
        phases = pb.ReplicateRequest
        has_ended = threading.Event()

        def say_alive() -> None:
            request = phases(phase=phases.ALIVE, server=self._id)
            while not has_ended.wait(_ALIVE_S):
                with suppress(grpc.RpcError):
                    peer.call("Replicate", request)

        def read(file: str, offset: int) -> pb.ReadFileReply:
            request = pb.ReadFileRequest(save=reply.copy, file=file, offset=offset)
            piece: pb.ReadFileReply = peer.call("ReadFile", request)
            return piece

        addresses = rows_addresses(self._address, self._rows.port_offer())
        try:
            request = phases(
                phase=phases.COPY,
                server=self._id,
                rows=addresses[0],
                rows_unmapped=addresses[1] if len(addresses) > 1 else "",
                rows_server=self._rows.name,
                address=self._address,
                secret=secret,
            )
            reply = peer.call("Replicate", request, LONG_CALL_S)
            threading.Thread(
                target=say_alive,
                name="recstore-joining",
                daemon=True,
            ).start()
            self._state.follow(reply.copy, json.loads(reply.state), read)
            with self._lock:
                if self._stopping.is_set():
                    return
                self._note_start()
                self._secret = secret
                self._state.gate.set_end(float("inf"))
                self._set_role(Role.FOLLOWING)
            follow = phases(phase=phases.FOLLOW, server=self._id)
            peer.call("Replicate", follow, LONG_CALL_S)
            self._say(f"this server is the backup of {record.address}")
        finally:
            has_ended.set()
            peer.close()

    # Both.

    def _say(self, message: str) -> None:
        _log.warning("pair %s: %s", self._options.name, message)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._step()
                self._last_failure = ""
            except Exception as error:
                details = str(error)
                if isinstance(error, grpc.RpcError):
                    details = error.details()
                if details != self._last_failure:  # once, not five times a second
                    self._last_failure = details
                    self._say(details)
                self._stopping.wait(_LOOK_S)

    def _step(self) -> None:
        role = self.role
        if role >= Role.ALONE:
            self._step_as_primary()
        else:
            self._step_as_other(role)

    def _step_as_primary(self) -> None:
        if self.invoke("wait_lost", _RENEW_S):
            self._goes_on_alone()
        # The role is read first: it becomes JOINING after _peer_seen was set.
        if self.role is Role.JOINING:
            silence_s = time.monotonic() - self._peer_seen
            if silence_s > _GONE_S:
                self._end_joining()
        if self.role >= Role.ALONE and not self._stopping.is_set():
            self._renew()

    def _step_as_other(self, role: Role) -> None:
        self._stopping.wait(_LOOK_S)
        holder, record = self._lease.read()
        if self._taking_over is not None:
            self._taking_over.look(holder, record, time.monotonic())
            if self._state.follows:
                self._taking_over.has_ended = True
        with self._lock:
            if self._stopping.is_set() or self.role >= Role.ALONE:
                return
            is_in_sync = (
                role is Role.FOLLOWING
                and record is not None
                and self._id in record.in_sync
            )
            if not holder:
                is_standby = role is Role.STANDBY
                if is_in_sync or (is_standby and self._may_begin(record)):
                    self._become_primary(record)
                    return
            if role is Role.FOLLOWING and not is_in_sync:
                self._secret = ""
                self._state.gate.set_end(-1)
                self._set_role(Role.STANDBY)
        if self.role is Role.STANDBY and record is not None:
            if not holder:
                raise RuntimeError(self._why_it_waits())
            self._join(record)

    def _why_it_waits(self) -> str:
        taking_over = self._taking_over
        if taking_over is not None and not taking_over.has_ended:
            return (
                f"--take-over: this server begins with {self._rows_of_start()}, if no"
                f" server with all rows is there within {FREE_S:g} s"
            )
        begin = "this server with --take-over"
        if taking_over is not None:
            begin = "this server again with --take-over, which counts once"
        return (
            "no server with all rows is there, and this one waits for one: the rows of"
            f" {self._directory.path} are older. Start the server that has all rows. If"
            f" it is lost for good, start {begin}, and it begins with"
            f" {self._rows_of_start()}"
        )

    def _rows_of_start(self) -> str:
        """Describes the rows with which this server would begin."""
        path = self._directory.path
        if self._directory.stopped is not None:
            return f"the rows of its last stop in {path}"
        if self._directory.last is not None:
            return f"its last save {str(self._directory.last)!r} in {path}"
        return f"no rows, because {path} has no save"

    def _may_begin(self, record: Record | None) -> bool:
        """Returns whether this server may become the primary with the rows of its start."""
        if self._taking_over is not None and self._taking_over.counts:
            self._say(
                f"--take-over: this server begins with {self._rows_of_start()}. All"
                " other writes are lost"
            )
            return True
        starts = self._starts()
        if record is None:
            taking_over = self._taking_over
            will_take_over = taking_over is not None and not taking_over.has_ended
            if starts and will_take_over:
                raise RuntimeError(self._why_it_waits())
            if starts or self._state.follows:
                raise RuntimeError(
                    "--lease has no record of this pair, which it had before: if no"
                    f" other server has newer rows than {self._directory.path}, start"
                    " this one with --take-over, and it begins with"
                    f" {self._rows_of_start()}"
                )
            return True
        # The last server that had all rows has saved them when it stopped, in this
        # directory.
        if self._state.follows or self._directory.stopped is None:
            return False
        return bool(set(starts) & set(record.in_sync))

    def _starts(self) -> list[str]:
        """Returns the last starts on this data directory with all rows."""
        try:
            starts: list[str] = json.loads(self._file.read_text())["starts"]
            return starts
        except FileNotFoundError:
            return []

    def _note_start(self) -> None:
        starts = self._starts()
        if self._id in starts:
            return
        staging = self._file.with_name(".pair.json")
        document = {"pair": self._options.name, "starts": [*starts[-1:], self._id]}
        write_synced(staging, json.dumps(document).encode())
        staging.replace(self._file)

    def _set_role(self, role: Role) -> None:
        self.invoke("set_role", role)
        self._rows.set_backup(role < Role.ALONE, self._secret)
        self._server.set_serving(role >= Role.ALONE)

    def _forget_peer(self) -> None:
        if self._peer is not None:
            self._peer.close()
        self._peer = None
        self._state.forget_copy()

    @property
    def _certificate_files(self) -> tuple[Path | None, Path | None]:
        """The certificate and the key of calls, if the other server requires one."""
        listening = self._listening
        if listening.client_ca is None:
            return None, None
        return listening.tls_cert, listening.tls_key

    @property
    def _access(self) -> Access:
        token = self._server.token
        cert, key = self._certificate_files
        return Access(
            token=None if token is None else token.value,
            tls_ca=self._options.tls_ca,
            tls_cert=cert,
            tls_key=key,
        )
