"""The calls of the parameter server that concern its whole set: its state, saves in
phases, and loads in phases.
"""

from __future__ import annotations

import os
import stat
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import grpc
from torch import Tensor

from torchrec_recstore.checkpoint.files import make_directory, naming
from torchrec_recstore.ownership import open_own, refuse_links_below, remove
from torchrec_recstore_service.server.applied import AppliedRequests
from torchrec_recstore_service.server.data_directory import (
    MANIFEST,
    DataDirectory,
    Membership,
    membership_of,
)
from torchrec_recstore_service.server.deadline import Deadline
from torchrec_recstore_service.server.native import CallRefusedError, RunGate
from torchrec_recstore_service.server.pair import Pair, Role
from torchrec_recstore_service.server.received import ReceivedFiles
from torchrec_recstore_service.server.reservations import Reservations
from torchrec_recstore_service.server.save_names import SavedFileName, SaveId, SaveName
from torchrec_recstore_service.server.set_resharding import joined, owned_by, sent_info
from torchrec_recstore_service.tables.hosted import HostedTables, Loaded
from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire.agreement import first_run, same_runs
from torchrec_recstore_service.wire.protocol import (
    PART_BYTES,
    SAVE_SUPERSEDED,
    SERVER_RESUMED,
    ServerRestartedError,
)
from torchrec_recstore_service.wire.table_spec import TableSpec

STOPPED = (SaveName("stopped-0"), SaveName("stopped-1"))
"""The names of the checkpoints that servers write when they stop.

The names alternate, because not every file system can replace a directory.
"""

_LARGEST_FILE = 2**40
_SUPERSEDED = "the save {!r} does not count: another save was begun meanwhile"
_RESUMED = (
    "the server was stopped and started again: a client compares it with the other"
    " servers of its set before it goes on"
)
# time for which the rows that a load has read are kept for its next phase
_KEPT_S = 600.0


@dataclass(frozen=True)
class _Next:
    """The tables that were read for a load, before its epoch begins."""

    token: str
    save: pb.Saved
    exact: bool
    loaded: Loaded

    def is_for(self, request: pb.LoadRequest) -> bool:
        return (
            self.token == request.token
            and self.save == request.save
            and self.exact == request.exact
        )


