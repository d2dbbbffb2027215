"""Tables on parameter servers, among which ids are distributed by a hash.

Tests: tests/service/test_three_servers.py and test_server.py.
"""

from __future__ import annotations

import os
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.network import checked_addresses, host_of, is_loopback
from torchrec_recstore.row_types import value_dtype
from torchrec_recstore.store import TableStats
from torchrec_recstore.store.table_state import combined
from torchrec_recstore_service.client.client_epoch import ClientEpoch, Runs
from torchrec_recstore_service.client.connection import Connection
from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire import row_ops
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
    BYTES_A_WRITTEN_ID,
    SAVE_SUPERSEDED,
    WRITE_BYTES,
    NoInitialRow,
    ServerRestartedError,
    ServerSetError,
    ServiceError,
)
from torchrec_recstore_service.wire.row_requests import InitialRows, RowRead, RowUpdate
from torchrec_recstore_service.wire.table_rows import TableRows, places_of_tables
from torchrec_recstore_service.wire.table_spec import TableSpec

# The number of threads per server. The deadline of a call begins when it has a thread,
# so there are more threads than concurrent calls in practice.
_THREADS_A_SERVER = 256
_ATTEMPTS = 5  # to begin an epoch, or a save, while other clients do the same
# of an update of several tables, unless one of them is larger
_UPDATE_BYTES = WRITE_BYTES // 2
_Result = TypeVar("_Result")


class _ServerIds(NamedTuple):
    """The ids of a call that one server stores."""

    ids: Tensor
    """(n,) int64."""
    places: Tensor
    """(n,) int64. Their positions in the call, ascending."""
    counts: list[int]
    """Their number in each table of the call."""


