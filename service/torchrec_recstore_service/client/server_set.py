"""Tables on parameter servers, among which ids are distributed by a hash.

Tests: tests/service/test_three_servers.py and test_server.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.row_types import value_dtype
from torchrec_recstore.store import TableStats
from torchrec_recstore.store.table_state import combined
from torchrec_recstore_service.client.connection import Connection
from torchrec_recstore_service.client.server_epochs import ServerEpochs
from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire import row_ops
from torchrec_recstore_service.wire.access import Access
from torchrec_recstore_service.wire.protocol import (
    BYTES_A_WRITTEN_ID,
    WRITE_BYTES,
    NoInitialRow,
)
from torchrec_recstore_service.wire.row_requests import InitialRows, RowRead, RowUpdate
from torchrec_recstore_service.wire.table_rows import TableRows, places_of_tables
from torchrec_recstore_service.wire.table_spec import TableSpec

# of an update of several tables, unless one of them is larger
_UPDATE_BYTES = WRITE_BYTES // 2


class _ServerIds(NamedTuple):
    """The ids of a call that one server stores."""

    ids: Tensor
    """(n,) int64."""
    places: Tensor
    """(n,) int64. Their positions in the call, ascending."""
    counts: list[int]
    """Their number in each table of the call."""


class ServerSet(ServerEpochs):
    """The tables of a set of servers, among which their rows are distributed.

    The methods that :class:`HostedTables` has too mean the same. A call goes to all
    servers that store a part of its rows, at the same time. If the call fails on one
    server, other servers may have done their part.

    See :class:`ServerEpochs` for the arguments and the errors.
    """

    def __init__(self, addresses: Sequence[str], access: Access) -> None:
        super().__init__(addresses, access)
        self._specs: dict[str, TableSpec] = {}

    def spec(self, name: str) -> TableSpec | None:
        """See :meth:`HostedTables.spec`.

        Raises:
            ValueError: Only some of the servers have the table, because :meth:`create`
                has failed in the middle; or the parts are those of another number of
                servers.
        """
        self._epoch.label(name)
        documents = self._call_all(
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

    def load(self, name: str | Path | None, exact: bool = False) -> None:
        """See :meth:`ServerEpochs.load`."""
        super().load(name, exact)
        self._specs.clear()

    def rows_addresses(self) -> list[str]:
        """Returns the address of the port for rows of each server.

        See :meth:`Connection.rows_address`.
        """
        return self._call_all(Connection.rows_address)

    def create(self, name: str, spec: TableSpec) -> None:
        """See :meth:`HostedTables.create`.

        ``spec.shard`` is the one of the whole table, (0, 1).
        """
        members = dict(zip(self._connections, self.members(name), strict=True))

        def create(connection: Connection) -> None:
            shard = (members[connection], len(members))
            connection.create(name, replace(spec, shard=shard).to_json())

        self._call_all(create)
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
        specs = []
        dtypes = []
        row_bytes = []
        for read in reads:
            spec = self._specs.get(read.table) or self._existing(read.table)
            dtype = value_dtype(spec.dtype)
            specs.append(spec)
            dtypes.append(dtype)
            row_bytes.append(spec.dim * dtype.itemsize)

        # the rows of all tables are in one piece of memory
        counts = [len(read.ids) for read in reads]
        begins, size = places_of_tables(row_bytes, counts)
        memory = row_ops.rows_empty(1, size)[0]
        rows = []
        for begin, count, width in zip(begins, counts, row_bytes, strict=True):
            end = begin + count * width
            rows.append(memory[begin:end].view(count, width))

        zeros = [read.missing == "zeros" for read in reads]
        ids = ops.concatenated([read.ids for read in reads])
        tables = [read.table for read in reads]
        calls = self._parts(tables, ids, counts, rows, zeros=zeros)
        self._read(tables[0], lambda connection: connection.pull(calls[connection]))

        numbers = []
        for content, spec, dtype in zip(rows, specs, dtypes, strict=True):
            numbers.append(content.view(dtype).view(-1, spec.dim))
        return numbers

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
        self._call_all(
            lambda connection: connection.write(kind, calls[connection], float32=True)
        )

    def exists(self, name: str, ids: Tensor) -> Tensor:
        """See :meth:`HostedTables.exists`."""
        has_row, _ = self._existing_rows(name, ids, 0)
        return has_row

    def found_rows(self, name: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`HostedTables.found_rows`."""
        spec = self._specs.get(name) or self._existing(name)
        dtype = value_dtype(spec.dtype)
        has_row, rows = self._existing_rows(name, ids, spec.dim * dtype.itemsize)
        return has_row, rows.view(dtype).view(-1, spec.dim)

    def _existing_rows(
        self,
        table: str,
        ids: Tensor,
        row_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        """Reads the rows of the ids that have one.

        See :meth:`Connection.existing_rows`; the arguments are the same.
        """
        if len(self._connections) == 1:
            return self._connections[0].existing_rows(table, ids, row_bytes)
        parts = self._split([table], ids, [len(ids)])
        answers = self._read(
            table,
            lambda connection: connection.existing_rows(
                table,
                parts[connection].ids,
                row_bytes,
            ),
        )
        has_row = torch.empty(len(ids), dtype=torch.bool)
        for part, (part_has_row, _) in zip(parts.values(), answers, strict=True):
            has_row[part.places] = part_has_row
        if row_bytes == 0:
            return has_row, torch.empty(0, 1, dtype=torch.uint8)
        place_of_row = has_row.cumsum(0) - 1
        rows = row_ops.rows_empty(int(has_row.sum()), row_bytes)
        for part, answer in zip(parts.values(), answers, strict=True):
            part_has_row, part_rows = answer
            positions = part.places[part_has_row]
            places = place_of_row[positions]
            row_ops.rows_put(
                [rows],
                places,
                [len(part_rows)],
                part_rows.view(-1),
                0,
            )
        return has_row, rows

    def push(self, name: str, ids: Tensor, values: Tensor) -> None:
        """See :meth:`HostedTables.push`."""
        row_bytes = ids.element_size() + values.shape[1] * values.element_size()
        parts_of_ids = _split_for_calls(ids, row_bytes)
        parts_of_rows = _split_for_calls(values, row_bytes)
        for part_ids, part_rows in zip(parts_of_ids, parts_of_rows, strict=True):
            self._write(
                name,
                pb.WriteHeader.PUSH,
                part_ids,
                part_rows,
            )

    def update(
        self,
        name: str,
        ids: Tensor,
        grads: Tensor,
        initial: InitialRows | None = None,
    ) -> None:
        """See :meth:`HostedTables.update`.

        Raises:
            NoInitialRow: Its ``pending`` has the positions of the ids of the servers
                that have refused the update.
        """
        _, refused = self._write(
            name,
            pb.WriteHeader.UPDATE,
            ids,
            grads,
            initial,
        )
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
        self,
        table: str,
        by: str,
        count: int,
        row: bytes = b"",
        but: int = 0,
    ) -> list[pb.LookReply]:
        """Returns what each server finds among all of its rows of a table.

        See ``LookRequest``.
        """
        return self._read(
            table,
            lambda connection: connection.look(table, by, count, row, but),
        )

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
        calls = self._parts(
            [table],
            ids,
            [len(ids)],
            [values.view(torch.uint8)],
        )
        initial_calls: dict[Connection, TableRows] = {}
        if initial is not None:
            new_ids, new_rows = initial
            content = new_rows.detach().contiguous().view(torch.uint8)
            initial_calls = self._parts(
                [table],
                new_ids,
                [len(new_ids)],
                [content],
            )

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

        counts = self._call_all(write)
        if None not in counts:
            return sum(count or 0 for count in counts), None
        refused = [
            torch.arange(len(ids)) if call.places is None else call.places
            for call, count in zip(calls.values(), counts, strict=True)
            if count is None
        ]
        return 0, torch.cat(refused)

    def _split(
        self,
        tables: Sequence[str],
        ids: Tensor,
        counts: Sequence[int],
    ) -> dict[Connection, _ServerIds]:
        """Returns the ids of each server."""
        self._epoch.label(tables[0])  # without an epoch, the owners are not known
        ids_by_server, places, counts_by_server = row_ops.ids_split(
            ids,
            counts,
            self._owners,
            len(self._connections),
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


def _table_stats(counts: Mapping[str, int]) -> TableStats:
    """Returns the statistics of a reply, which may have more than this release knows,
    and lack those of rows on a device, which a server does not have.
    """
    return TableStats(
        **{field.name: counts.get(field.name, 0) for field in fields(TableStats)}
    )


def _split_for_calls(rows: Tensor, row_bytes: int) -> Sequence[Tensor]:
    """Returns parts of a tensor that a server writes in one call each.

    An id and its row have ``row_bytes`` bytes.
    """
    row_count = WRITE_BYTES // max(BYTES_A_WRITTEN_ID, row_bytes)
    return torch.split(rows, max(1, row_count))