class SetCalls:
    """The state of a server in its set, and the calls that change it.

    A server that was killed and started again has the tables of its last save, but it
    is in no epoch: it answers no call on tables before a client has begun an epoch on
    all servers of the set. A server that was stopped and started again waits in its
    epoch until a client has compared it with the other servers of its set, see
    :meth:`resume`.

    Args:
        tables: The tables.
        directory: The data directory.
        applied: The writes that have been carried out.
        pair: The part of the server in its pair.

    Raises:
        CheckpointError, OSError, ValueError: The last save cannot be loaded.
    """

    def __init__(
        self,
        tables: HostedTables,
        directory: DataDirectory,
        applied: AppliedRequests,
        pair: Pair,
    ) -> None:
        self._tables = tables
        self._pair = pair
        # the id of the copy for a server that joins the pair
        self._copy: SaveId | None = None
        self.follows = False
        """Whether the tables are those of another server, of which this one was the
        backup.
        """
        self._directory = directory
        self._applied = applied
        self._saving = threading.Lock()  # one save or load at a time
        # malloc keeps the memory that a thread has freed for this thread's next calls:
        # if each thread of calls made saves, each of them would keep the buffers of
        # one.
        self._rows_thread = ThreadPoolExecutor(1, "recstore-saves")
        self.gate = RunGate()
        """The run of the server."""
        self._next: _Next | None = None  # what was read for a load
        self._next_deadline = Deadline(_KEPT_S, "recstore-load")
        self._reservations = Reservations()
        self._received = ReceivedFiles(directory, tables.used_bytes)
        # for changes of the place in the set, and of the next two fields
        self._changing = threading.Lock()
        # the label of the run; empty if the server answers no call on tables
        self._run = ""
        # whether the tables are those of a server that was stopped, and no run has
        # begun since
        self._waits = False
        self._clean = True  # whether the tables are those of the last save
        member = directory.membership
        stopped = directory.stopped
        if stopped is not None and stopped["checkpoint"] == directory.last:
            applied.from_json(stopped["applied"])
            if member is not None and stopped["epoch"] == member.label:
                self._waits = True
                self._clean = False
        if directory.last is not None:
            tables.load(directory.checkpoint(directory.last))

    def begin(self) -> None:
        """Begins the next run of a set of one server that was stopped.

        A server of several waits for :meth:`resume`.

        It must be called after everything that can fail at the start, and before the
        first call is taken.
        """
        directory = self._directory
        member = directory.membership
        if self._waits and member is not None:
            if member.members == 1:
                self._begin_run(member.with_run(0, uuid.uuid4().hex), directory.last)
        elif directory.stopped is not None:
            last = directory.last
            if member is not None and member.members > 1:
                # Other servers of the set cannot start from what this server has saved
                # when it stopped.
                last = member.save
            directory.set_last(last)

    @property
    def _follows_now(self) -> bool:
        return self._pair.role is Role.FOLLOWING

    @property
    def loading(self) -> bool:
        """Whether the rows of a load are in memory that has not begun its epoch."""
        return self._next is not None

    @property
    def received_bytes(self) -> int:
        """The size in bytes of the files of a save of other servers."""
        return self._received.bytes

    def stop(self) -> None:
        """Waits for saves and loads, and saves all tables for the next start."""
        with self._saving:
            with self._changing:  # a run cannot begin any more
                member = self._directory.membership
            if member is None or not self._run:
                return  # the tables are those of the last save, or of the last stop
            # The name must differ from the last checkpoint, from which the next server
            # starts if this save fails.
            name = STOPPED[1] if self._directory.last == STOPPED[0] else STOPPED[0]
            path = self._directory.checkpoint(name)
            remove(path)
            self._tables.save(path)
            stopped = {
                "checkpoint": name,
                "epoch": member.label,
                "applied": self._applied.to_json(),
            }
            self._directory.set_last(name, stopped)

    def is_first(self) -> bool:
        """Returns whether the server is in an epoch and is the first server of its set."""
        member = self._directory.membership
        return bool(self._run) and member is not None and member.member == 0

    def check(self, run: str) -> None:
        """Checks that the server is in the run of a call.

        Raises:
            CallRefusedError: The server waits, or is in another run of the same epoch.
            ServerRestartedError: The server is in another epoch, or in none.
        """
        run_of_server = self._run
        if run == run_of_server and run:
            if self.gate.has_ended:
                self._pair.check_primary()
            return
        epoch = _epoch_of(run)
        epoch_of_server = _epoch_of(run_of_server)
        if self._waits or (run_of_server and epoch == epoch_of_server):
            raise CallRefusedError(
                grpc.StatusCode.UNAVAILABLE,
                _RESUMED,
                SERVER_RESUMED,
            )
        if run_of_server:
            raise ServerRestartedError(
                f"the server is in the epoch {epoch_of_server}, the call is for"
                f" {epoch or 'none'}: a save was loaded since"
            )
        last = self._directory.last
        rows = "without rows" if last is None else f"from the save {last!r}"
        raise ServerRestartedError(f"the server was restarted {rows}")

    @contextmanager
    def changing(self, run: str) -> Iterator[None]:
        """Returns a context in which tables are changed.

        No epoch begins meanwhile. See :meth:`check` for errors.
        """
        with self.gate.shared():
            self.check(run)
            yield

    @property
    def _run(self) -> str:
        """The label of the run of the server. Empty if the server is in no epoch."""
        return self.gate.run

    @_run.setter
    def _run(self, label: str) -> None:
        self.gate.run = label

    def write_once(
        self,
        header: pb.WriteHeader,
        arrays: Sequence[Tensor],
        from_primary: bool,
        action: Callable[[], int],
    ) -> int:
        """Carries out a numbered write once, here and on the backup.

        See :class:`AppliedRequests`.

        Args:
            header: The header of the write.
            arrays: The arrays of ``WriteRequest``, (bytes,) uint8 each.
            from_primary: Whether this server is the backup of the server that sends the
                write.
            action: The function that carries out the write, and returns the number of
                deleted rows.
        """

        def write() -> int:
            with self._pair.turn(from_primary):
                deleted = action()
                self._pair.send(header, arrays)
                return deleted

        with self.changing(header.epoch):
            deleted = self._applied.once(
                client=header.client,
                request=header.request,
                done_before=header.done_before,
                action=write,
            )
        # also for a write that was carried out before, but perhaps not by the backup
        self._pair.wait()
        return deleted

    def create(self, request: pb.CreateRequest, spec: TableSpec) -> None:
        """Creates a table, here and on the backup. See ``Create`` in recstore.proto."""
        if spec.temporary and self._pair.is_on:
            raise ValueError(
                "a server that is replicated stores no cold rows of a job (ServerStore)"
            )
        with self._changing_tables("Create", request):
            self._tables.create(request.table, spec)

    def drop(self, request: pb.DropRequest) -> None:
        """Deletes a table, here and on the backup. See ``Drop`` in recstore.proto."""
        with self._changing_tables("Drop", request):
            if self._tables.spec(request.table) is not None:
                self._tables.drop(request.table)

    @contextmanager
    def _changing_tables(
        self,
        method: str,
        request: pb.CreateRequest | pb.DropRequest,
    ) -> Iterator[None]:
        with (
            self._applied.change(),
            self.changing(request.epoch),
            self._pair.turn(self._follows_now),
        ):
            yield
            self._pair.tables_changed(method, request)

    def place(self) -> dict[str, Any]:
        """Returns the place of the server in its set and its run, for its backup."""
        member = self._directory.membership
        return {
            "member": None if member is None else asdict(member),
            "run": self._run,
            "waits": self._waits,
        }

    def set_place(self, place: Mapping[str, Any]) -> None:
        """Takes over the place of the primary."""
        with self._changing:
            if place["member"] is not None:
                self._directory.set_membership(membership_of(place["member"]))
            self._run = place["run"]
            self._waits = place["waits"]
            self._clean = False

    def copy(self, copy_id: SaveId, begun: Callable[[], object]) -> dict[str, Any]:
        """Writes a copy of the tables for the backup, which :meth:`read_file` reads.

        Args:
            copy_id: The id of the copy.
            begun: A function that is called at the moment of the copy, while no write
                is carried out.

        Returns:
            The state of the server at that moment, as JSON.
        """
        self.forget_copy()
        state: dict[str, Any] = {}

        def begin() -> None:
            with self._changing:
                state.update(self.place(), applied=self._applied.to_json())
            begun()

        self._copy = copy_id
        path = self._directory.received(copy_id)
        self._rows_thread.submit(self._tables.save, path, begun=begin).result()
        return state

    def forget_copy(self) -> None:
        """Deletes the copy."""
        if self._copy is not None:
            remove(self._directory.received(self._copy))
            self._copy = None

    def follow(
        self,
        copy: pb.Saved,
        state: Mapping[str, Any],
        read: Callable[[str, int], pb.ReadFileReply],
    ) -> None:
        """Replaces the tables by the copy of another server.

        Args:
            copy: The copy.
            state: What :meth:`copy` has returned there.
            read: A function that reads a piece of a file there, as :meth:`read_file`.

        Raises:
            ValueError: This server is of another set.
        """
        self._check_same_place(state["member"])
        path = self._directory.received(SaveId(copy.id))
        remove(path)
        make_directory(path)
        try:
            for file_name in read("", 0).files:
                _copy_file(path / SavedFileName(file_name), partial(read, file_name))
            sent_info(path)  # it names no other directory
            loaded = self._read(path, exact=True)
        finally:
            remove(path)
        with self._saving, self.gate.exclusive():
            self._forget_next()
            # Before the tables change: what follows can fail, for example because the
            # disk is full.
            self._run = ""
            self._clean = False
            self.follows = True
            self._tables.replace(loaded)
            self._applied.from_json(state["applied"])
            # the rows of its last stop, if it has stopped, are old
            self._directory.set_last(self._directory.last)
            self.set_place(state)

    def _check_same_place(self, primary: Mapping[str, Any] | None) -> None:
        """Checks that this server can be the backup of a primary with this membership.

        Raises:
            ValueError: This server has another place in a set.
        """
        member = self._directory.membership
        if member is None:
            return
        if (
            primary is None
            or member.set != primary["set"]
            or member.member != primary["member"]
        ):
            raise ValueError(
                f"{self._directory.path} has rows of another server than the primary:"
                " start this server with an empty data directory"
            )

    def describe(self) -> pb.DescribeReply:
        """Returns the state of the server. See ``Describe`` in recstore.proto."""
        directory = self._directory
        member = directory.membership
        specs = self._tables.specs()
        reply = pb.DescribeReply(
            live=bool(self._run),
            waits=self._waits,
            at=directory.at,
            saves=directory.saves,
            prepared=directory.prepared,
            tables={name: spec.to_json() for name, spec in specs.items()},
            replicated=self._pair.is_on,
            backup=self._pair.backup,
        )
        if member is not None:
            reply.set = member.set
            reply.member = member.member
            reply.members = member.members
            reply.epoch = member.epoch
            reply.token = member.token
            reply.next = member.next
            reply.slots.extend(member.slots)
            reply.runs.extend(member.runs)
            reply.earlier.extend(member.earlier)
            if self._waits:
                reply.at.CopyFrom(directory.saved(member.save))
        return reply

    def save(
        self,
        request: pb.SaveRequest,
        is_active: Callable[[], bool],
    ) -> pb.SaveReply:
        """Makes a phase of a save.

        See ``Save`` in recstore.proto. ``is_active`` returns whether the client waits.
        """
        save_id = SaveId(request.save.id)
        if request.phase == pb.SaveRequest.RESERVE:
            return self._reserve(request, is_active)
        if request.phase == pb.SaveRequest.PREPARE:
            with self._saving, self._reservation(request):
                self._prepare(request)
        elif request.phase == pb.SaveRequest.COMMIT:
            with self._saving:
                self._applied.check_open()
                self._commit(request)
        elif request.phase == pb.SaveRequest.ABORT:
            with self._saving:
                self._applied.check_open()
                self._directory.discard(save_id)
            self._reservations.release(save_id)
        else:
            raise ValueError(f"a save has no phase {request.phase}")
        self._pair.repeat("Save", request)
        return pb.SaveReply(decided=[saved.id for saved in self._directory.saves])

    def load(self, request: pb.LoadRequest) -> None:
        """Makes a phase of a load. See ``Load`` in recstore.proto."""
        phases = pb.LoadRequest
        if request.phase == phases.ABORT:
            self._abort_load(request)
            return
        if request.phase not in (phases.PREPARE, phases.COMMIT, phases.RESHARD):
            raise ValueError(f"a load has no phase {request.phase}")
        with self._saving:
            self._applied.check_open()
            if self._has_begun(request):
                return  # the answer was lost, and the client repeats the call
            self._check_later(request)
            if request.phase == phases.RESHARD:
                self._reshard(request)
                return
            if self._next is None or not self._next.is_for(request):
                self._read_next(request)
            if request.phase == phases.COMMIT:
                self._begin_epoch(request)
                self._pair.changed()

    def _abort_load(self, request: pb.LoadRequest) -> None:
        save_id = SaveId(request.save.id) if request.parts else None
        with self._saving:
            self._forget_next(request.token)
            if save_id is not None:
                self._directory.discard(save_id)
                self._received.forget(save_id)

    def _has_begun(self, request: pb.LoadRequest) -> bool:
        """Returns whether the server is in the epoch of a load already."""
        member = self._directory.membership
        if member is None or not (self._run or self._waits):
            return False
        return member.token == request.token and member.epoch == request.epoch

    def _read_next(self, request: pb.LoadRequest) -> None:
        """Reads the tables of a load, unless the server has them."""
        self._forget_next()
        is_at_save = self._clean and request.save == self._directory.at
        if not self._run and is_at_save:
            specs = self._tables.specs()
        else:
            loaded = self._read(self._path_of(request.save), request.exact)
            specs = loaded.specs
            self._next = _Next(
                token=request.token,
                save=request.save,
                exact=request.exact,
                loaded=loaded,
            )
        self._next_deadline.begin(partial(self._forget_late, request.token))
        try:
            _check_parts(request, specs)
        except ValueError:
            self._forget_next()
            raise

    def resume(self, request: pb.ResumeRequest) -> pb.ResumeReply:
        """Makes a phase of the resuming of a server that was stopped.

        See ``Resume`` in recstore.proto.

        Raises:
            ServerRestartedError: The states of the servers have changed. The client
                describes them again.
            ValueError: The request has no phase.
        """
        phases = pb.ResumeRequest
        if request.phase not in (phases.PREPARE, phases.NOTE, phases.COMMIT):
            raise ValueError(f"resuming has no phase {request.phase}")
        with self._changing:
            reply = self._resume(request)
        self._pair.member_changed()
        return reply

    def _resume(self, request: pb.ResumeRequest) -> pb.ResumeReply:
        phases = pb.ResumeRequest
        self._applied.check_open()
        directory = self._directory
        member = directory.membership
        is_in_epoch = bool(self._run or self._waits)
        if member is None or member.label != request.epoch or not is_in_epoch:
            raise ServerRestartedError(
                f"the server is not in the epoch {request.epoch or 'none'}"
            )
        last_run = None  # the last run that this server knows of the server that begins
        if request.member < member.members:
            last_run = member.runs[request.member]
        earlier_runs = same_runs(request.before, member.token, request.member)
        is_known = last_run in earlier_runs or last_run == request.run
        # a server notes the runs of other servers, and begins its own
        begins_itself = request.member == member.member
        notes = request.phase == phases.NOTE
        if begins_itself == notes or not is_known:
            raise ServerRestartedError("another run of the server was begun")
        if not request.run and request.phase != phases.PREPARE:
            raise ValueError("the run that begins has no name")
        if notes:
            if last_run != request.run:
                directory.set_membership(member.with_run(request.member, request.run))
        elif self._run:
            if request.phase == phases.PREPARE or last_run != request.run:
                raise ServerRestartedError("another client has resumed the server")
        elif request.phase == phases.PREPARE:
            if not member.next:
                member = replace(member, next=uuid.uuid4().hex)
                directory.set_membership(member)
            return pb.ResumeReply(run=member.next)
        elif request.run != member.next:
            raise ServerRestartedError("another run of the server was begun")
        else:
            self._begin_run(member.with_run(member.member, request.run), member.save)
        return pb.ResumeReply()

    def _begin_run(self, member: Membership, last: SaveName | None) -> None:
        """Begins the run of a server that was stopped, with ``last`` as the save to
        start from after a kill.

        A server that is killed before the state of the stop is deleted continues from
        the stop, in the run after this one.
        """
        self._directory.set_membership(member)
        self._directory.set_last(last)
        self._run = member.run_label
        self._waits = False

    def read_file(self, request: pb.ReadFileRequest) -> pb.ReadFileReply:
        """Reads a piece of a file of a save. See ``ReadFile`` in recstore.proto."""
        _check_offset(request.offset)
        path = self._path_of(request.save)
        if path is None or not path.is_dir():
            raise FileNotFoundError(f"there is no save {request.save.name!r}")
        files = sorted(os.listdir(path))
        if not request.file:
            return pb.ReadFileReply(files=files)
        name = SavedFileName(request.file)
        if name not in files:
            raise FileNotFoundError(
                f"the save {request.save.name!r} has no file {name!r}"
            )
        with _opened_file(path / name) as file:
            file.seek(request.offset)
            content = file.read(PART_BYTES)
            return pb.ReadFileReply(content=content, last=len(content) < PART_BYTES)

    def write_file(self, request: pb.WriteFileRequest) -> None:
        """Writes a piece of a file of a save of other servers.

        See ``WriteFile`` in recstore.proto.
        """
        save_id = SaveId(request.id)
        _check_offset(request.offset)
        self._received.write(save_id, request)

    def _reshard(self, request: pb.LoadRequest) -> None:
        """Writes the part of this server, of the rows of a save of other servers."""
        directory = self._directory
        save = request.save
        if _has_id(directory.prepared, save.id):
            return
        save_id, name = _checked(save)
        directory.check_free(name, overwrite=True)
        received = directory.received(save_id)
        refuse_links_below(received)
        info, specs_of_all = joined(received, request.parts)
        shard = (request.member, request.members)
        specs = {
            table: replace(spec, shard=shard) for table, spec in specs_of_all.items()
        }
        manifest = _manifest(
            save,
            set_id=request.set,
            epoch=request.epoch,
            member=request.member,
            servers=[],
            slots=request.slots,
        )
        self._rows_thread.submit(
            self._tables.write_part,
            info,
            specs=specs,
            owned=owned_by(request.member, request.slots),
            path=directory.new_staging(save_id),
            training_state={MANIFEST: manifest},
        ).result()
        directory.add_prepared(save)
        self._received.forget(save_id)

    def _begin_epoch(self, request: pb.LoadRequest) -> None:
        directory = self._directory
        name = SaveName(request.save.name) if request.save.name else None
        if _has_id(directory.prepared, request.save.id):
            directory.publish(SaveId(request.save.id))
        members = request.members
        runs = [first_run(request.token, number, members) for number in range(members)]
        member = Membership(
            set=request.set,
            member=request.member,
            members=members,
            slots=tuple(request.slots),
            epoch=request.epoch,
            token=request.token,
            save=name,
            runs=tuple(runs),
            # Clients of earlier releases take the token for the name of the first run.
            earlier=(request.token,) if members > 1 else (),
        )
        with self.gate.exclusive(), self._changing:
            last_run = self._run
            # a read that is running finds after it that the epoch has ended
            self._run = ""
            try:
                if self._next is not None:
                    self._tables.replace(self._next.loaded)
                    self._next = None
                self._clean = False
                directory.set_last(name)
                directory.set_membership(member)
            except ValueError:
                self._run = last_run  # the tables have not changed
                raise
            self._run = member.run_label
            self._waits = False
        self._reservations.release()

    def _check_later(self, request: pb.LoadRequest) -> None:
        """Checks that an epoch follows that of this server.

        Raises:
            ServerRestartedError: It does not. The client describes the servers again.
            ValueError: The request makes no sense.
        """
        member = self._directory.membership
        if request.save.name:
            SaveName(request.save.name)
        has_set = request.set and "/" not in request.set
        if not has_set or request.member >= request.members or request.epoch < 1:
            raise ValueError(
                "a load needs a set, the number of the server in it, and an epoch"
            )
        if not request.token.isalnum() or len(request.token) > 64:
            raise ValueError("a load needs a token of at most 64 letters and digits")
        if not request.slots or max(request.slots) >= request.members:
            raise ValueError("a load needs a server of the set for each slot")
        if request.members > len(request.slots):
            raise ValueError(
                f"a set has at most as many servers as slots, got {request.members}"
            )
        if member is None:
            return
        if member.set != request.set or member.epoch >= request.epoch:
            raise ServerRestartedError(
                f"the server is in the epoch {member.label}, and another epoch was"
                " begun"
            )

    def _read(self, path: Path | None, exact: bool) -> Loaded:
        return self._rows_thread.submit(self._tables.read, path, exact).result()

    def _path_of(self, saved: pb.Saved) -> Path | None:
        if not saved.name:
            return None
        name = SaveName(saved.name)
        if not saved.id:
            return self._directory.checkpoint(name)
        save_id = SaveId(saved.id)
        if save_id == self._copy:
            return self._directory.received(save_id)
        if _has_id(self._directory.prepared, save_id):
            return self._directory.staging(save_id)
        if not _has_id(self._directory.saves, save_id):
            raise FileNotFoundError(f"there is no save {name!r} with the id {save_id}")
        return self._directory.checkpoint(name)

    def _forget_late(self, token: str) -> None:
        """Frees the rows that were read for a load whose client has died."""
        with self._saving:
            self._forget_next(token)

    def _forget_next(self, token: str = "") -> None:
        if self._next is not None and token in ("", self._next.token):
            self._next.loaded.close()
            self._next = None

    def _reserve(
        self,
        request: pb.SaveRequest,
        is_active: Callable[[], bool],
    ) -> pb.SaveReply:
        def check() -> None:
            self._applied.check_open()
            self.check(request.epoch)

        self.check(request.epoch)
        save_id, _ = _checked(request.save)
        directory = self._directory

        def last_number() -> int:
            saves = [*directory.saves, *directory.prepared]
            return max((saved.number for saved in saves), default=0)

        number = self._reservations.reserve(
            save_id,
            check=check,
            is_active=is_active,
            last=last_number,
        )
        check()
        return pb.SaveReply(number=number)

    @contextmanager
    def _reservation(self, request: pb.SaveRequest) -> Iterator[None]:
        """Returns a context in which server 0 lets no other save prepare."""
        member = self._directory.membership
        if member is None or member.member != 0 or self._follows_now:
            yield
            return
        with self._reservations.preparing(request.save) as has_turn:
            if not has_turn:
                self.check(request.epoch)
                raise CallRefusedError(
                    grpc.StatusCode.ABORTED,
                    _SUPERSEDED.format(request.save.name),
                    SAVE_SUPERSEDED,
                )
            yield

    def _refuse_superseded(self, request: pb.SaveRequest) -> NoReturn:
        self.check(request.epoch)  # the server was restarted, or an epoch was begun
        raise ValueError(_SUPERSEDED.format(request.save.name))

    def _prepare(self, request: pb.SaveRequest) -> None:
        self._applied.check_open()
        self.check(request.epoch)
        directory = self._directory
        save_id, name = _checked(request.save)
        if _has_id(directory.saves, save_id) or _has_id(directory.prepared, save_id):
            return
        # the rows of a load whose client has died; another client's load reads them
        # again
        self._forget_next()
        directory.check_free(name, request.overwrite)
        member = directory.membership
        assert member is not None
        manifest = _manifest(
            request.save,
            set_id=member.set,
            epoch=member.epoch,
            member=member.member,
            servers=request.servers,
            slots=member.slots,
        )
        staging = directory.new_staging(save_id)
        self._rows_thread.submit(
            self._tables.save,
            staging,
            training_state={MANIFEST: manifest},
        ).result()
        directory.add_prepared(request.save)

    def _commit(self, request: pb.SaveRequest) -> None:
        directory = self._directory
        save = request.save
        save_id = SaveId(save.id)
        forgotten = [SaveName(name) for name in request.forget]
        if _has_id(directory.saves, save.id):
            return
        member = directory.membership
        assert member is not None
        is_in_epoch = bool(self._run or self._waits)
        is_of_epoch = is_in_epoch and _epoch_of(request.epoch) == member.label

        decided = set(request.decided)
        if member.member == 0:
            if not self._follows_now:
                is_of_run = request.epoch == self._run
                if not is_of_run or not self._reservations.has_turn(save.id):
                    self._refuse_superseded(request)
            decided = {saved.id for saved in directory.saves}
        for prepared in directory.prepared:
            if prepared.id == save_id or prepared.number > save.number:
                continue
            if prepared.id in decided:
                directory.publish(SaveId(prepared.id))
            else:
                directory.discard(SaveId(prepared.id))

        with self._changing:
            starts_from_it = is_of_epoch and not self._waits
            name = directory.publish(save_id, start_from=starts_from_it)
            if is_of_epoch and directory.membership is not None:
                directory.set_membership(replace(directory.membership, save=name))
        self._reservations.release(save_id)
        for name in forgotten:
            directory.forget(name)


