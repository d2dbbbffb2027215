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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import c_uint64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

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
from torchrec_recstore_service.server.native import CallRefusedError, Native, native
from torchrec_recstore_service.server.save_names import SaveId
from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire.access import Access, channel_of
from torchrec_recstore_service.wire.addresses import rows_addresses
from torchrec_recstore_service.wire.protocol import (
    NOT_PRIMARY,
    REPLICA_KEY,
    TOKEN_KEY,
    VERSION,
    VERSION_KEY,
    token_value,
)
from torchrec_recstore_service.wire.recstore_pb2_grpc import ParameterServerStub

_RENEW_S, _LOOK_S = 0.5, 0.2
_MARGIN_S = 0.5  # by which the primary stops to answer before its lease ends
_CALL_S, _LONG_CALL_S = 5.0, 24 * 3600.0
_ALIVE_S = 1.0  # how often a server that joins says so
# the time without it after which the primary does not wait for it any more
_GONE_S = 5.0
_FREE_S = 2 * TTL_S  # how long the lease must be free before --take-over counts
# a longer time between two looks at the lease, in which it may have been held
_LOST_SIGHT_S = 1.0

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


class _Peer:
    """The other server, for calls of Python."""

    def __init__(self, address: str, access: Access, secret: str = "") -> None:
        self.server = ""
        self.address = address
        # the addresses at which it may take calls on rows, best first
        self.rows: list[str] = []
        self.rows_server = ""  # the name of the server in connections for rows
        self.secret = secret
        self._channel = channel_of(address, access)
        self._stub: Any = ParameterServerStub(self._channel)  # type: ignore[no-untyped-call]
        self._metadata = [(VERSION_KEY, VERSION)]
        if secret:
            self._metadata.append((REPLICA_KEY, secret))
        if access.token is not None:
            self._metadata.append((TOKEN_KEY, token_value(access.token)))

    def call(self, method: str, request: Any, timeout_s: float = _CALL_S) -> Any:
        """Calls a method. Raises grpc.RpcError."""
        return getattr(self._stub, method)(
            request, timeout=timeout_s, metadata=self._metadata
        )

    def close(self) -> None:
        self._channel.close()


