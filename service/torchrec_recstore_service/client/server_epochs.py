"""The connections to a set of servers, and the epochs in which the servers are: saves,
loads, and the agreement of all servers.

Tests: tests/service/test_agreement.py and test_three_servers.py.
"""

from __future__ import annotations

import os
import uuid
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from torchrec_recstore.network import checked_addresses, host_of, is_loopback
from torchrec_recstore_service.client.client_epoch import ClientEpoch, Runs
from torchrec_recstore_service.client.connection import Connection
from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire.access import Access
from torchrec_recstore_service.wire.agreement import (
    SLOTS,
    Begin,
    has_lost,
    label_of,
    run_of,
    to_load,
    to_reshard,
    to_resume,
)
from torchrec_recstore_service.wire.protocol import (
    SAVE_SUPERSEDED,
    ServerRestartedError,
    ServerSetError,
    ServiceError,
)

# The number of threads per server. The deadline of a call begins when it has a thread,
# so there are more threads than concurrent calls in practice.
_THREADS_A_SERVER = 256
_ATTEMPTS = 5  # to begin an epoch, or a save, while other clients do the same
_Result = TypeVar("_Result")


class ServerEpochs:
    """The connections to a set of servers, and the epochs in which the servers are.

    A call goes to servers at the same time. If it fails on one server, other servers
    may have done their part.

    Args:
        addresses: The address of each server of a set, ``host:port``, in any order.
            ``host:port/host:port`` for a pair that is replicated.
        access: The credentials, certificates and timeout. See :class:`Connection`.

    Raises:
        TypeError: ``addresses`` is not a sequence of str.
        ValueError: An address has another form or occurs twice, or a token would be
            sent to another machine without TLS.
        OSError: A file of certificates cannot be read.
    """

    def __init__(self, addresses: Sequence[str], access: Access) -> None:
        self.addresses = checked_addresses(addresses)
        if any(pair.count("/") > 1 for pair in self.addresses):
            raise ValueError(
                f"servers: a pair has two addresses, got {max(self.addresses, key=len)}"
            )
        if access.token is not None and access.tls_ca is None:
            _check_only_loopback(self.addresses)
        self._epoch = ClientEpoch(self._agreed)
        # for each slot, the index of its connection
        self._owners = torch.zeros(SLOTS, dtype=torch.int64)
        self._members: tuple[int, ...] = ()
        self._slots: tuple[int, ...] = ()
        self._connections = [
            Connection(address, access, self._epoch) for address in self.addresses
        ]
        threads = _THREADS_A_SERVER * len(self.addresses)
        self._threads = ThreadPoolExecutor(threads, "recstore-client")
        self._close = weakref.finalize(
            self,
            _close,
            self._connections,
            self._threads,
            os.getpid(),
        )

    def members(self, table: str = "") -> tuple[int, ...]:
        """Returns the number of each server in its set. Errors name ``table``."""
        self._epoch.label(table)
        return self._members

    def epoch(self) -> str:
        """Returns the label of the epoch of this client's calls."""
        return self._epoch.label("")

    def describe(self, table: str = "") -> list[pb.DescribeReply]:
        """Returns the state of each server. Errors name ``table``."""
        return self._call_all(lambda connection: connection.describe(table))

    def describe_reachable(self) -> list[pb.DescribeReply | ServiceError]:
        """Returns the state of each server, or the error why it cannot be reached."""

        def describe(connection: Connection) -> pb.DescribeReply | ServiceError:
            try:
                return connection.describe()
            except ServiceError as error:
                return error

        return self._call_all(describe)

    def save(
        self,
        name: str | Path,
        overwrite: bool = False,
        forget: Sequence[str] = (),
    ) -> None:
        """Saves all tables on all servers. The save counts on all servers or on none.

        Args:
            name: The name of the save, below each server's data directory.
            overwrite: Whether a save of this name is replaced.
            forget: The names of saves that are deleted when this save counts. Default:
                none.
        """
        last_write = self._epoch.done
        label = self._epoch.label("")
        try:
            self._save(label, str(name), overwrite, forget)
        except ServerRestartedError as error:
            label = self._epoch.after(error, label, "")
            self._save(label, str(name), overwrite, forget)
        self._epoch.set_saved(last_write)

    def _save(
        self,
        label: str,
        name: str,
        overwrite: bool,
        forget: Sequence[str],
    ) -> None:
        connections = sorted(self._connections, key=self._number)
        first, *others = connections
        addresses = [connection.address for connection in connections]
        save = pb.Saved(name=name)
        phases = pb.SaveRequest

        def request(
            phase: pb.SaveRequest.Phase,
            decided: Sequence[str] = (),
        ) -> pb.SaveRequest:
            return pb.SaveRequest(
                phase=phase,
                save=save,
                overwrite=overwrite,
                servers=addresses,
                decided=decided,
                forget=forget,
            )

        def prepare(connection: Connection) -> None:
            connection.save(request(phases.PREPARE), label)

        def abort(connection: Connection) -> None:
            connection.save(request(phases.ABORT), label)

        for attempt in range(_ATTEMPTS):
            save.id = uuid.uuid4().hex
            save.number = first.save(request(phases.RESERVE), label).number
            try:
                self._call_all(prepare)
                break
            except BaseException as error:
                with suppress(Exception):  # what is left is deleted by a later save
                    self._call_all(abort)
                is_last = attempt + 1 == _ATTEMPTS
                if is_last or not _is_superseded(error):
                    raise
        # from here on the save counts
        decided = first.save(request(phases.COMMIT), label).decided
        self._call_all(
            lambda connection: connection.save(request(phases.COMMIT, decided), label),
            others,
        )

    def load(self, name: str | Path | None, exact: bool = False) -> None:
        """Begins an epoch on all servers with a save.

        Args:
            name: The name of the save. None: the epoch begins without rows.
            exact: Whether tables that the save does not have are deleted, and tables
                with another specification are replaced. Default: False, these tables
                are an error.
        """
        # Writes of other threads that are pending now may reach the servers before or
        # after the load, so they do not count as saved.
        last_write = self._epoch.done
        save = None if name is None else str(name)
        runs = self._begin(
            "",
            lambda states: to_load(self.addresses, states, save, exact),
        )
        self._epoch.begin(runs, last_write)

    def load_from(self, sources: ServerEpochs, name: str) -> None:
        """Begins an epoch with a save of other servers, whose rows are distributed over
        these servers anew.

        These servers belong to no set, or to the set of the sources. They then have a
        save of the same name.

        Args:
            sources: The servers that have the save.
            name: The name of the save.
        """
        last_write = self._epoch.done
        states_of_sources = sources.describe()
        save, begin = to_reshard(
            addresses=self.addresses,
            states=self.describe(),
            sources=sources.addresses,
            states_of_sources=states_of_sources,
            name=name,
        )
        for part, connection in enumerate(sources._connections):
            for file in connection.read_file(save).files:
                self._copy(
                    connection,
                    save,
                    file,
                    begin.save.id,
                    part,
                )
        self._load(begin, parts=len(states_of_sources))
        self._set_owners(begin)
        self._epoch.begin(self._begun(begin), last_write)

    def _copy(
        self,
        source: Connection,
        save: pb.Saved,
        file: str,
        save_id: str,
        part: int,
    ) -> None:
        """Copies a file of a save from another server to these servers."""
        offset = 0
        is_last = False
        while not is_last:
            reply = source.read_file(save, file, offset)
            piece = pb.WriteFileRequest(
                id=save_id,
                part=part,
                file=file,
                offset=offset,
                content=reply.content,
            )
            self._call_all(partial(_write_file, piece=piece))
            offset += len(reply.content)
            is_last = reply.last

    def _agreed(self, table: str) -> Runs:
        """Returns the epoch in which all servers are. See :class:`ClientEpoch`."""
        known_runs = self._epoch.runs

        def plan(states: list[pb.DescribeReply]) -> Begin:
            begin = to_resume(self.addresses, states)
            is_same = begin.members == self._members and begin.slots == self._slots
            # Calls in progress have split their ids by the map of slots.
            if self._members and not is_same:
                raise ServerSetError(
                    f"the rows of the servers {', '.join(self.addresses)} were"
                    " distributed anew: make a new client"
                )
            label = known_runs.label
            for address, state in zip(self.addresses, states, strict=True):
                if label and has_lost(state, label, known_runs.by_address[address]):
                    raise ServerRestartedError(
                        f"server {address} has older rows than this client has seen,"
                        " because its data directory was rolled back or is a copy:"
                        " only a new client continues with them"
                    )
            return begin

        return self._begin(table, plan)

    def _begin(
        self,
        table: str,
        plan: Callable[[list[pb.DescribeReply]], Begin],
    ) -> Runs:
        """Begins an epoch where it has not begun, and resumes servers that wait.

        Returns their runs.
        """
        last_states: list[pb.DescribeReply] | None = None
        for attempt in range(_ATTEMPTS):
            is_last = attempt + 1 == _ATTEMPTS
            states = self.describe(table)
            try:
                begin = plan(states)
            except ServiceError:
                # The states may be of different moments, if another client changes them
                # meanwhile.
                if is_last or states == last_states:
                    raise
                last_states = states
                continue
            try:
                resumed_runs = {
                    index: self._resume(begin, index, run_of(states[index]))
                    for index in begin.waiting
                }
                self._load(begin)
            except ServerRestartedError:
                # Another client has begun an epoch or resumed a server meanwhile.
                if is_last:
                    raise
                continue
            self._set_owners(begin)
            if begin.pending:
                return self._begun(begin, table)
            runs = {}
            for index, address in enumerate(self.addresses):
                runs[address] = resumed_runs.get(index) or run_of(states[index])
            return Runs(begin.label, runs)
        raise AssertionError("the last attempt raises")

    def _begun(self, begin: Begin, table: str = "") -> Runs:
        """Returns the runs of an epoch that has begun on some servers."""
        runs = {}
        for address, state in zip(self.addresses, self.describe(table), strict=True):
            # Another client may have begun a later epoch, and then the first call is
            # refused.
            is_in_epoch = label_of(state) == begin.label
            runs[address] = run_of(state) if is_in_epoch else begin.token
        return Runs(begin.label, runs)

    def _resume(
        self,
        begin: Begin,
        index: int,
        before: str,
    ) -> str:
        """Lets a server that was stopped go on in its epoch, and returns its next run.

        Args:
            begin: The epoch.
            index: The index of the server among the addresses.
            before: The last run of the server.
        """
        stopped = self._connections[index]
        others = [
            connection for connection in self._connections if connection is not stopped
        ]
        phases = pb.ResumeRequest

        def request(phase: pb.ResumeRequest.Phase, run: str = "") -> pb.ResumeRequest:
            return phases(
                phase=phase,
                epoch=begin.label,
                member=begin.members[index],
                before=before,
                run=run,
            )

        run = stopped.resume(request(phases.PREPARE)).run
        note = request(phases.NOTE, run)
        self._call_all(lambda connection: connection.resume(note), others)
        stopped.resume(request(phases.COMMIT, run))
        return run

    def _set_owners(self, begin: Begin) -> None:
        index_of = {member: index for index, member in enumerate(begin.members)}
        self._owners = torch.tensor([index_of[member] for member in begin.slots])
        self._members = begin.members
        self._slots = begin.slots

    def _load(self, begin: Begin, parts: int = 0) -> None:
        """Begins an epoch on the servers that are not in it.

        Args:
            begin: The epoch.
            parts: The number of parts of a save that were written to these servers by
                other servers. Default: 0, the servers load their own save.
        """
        pending = [self._connections[index] for index in begin.pending]
        members = dict(zip(self._connections, begin.members, strict=True))
        phases = pb.LoadRequest

        def load(phase: pb.LoadRequest.Phase, connection: Connection) -> None:
            request = pb.LoadRequest(
                phase=phase,
                token=begin.token,
                save=begin.save,
                exact=begin.exact,
                set=begin.set,
                member=members[connection],
                members=len(members),
                epoch=begin.epoch,
                slots=begin.slots,
                parts=parts,
            )
            connection.load(request)

        try:
            if parts:
                self._call_all(partial(load, phases.RESHARD), pending)
            self._call_all(partial(load, phases.PREPARE), pending)
        except BaseException:
            with suppress(Exception):  # what is left is freed by a later save or load
                self._call_all(partial(load, phases.ABORT), pending)
            raise
        # one after the other, so that of two clients only one gets beyond the first
        for connection in pending:
            load(phases.COMMIT, connection)

    def _number(self, connection: Connection) -> int:
        return self._members[self._connections.index(connection)]

    def close(self) -> None:
        """Closes the connections."""
        self._close()

    def _read(self, table: str, call: Callable[[Connection], _Result]) -> list[_Result]:
        """Calls all servers in one epoch.

        If another epoch begins meanwhile, all servers are called again.
        """
        while True:
            label = self._epoch.label(table)
            answers = self._call_all(call)
            if self._epoch.label(table) == label:
                return answers

    def _call_all(
        self,
        call: Callable[[Connection], _Result],
        connections: Sequence[Connection] | None = None,
    ) -> list[_Result]:
        """Calls servers at the same time.

        No call is running any more when it returns or raises an error.

        Args:
            call: The call.
            connections: The connections to the servers. Default: None, for all servers.
        """
        if connections is None:
            connections = self._connections
        if len(connections) <= 1:
            return [call(connection) for connection in connections]
        # before the submit, because a forked process has no threads
        connections[0].check_process()
        futures = [
            self._threads.submit(call, connection) for connection in connections[:-1]
        ]
        last: Future[_Result] = Future()  # this thread calls the last server
        try:
            last.set_result(call(connections[-1]))
        except BaseException as error:
            last.set_exception(error)
        wait(futures)
        return [future.result() for future in (*futures, last)]


def _check_only_loopback(addresses: Sequence[str]) -> None:
    """Checks that a token which is sent unencrypted stays on this machine.

    Raises:
        ValueError: Another machine can be reached by an address.
    """
    for pair in addresses:
        for address in pair.split("/"):
            if not is_loopback(host_of(address)):
                raise ValueError(
                    f"token would be sent to {address} unencrypted: pass tls_ca as well"
                )


def _is_superseded(error: BaseException) -> bool:
    """Returns whether a save has failed because another one has got its turn."""
    return isinstance(error, ServiceError) and error.kind == SAVE_SUPERSEDED


def _write_file(connection: Connection, piece: pb.WriteFileRequest) -> None:
    connection.write_file(piece)


def _close(
    connections: Sequence[Connection],
    threads: ThreadPoolExecutor,
    process: int,
) -> None:
    # in a forked process, connections and threads belong to the parent
    if os.getpid() != process:
        return
    for connection in connections:
        connection.close()
    threads.shutdown(wait=False)