def _epoch_of(run: str) -> str:
    """Returns the label of the epoch of a run, or "" for no run."""
    return run.rpartition("/")[0]


def _has_id(saves: Iterable[pb.Saved], save_id: str) -> bool:
    """Returns whether a save with this id is among ``saves``."""
    return any(saved.id == save_id for saved in saves)


def _copy_file(path: Path, read: Callable[[int], pb.ReadFileReply]) -> None:
    """Writes a file of another server, whose pieces ``read`` returns by their offset."""
    with naming(path), path.open("wb") as file:
        offset = 0
        is_last = False
        while not is_last:
            piece = read(offset)
            file.write(piece.content)
            offset += len(piece.content)
            is_last = piece.last


def _check_parts(request: pb.LoadRequest, specs: Mapping[str, TableSpec]) -> None:
    """Checks that the tables of a save are the parts of this server.

    Raises:
        ValueError: A table is another part, or that of another number of servers.
    """
    for name, spec in specs.items():
        part, parts = spec.shard
        if (part, parts) != (request.member, request.members):
            raise ValueError(
                f"table {name!r} of the save {request.save.name!r} is part {part + 1}"
                f" of {parts} here, and this is server {request.member + 1} of"
                f" {request.members}: start the servers with set.json of their save, or"
                " use recstore servers restore --to"
            )