class _TakeOver:
    """What --take-over lets a server do once: begin as the primary without all rows.

    A living server with all rows takes a free lease at once. So --take-over counts when
    the lease has been free for some time. It does not count any more when the record
    has changed: then a server has been the primary since, this one or the other one,
    and has acknowledged writes that this server may lack. Neither does it when this
    server has copied the tables of a primary: its rows are not those of its last save
    any more, and lack what this primary has acknowledged since.
    """

    def __init__(self) -> None:
        self._first_record: Record | None = None
        self._last_look: float | None = None
        self._free_since: float | None = None
        self.has_ended = False
        """Whether the record has changed, or the tables are those of another server."""

    @property
    def counts(self) -> bool:
        """Whether the server may begin now."""
        if self.has_ended or self._free_since is None or self._last_look is None:
            return False
        return self._last_look - self._free_since >= _FREE_S

    def look(self, holder: str, record: Record | None, now: float) -> None:
        """Notes what the lease and the record are at a time in seconds."""
        if self._last_look is None:
            self._first_record = record
        elif now - self._last_look > _LOST_SIGHT_S:
            self._free_since = None
        self._last_look = now
        if record != self._first_record:
            self.has_ended = True
        if holder:
            self._free_since = None
        elif self._free_since is None:
            self._free_since = now


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
        self._peer: _Peer | None = None  # the server that joins or follows
        self._peer_seen = 0.0
        self._record: Record | None = None
        self._said = ""
        self._began = False

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
        listening: ListenOptions,
        server: GrpcServer,
        state: Any,
        directory: DataDirectory,
        rows: Any,
        serving: Callable[[bool], object],
    ) -> None:
        """Makes the server one of a pair, before it takes calls. See :meth:`start`.

        Args:
            options: The options.
            listening: The options of the listener, whose certificate the calls of this
                server use.
            server: The listener.
            state: The tables and the place in the set: :class:`SetCalls`.
            directory: The data directory.
            rows: The listener for rows by TCP: :class:`NativeRows`.
            serving: A function that is told whether the server answers clients.

        Raises:
            ImportError, ValueError: The lease cannot be used.
        """
        self._options, self._listening, self._server = options, listening, server
        self._state, self._directory, self._rows, self._serving = (
            state,
            directory,
            rows,
            serving,
        )
        self._lease = Lease(options.lease, options.name, self._id)
        self._taking_over = _TakeOver() if options.take_over else None
        self._file = directory.path / "pair.json"
        host, port = options.address.rpartition(":")[::2]
        # Port 0 of --listen is a free port.
        self._address = (
            options.address
            if int(port)
            else f"{host}:{server.address.rpartition(':')[2]}"
        )
        if not rows.port:
            raise ValueError(
                "--replicate needs the port for rows, which needs OpenSSL on this"
                " machine"
            )
        self._on = True
        self._state.gate.set_end(-1)
        self._set_role(Role.STANDBY)
        self._thread = threading.Thread(
            target=self._run, name="recstore-pair", daemon=True
        )

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
                with suppress(grpc.RpcError):
                    request = pb.ReplicateRequest(
                        phase=pb.ReplicateRequest.TAKE_OVER, server=self._id
                    )
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
            self._thread = threading.Thread(
                target=self._run, name="recstore-pair", daemon=True
            )
            self._thread.start()

    # Calls of clients and of the primary.

    def check_call(self, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        """Checks that the server answers a call: that of a client if it is the primary,
        or that of the primary.

        Raises:
            CallRefusedError: It does not.
        """
        if not self._on:
            return
        given = dict(metadata).get(REPLICA_KEY)
        from_primary = bool(self._secret) and given == self._secret
        if given is not None and not from_primary:
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
            if self._said:
                message = f"{message}: {self._said}"
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
        ids, rows, initial_ids, initial_rows = (len(array) for array in arrays)
        request = pb.SegmentRequest(
            write=header,
            ids=ids,
            rows=rows,
            initial_ids=initial_ids,
            initial_rows=initial_rows,
        ).SerializeToString()
        places = (c_void_p * 4)(*(array.data_ptr() for array in arrays))
        self.invoke(
            "send", request, len(request), places, (c_uint64 * 4)(*map(len, arrays))
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
                peer.call(method, request, _LONG_CALL_S)
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
            state = json.dumps(self._state.place())
            self.repeat(
                "Replicate",
                pb.ReplicateRequest(phase=pb.ReplicateRequest.MEMBER, state=state),
            )

    def tables_changed(self, method: str, request: Any) -> None:
        """Repeats the creation or the deletion of a table, in whose turn no write is
        carried out.
        """
        self._end_joining()
        self.repeat(method, request)

    def replicate(
        self, request: pb.ReplicateRequest, metadata: Sequence[tuple[str, str | bytes]]
    ) -> pb.ReplicateReply:
        """Answers a call of the other server. See ``Replicate`` in recstore.proto."""
        phases = pb.ReplicateRequest
        if not self._on:
            raise ValueError(
                "the server is not one of a pair: start it with --replicate"
            )
        if request.phase == phases.TAKE_OVER or request.phase == phases.MEMBER:
            if dict(metadata).get(REPLICA_KEY) != self._secret or not self._secret:
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
        rows = [each for each in (request.rows, request.rows_unmapped) if each]
        for address in (*rows, request.address):  # this server connects to them
            host_and_port(address)  # raises ValueError
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
                peer = _Peer(request.address, self._access, request.secret)
                peer.server, peer.rows = request.server, rows
                peer.rows_server = request.rows_server
                self._peer = peer
            copy_id = SaveId(uuid.uuid4().hex)
            copy = pb.Saved(name="copy", id=copy_id)
            with self._keeping():
                state = self._state.copy(copy_id, lambda: self._set_role(Role.JOINING))
        return pb.ReplicateReply(copy=copy, state=json.dumps(state))

    def _follow(self, peer: _Peer) -> None:
        """Sends the backup what it lacks, and lets each write wait for it."""
        listening, ca = self._listening, self._options.tls_ca
        files = [] if ca is None else [ca, listening.tls_cert, listening.tls_key]
        if listening.client_ca is None:
            files = files[:1]
        files += [""] * (3 - len(files))
        with self._keeping():
            libssl = self._rows.libssl if ca else ""
            texts = [
                str(each).encode()
                for each in (peer.secret, peer.rows_server, libssl, *files)
            ]
            self._connect(peer, texts)
        with self._lock:
            assert self._record is not None
            after = Record(self._address, (self._id, peer.server))
            if self.role is not Role.SYNCED or not self._lease.take(
                self._record, after
            ):
                self.invoke("lose")
                raise CallRefusedError(
                    grpc.StatusCode.ABORTED,
                    "the backup could not be written into the record",
                )
            self._record = after
            self._state.forget_copy()
        self._say(f"{peer.address} is the backup")

    def _connect(self, peer: _Peer, texts: Sequence[bytes]) -> None:
        """Calls ``Replica::follow`` with the first address for rows at which the peer
        answers.
        """
        failures: list[str] = []
        for address in peer.rows:
            host, port = host_and_port(address)
            try:
                self.checked("follow", host.encode(), port, *texts)
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
            after = Record(self._address, (self._id,))
            if not self._lease.take(self._record, after, again=True):
                self._depose()
                return False
            self._record = after
            if self.role in (Role.LOST, Role.SYNCED):
                self._say(f"the backup is lost: {self.invoke('reason').decode()}")
                self._set_role(Role.ALONE)
                self._forget_peer()
            return True

    def _renew(self) -> None:
        begin = time.monotonic()
        assert self._record is not None
        with self._lock:
            if self._lease.take(self._record, self._record, again=True):
                self._set_end(begin)
            else:
                self._depose()

    def _depose(self) -> None:
        self._say("this server is not the primary any more")
        self._state.gate.set_end(-1)
        self._set_role(Role.STANDBY)
        self._forget_peer()

    def _become_primary(self, before: Record | None, of: str = "") -> bool:
        """Takes the lease. Returns whether this server is the primary now."""
        begin = time.monotonic()
        after = Record(self._address, (self._id,))
        self._note_start()
        if not self._lease.take(before, after, of):
            return False
        self._secret = ""
        self._rows.set_backup(True, "")
        # what the last primary has sent is carried out
        with self._state.gate.exclusive():
            self._record = after
            self._set_role(Role.ALONE)
        if not self._began and not self._state.follows:
            self._state.begin()
        self._began = True
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
                    grpc.StatusCode.ABORTED, "the server stops, or is not the backup"
                )
            _, record = self._lease.read()
            if (
                record is None
                or self._id not in record.in_sync
                or not self._become_primary(record, primary)
            ):
                raise CallRefusedError(
                    grpc.StatusCode.ABORTED, "the server is not the backup any more"
                )

    def _join(self, record: Record) -> None:
        """Copies the tables of the primary, and follows it."""
        secret = secrets.token_hex(16)
        peer = _Peer(record.address, self._access)
        phases = pb.ReplicateRequest
        ended = threading.Event()

        def say_alive() -> None:
            while not ended.wait(_ALIVE_S):
                with suppress(grpc.RpcError):
                    peer.call("Replicate", phases(phase=phases.ALIVE, server=self._id))

        rows, unmapped, *_ = [
            *rows_addresses(self._address, self._rows.port_offer()),
            "",
        ]
        try:
            request = phases(
                phase=phases.COPY,
                server=self._id,
                rows=rows,
                rows_unmapped=unmapped,
                rows_server=self._rows.name,
                address=self._address,
                secret=secret,
            )
            reply = peer.call("Replicate", request, _LONG_CALL_S)
            threading.Thread(
                target=say_alive, name="recstore-joining", daemon=True
            ).start()
            self._state.follow(
                reply.copy,
                json.loads(reply.state),
                lambda file, offset: self._read(peer, reply, file, offset),
            )
            with self._lock:
                if self._stopping.is_set():
                    return
                self._note_start()
                self._secret = secret
                self._state.gate.set_end(float("inf"))
                self._set_role(Role.FOLLOWING)
            peer.call(
                "Replicate", phases(phase=phases.FOLLOW, server=self._id), _LONG_CALL_S
            )
            self._say(f"this server is the backup of {record.address}")
        finally:
            ended.set()
            peer.close()

    def _read(
        self, peer: _Peer, reply: pb.ReplicateReply, file: str, offset: int
    ) -> pb.ReadFileReply:
        request = pb.ReadFileRequest(save=reply.copy, file=file, offset=offset)
        read: pb.ReadFileReply = peer.call("ReadFile", request)
        return read

    # Both.

    def _say(self, what: str) -> None:
        _log.warning("pair %s: %s", self._options.name, what)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._step()
                self._said = ""
            except Exception as error:
                details = (
                    error.details() if isinstance(error, grpc.RpcError) else str(error)
                )
                if details != self._said:  # once, not five times a second
                    self._said = details
                    self._say(details)
                self._stopping.wait(_LOOK_S)

    def _step(self) -> None:
        role = self.role
        if role >= Role.ALONE:
            if self.invoke("wait_lost", _RENEW_S):
                self._goes_on_alone()
            if (
                self.role is Role.JOINING
                and time.monotonic() - self._peer_seen > _GONE_S
            ):
                self._end_joining()
            if self.role >= Role.ALONE and not self._stopping.is_set():
                self._renew()
            return
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
            if not holder and (
                is_in_sync or (role is Role.STANDBY and self._may_begin(record))
            ):
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
                f" server with all rows is there within {_FREE_S:g} s"
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
        """Returns whether this server may become the primary with the rows that it has
        started with.
        """
        if self._taking_over is not None and self._taking_over.counts:
            self._say(
                f"--take-over: this server begins with {self._rows_of_start()}. All"
                " other writes are lost"
            )
            return True
        starts = self._starts()
        if record is None:
            if (
                starts
                and self._taking_over is not None
                and not self._taking_over.has_ended
            ):
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
        """Returns the last starts of a server on this data directory in which it had
        all rows.
        """
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
        self._serving(role >= Role.ALONE)

    def _forget_peer(self) -> None:
        if self._peer is not None:
            self._peer.close()
        self._peer = None
        self._state.forget_copy()

    @property
    def _access(self) -> Access:
        token, listening = self._server.token, self._listening
        own = (
            (None, None)
            if listening.client_ca is None
            else (listening.tls_cert, listening.tls_key)
        )
        return Access(
            None if token is None else token.value, self._options.tls_ca, *own
        )