class ServerSet:
    """The tables of a set of servers, among which their rows are distributed, and the
    connections to the servers.

    The methods that :class:`HostedTables` has too mean the same. A call goes to all
    servers that store a part of its rows, at the same time. If the call fails on one
    server, other servers may have done their part.

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
        self._specs: dict[str, TableSpec] = {}
        self._connections = [
            Connection(address, access, self._epoch) for address in self.addresses
        ]
        threads = _THREADS_A_SERVER * len(self.addresses)
        self._threads = ThreadPoolExecutor(threads, "recstore-client")
        self._close = weakref.finalize(
            self, _close, self._connections, self._threads, os.getpid()
        )

    def spec(self, name: str) -> TableSpec | None:
        """See :meth:`HostedTables.spec`.

        Raises:
            ValueError: Only some of the servers have the table, because :meth:`create`
                has failed in the middle; or the parts are those of another number of
                servers.
        """
        self._epoch.label(name)
        documents = self._each(
            lambda connection: connection.describe(name).tables.get(name)
        )
        specs = [
            TableSpec.from_json(document)
            for document in documents
            if document is not None
        ]
        if not specs:
            return None
        server_count = len(self.addresses)
        if len(specs) < server_count:
            lacking = self.addresses[documents.index(None)]
            raise ValueError(
                f"table {name!r} is on other servers, but not on {lacking}: call"
                " init_data again"
            )
        members = self.members(name)
        for address, member, spec in zip(self.addresses, members, specs, strict=True):
            shard, shards = spec.shard
            if shard != member or shards != server_count:
                raise ValueError(
                    f"table {name!r}: server {address} holds part {shard + 1} of"
                    f" {shards}, and is server {member + 1} of {server_count} in its"
                    " set"
                )
        self._specs[name] = replace(specs[0], shard=(0, 1))
        return self._specs[name]

    def members(self, table: str = "") -> tuple[int, ...]:
        """Returns the number of each server in its set. Errors name ``table``."""
        self._epoch.label(table)
        return self._members

    def rows_addresses(self) -> list[str]:
        """Returns the address of the port for rows of each server.

        See :meth:`Connection.rows_address`.
        """
        return self._each(Connection.rows_address)

    def epoch(self) -> str:
        """Returns the label of the epoch of this client's calls."""
        return self._epoch.label("")

    def create(self, name: str, spec: TableSpec) -> None:
        """See :meth:`HostedTables.create`.

        ``spec.shard`` is the one of the whole table, (0, 1).
        """
        members = dict(zip(self._connections, self.members(name), strict=True))

        def create(connection: Connection) -> None:
            shard = (members[connection], len(members))
            connection.create(name, replace(spec, shard=shard).to_json())

        self._each(create)
        self._specs[name] = spec

    def pull(self, name: str, ids: Tensor) -> Tensor:
        """See :meth:`HostedTables.pull`."""
        if len(self._connections) > 1:
            return self.pull_each([RowRead(name, ids)])[0]
        spec = self._specs.get(name) or self._existing(name)
        dtype = value_dtype(spec.dtype)
        # the shortest way: most calls read a few rows
        rows = row_ops.rows_empty(ids.numel(), spec.dim * dtype.itemsize)
        self._connections[0].pull(TableRows([name], ids, [ids.numel()], [rows]))
        return rows.view(dtype)

    def pull_each(self, reads: Sequence[RowRead]) -> list[Tensor]:
        """See :meth:`HostedTables.pull_each`. One request is sent to each server."""
        if not reads:
            return []
        specs = [
            self._specs.get(read.table) or self._existing(read.table) for read in reads
        ]
        dtypes = [value_dtype(spec.dtype) for spec in specs]
        counts = [len(read.ids) for read in reads]
        row_bytes = [
            spec.dim * dtype.itemsize for spec, dtype in zip(specs, dtypes, strict=True)
        ]
        begins, size = places_of_tables(row_bytes, counts)
        memory = row_ops.rows_empty(1, size)[0]
        rows = [
            memory[begin : begin + count * width].view(count, width)
            for begin, count, width in zip(begins, counts, row_bytes, strict=True)
        ]
        zeros = [read.missing == "zeros" for read in reads]
        ids = ops.concatenated([read.ids for read in reads])
        tables = [read.table for read in reads]
        calls = self._parts(tables, ids, counts, rows, zeros=zeros)
        self._read(tables[0], lambda connection: connection.pull(calls[connection]))
        return [
            content.view(dtype).view(-1, spec.dim)
            for content, spec, dtype in zip(rows, specs, dtypes, strict=True)
        ]

    def update_each(self, updates: Sequence[RowUpdate]) -> None:
        """See :meth:`HostedTables.update_each`.

        One request is sent to each server, which updates all tables or none.

        An update that is too large for one request is sent as several ones, each of
        some of the tables.
        """
        request: list[RowUpdate] = []
        request_bytes = 0
        for update in updates:
            row_bytes = 8 + update.grads.shape[1] * 4
            update_bytes = len(update.ids) * max(BYTES_A_WRITTEN_ID, row_bytes)
            if request and request_bytes + update_bytes > _UPDATE_BYTES:
                self._update_together(request)
                request = []
                request_bytes = 0
            request.append(update)
            request_bytes += update_bytes
        if request:
            self._update_together(request)

    def _update_together(self, updates: Sequence[RowUpdate]) -> None:
        grads = [
            update.grads.detach().contiguous().view(torch.uint8) for update in updates
        ]
        calls = self._parts(
            [update.table for update in updates],
            ops.concatenated([update.ids for update in updates]),
            [len(update.ids) for update in updates],
            grads,
            learning_rates=[update.learning_rate for update in updates],
        )
        kind = pb.WriteHeader.UPDATE
        self._each(
            lambda connection: connection.write(kind, calls[connection], float32=True)
        )

    def exists(self, name: str, ids: Tensor) -> Tensor:
        """See :meth:`HostedTables.exists`."""
        has_row, _ = self._found_rows(name, ids, 0)
        return has_row

    def found_rows(self, name: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`HostedTables.found_rows`."""
        spec = self._specs.get(name) or self._existing(name)
        dtype = value_dtype(spec.dtype)
        has_row, rows = self._found_rows(name, ids, spec.dim * dtype.itemsize)
        return has_row, rows.view(dtype).view(-1, spec.dim)

    def _found_rows(
        self, table: str, ids: Tensor, row_bytes: int
    ) -> tuple[Tensor, Tensor]:
        """Reads the rows of the ids that have one.

        See :meth:`Connection.found`; the arguments are the same.
        """
        if len(self._connections) == 1:
            return self._connections[0].found(table, ids, row_bytes)
        parts = self._split([table], ids, [len(ids)])
        answers = self._read(
            table,
            lambda connection: connection.found(
                table, parts[connection].ids, row_bytes
            ),
        )
        has_row = torch.empty(len(ids), dtype=torch.bool)
        for part, (part_has_row, _) in zip(parts.values(), answers, strict=True):
            has_row[part.places] = part_has_row
        if row_bytes == 0:
            return has_row, torch.empty(0, 1, dtype=torch.uint8)
        place_of_row = has_row.cumsum(0) - 1
        rows = row_ops.rows_empty(int(has_row.sum()), row_bytes)
        for part, (part_has_row, part_rows) in zip(
            parts.values(), answers, strict=True
        ):
            places = place_of_row[part.places[part_has_row]]
            row_ops.rows_put([rows], places, [len(part_rows)], part_rows.view(-1), 0)
        return has_row, rows

    def push(self, name: str, ids: Tensor, values: Tensor) -> None:
        """See :meth:`HostedTables.push`."""
        row_bytes = ids.element_size() + values.shape[1] * values.element_size()
        parts_of_ids = _split_for_calls(ids, row_bytes)
        parts_of_rows = _split_for_calls(values, row_bytes)
        for part_ids, part_rows in zip(parts_of_ids, parts_of_rows, strict=True):
            self._write(name, pb.WriteHeader.PUSH, part_ids, part_rows)

    def update(
        self, name: str, ids: Tensor, grads: Tensor, initial: InitialRows | None = None
    ) -> None:
        """See :meth:`HostedTables.update`.

        Raises:
            NoInitialRow: Its ``pending`` has the positions of the ids of the servers
                that have refused the update.
        """
        _, refused = self._write(name, pb.WriteHeader.UPDATE, ids, grads, initial)
        if refused is not None:
            raise NoInitialRow(name, refused)

    def delete(self, name: str, ids: Tensor) -> int:
        """See :meth:`HostedTables.delete`."""
        deleted = 0
        for part_ids in _split_for_calls(ids, ids.element_size()):
            count, _ = self._write(name, pb.WriteHeader.DELETE, part_ids)
            deleted += count
        return deleted

    def ids(self, table: str) -> Tensor:
        """Returns the ids that have a row, (N,) int64, ascending."""
        ids_of_servers = self._read(table, lambda connection: connection.ids(table))
        ids: Tensor = torch.cat(ids_of_servers).sort().values
        return ids

    def stats(self, name: str) -> TableStats:
        """See :meth:`HostedTables.stats`.

        The statistics are summed over all servers.
        """
        replies = self._read(name, lambda connection: connection.stats(name))
        return combined(map(_table_stats, replies))

    def look(
        self, table: str, by: str, count: int, row: bytes = b"", but: int = 0
    ) -> list[pb.LookReply]:
        """Returns what each server finds among all of its rows of a table.

        See ``LookRequest``.
        """
        return self._read(
            table, lambda connection: connection.look(table, by, count, row, but)
        )

    def describe(self, table: str = "") -> list[pb.DescribeReply]:
        """Returns the state of each server. Errors name ``table``."""
        return self._each(lambda connection: connection.describe(table))

    def describe_reachable(self) -> list[pb.DescribeReply | ServiceError]:
        """Returns the state of each server, or the error of a server that cannot be
        reached.
        """

        def describe(connection: Connection) -> pb.DescribeReply | ServiceError:
            try:
                return connection.describe()
            except ServiceError as error:
                return error

        return self._each(describe)

    def save(
        self, name: str | Path, overwrite: bool = False, forget: Sequence[str] = ()
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
        self, label: str, name: str, overwrite: bool, forget: Sequence[str]
    ) -> None:
        connections = sorted(self._connections, key=self._number)
        first, *others = connections
        addresses = [connection.address for connection in connections]
        save = pb.Saved(name=name)
        phases = pb.SaveRequest

        def request(
            phase: pb.SaveRequest.Phase, decided: Sequence[str] = ()
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
                self._each(prepare)
                break
            except BaseException as error:
                with suppress(Exception):  # what is left is deleted by a later save
                    self._each(abort)
                is_last = attempt + 1 == _ATTEMPTS
                if is_last or not _is_superseded(error):
                    raise
        # from here on the save counts
        decided = first.save(request(phases.COMMIT), label).decided
        self._each(
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
            "", lambda states: to_load(self.addresses, states, save, exact)
        )
        self._epoch.begin(runs, last_write)
        self._specs.clear()

    def load_from(self, sources: ServerSet, name: str) -> None:
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
                self._copy(connection, save, file, begin.save.id, part)
        self._load(begin, parts=len(states_of_sources))
        self._set_owners(begin)
        self._epoch.begin(self._begun(begin), last_write)

    def _copy(
        self, source: Connection, save: pb.Saved, file: str, save_id: str, part: int
    ) -> None:
        """Copies a file of a save from another server to these servers."""
        offset = 0
        is_last = False
        while not is_last:
            reply = source.read_file(save, file, offset)
            piece = pb.WriteFileRequest(
                id=save_id, part=part, file=file, offset=offset, content=reply.content
            )
            self._each(partial(_write_file, piece=piece))
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
        self, table: str, plan: Callable[[list[pb.DescribeReply]], Begin]
    ) -> Runs:
        """Begins an epoch on the servers that are not in it, and resumes those that
        wait.

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

    def _resume(self, begin: Begin, index: int, before: str) -> str:
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
        self._each(lambda connection: connection.resume(note), others)
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
                self._each(partial(load, phases.RESHARD), pending)
            self._each(partial(load, phases.PREPARE), pending)
        except BaseException:
            with suppress(Exception):  # what is left is freed by a later save or load
                self._each(partial(load, phases.ABORT), pending)
            raise
        # one after the other, so that of two clients only one gets beyond the first
        for connection in pending:
            load(phases.COMMIT, connection)

    def _number(self, connection: Connection) -> int:
        return self._members[self._connections.index(connection)]

    def close(self) -> None:
        """Closes the connections."""
        self._close()

    def _existing(self, name: str) -> TableSpec:
        spec = self.spec(name)
        if spec is None:
            raise ValueError(
                f"there is no table {name!r} on the servers {', '.join(self.addresses)}"
            )
        return spec

    def _write(
        self,
        table: str,
        kind: pb.WriteHeader.Kind,
        ids: Tensor,
        rows: Tensor | None = None,
        initial: InitialRows | None = None,
    ) -> tuple[int, Tensor | None]:
        """Makes a write on each server that stores an id.

        Returns:
            The number of deleted rows, and the positions of the ids whose server
            requires initial rows, (n,) int64, or None if no server does.
        """
        if rows is None:  # of a delete
            rows = ids.new_empty(len(ids), 0)
        values = rows.detach().contiguous()
        calls = self._parts([table], ids, [len(ids)], [values.view(torch.uint8)])
        initial_calls: dict[Connection, TableRows] = {}
        if initial is not None:
            new_ids, new_rows = initial
            content = new_rows.detach().contiguous().view(torch.uint8)
            initial_calls = self._parts([table], new_ids, [len(new_ids)], [content])

        def write(connection: Connection) -> int | None:
            try:
                return connection.write(
                    kind,
                    calls[connection],
                    initial=initial_calls.get(connection),
                    float32=values.dtype is torch.float32,
                )
            except NoInitialRow:
                return None

        counts = self._each(write)
        if None not in counts:
            return sum(count or 0 for count in counts), None
        refused = [
            torch.arange(len(ids)) if call.places is None else call.places
            for call, count in zip(calls.values(), counts, strict=True)
            if count is None
        ]
        return 0, torch.cat(refused)

    def _split(
        self, tables: Sequence[str], ids: Tensor, counts: Sequence[int]
    ) -> dict[Connection, _ServerIds]:
        """Returns the ids of each server."""
        self._epoch.label(tables[0])  # without an epoch, the owners are not known
        ids_by_server, places, counts_by_server = row_ops.ids_split(
            ids, counts, self._owners, len(self._connections)
        )
        sizes = counts_by_server.sum(1).tolist()
        parts = map(
            _ServerIds,
            torch.split(ids_by_server, sizes),
            torch.split(places, sizes),
            counts_by_server.tolist(),
        )
        return dict(zip(self._connections, parts, strict=True))

    def _parts(
        self,
        tables: Sequence[str],
        ids: Tensor,
        counts: Sequence[int],
        rows: Sequence[Tensor],
        **settings: Any,
    ) -> dict[Connection, TableRows]:
        """Returns the call of each server. See :class:`TableRows` for the arguments."""
        if len(self._connections) == 1:
            call = TableRows(tables, ids, counts, rows, **settings)
            return {self._connections[0]: call}
        calls = {}
        for connection, part in self._split(tables, ids, counts).items():
            calls[connection] = TableRows(
                tables,
                ids=part.ids,
                counts=part.counts,
                rows=rows,
                places=part.places,
                **settings,
            )
        return calls

    def _read(self, table: str, call: Callable[[Connection], _Result]) -> list[_Result]:
        """Calls all servers in one epoch.

        If another epoch begins meanwhile, all servers are called again.
        """
        while True:
            label = self._epoch.label(table)
            answers = self._each(call)
            if self._epoch.label(table) == label:
                return answers

    def _each(
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


def _table_stats(counts: Mapping[str, int]) -> TableStats:
    """Returns the statistics of a reply, which may have more than this release knows."""
    return TableStats(
        **{field.name: counts[field.name] for field in fields(TableStats)}
    )


def _split_for_calls(rows: Tensor, row_bytes: int) -> Sequence[Tensor]:
    """Returns parts of a tensor that a server writes in one call each.

    An id and its row have ``row_bytes`` bytes.
    """
    row_count = WRITE_BYTES // max(BYTES_A_WRITTEN_ID, row_bytes)
    return torch.split(rows, max(1, row_count))


def _write_file(connection: Connection, piece: pb.WriteFileRequest) -> None:
    connection.write_file(piece)


def _close(
    connections: Sequence[Connection], threads: ThreadPoolExecutor, process: int
) -> None:
    # in a forked process, connections and threads belong to the parent
    if os.getpid() != process:
        return
    for connection in connections:
        connection.close()
    threads.shutdown(wait=False)