def _opened_file(path: Path) -> BinaryIO:
    """Opens a file of a save.

    A link or a pipe is no file that a save has, and what it names may be secret.

    Raises:
        OSError: There is something else, or the file cannot be read.
    """
    if not stat.S_ISREG(path.lstat().st_mode):
        raise OSError(
            f"{path} is no regular file, and a save has no others: copy the file there,"
            " or delete it"
        )
    return os.fdopen(open_own(path, os.O_RDONLY | os.O_NONBLOCK), "rb")


def _check_offset(offset: int) -> None:
    if offset > _LARGEST_FILE:
        raise ValueError(
            f"a file of a save has at most {_LARGEST_FILE} bytes, got the offset"
            f" {offset}"
        )


def _checked(saved: pb.Saved) -> tuple[SaveId, SaveName]:
    """Checks the fields of a save that a client makes, and returns its id and its name.

    Raises:
        ValueError: A field is invalid.
    """
    save_id = SaveId(saved.id)
    name = SaveName(saved.name)
    if name in STOPPED:
        raise ValueError(f"a server that stops saves as {name!r}: choose another name")
    if saved.number >= 2**63:
        raise ValueError("the number of a save must be less than 2**63")
    return save_id, name


def _manifest(
    saved: pb.Saved,
    *,
    set_id: str,
    epoch: int,
    member: int,
    servers: Sequence[str],
    slots: Sequence[int],
) -> dict[str, Any]:
    """Returns the manifest of a part of a save.

    All parts name the save, the servers and the map of slots.
    """
    return {
        "name": saved.name,
        "id": saved.id,
        "number": saved.number,
        "set": set_id,
        "epoch": epoch,
        "member": member,
        "servers": list(servers),
        "slots": list(slots),
    }
