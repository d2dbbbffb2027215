"""The plain client, which reads and writes named embedding tables in its own process or
on parameter servers.

Tests: tests/service/test_recstore_client.py.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchrec_recstore.checkpoint.warm_start import RowFunction, WarmStart
from torchrec_recstore.optim import Optimizer, RowWiseAdagrad
from torchrec_recstore.options import Servers, TableOptions
from torchrec_recstore.row_types import value_dtype
from torchrec_recstore.store import TableStats
from torchrec_recstore_service.client.background import Prefetches, Updates
from torchrec_recstore_service.client.call_arguments import (
    check_makers,
    checked_ids,
    checked_name,
    checked_offset,
    checked_rows,
    checked_shape,
)
from torchrec_recstore_service.client.remote_groups import (
    ClientTable,
    RemotePooledGroup,
    RemoteSequenceGroup,
)
from torchrec_recstore_service.tables.hosted import HostedTables
from torchrec_recstore_service.tables.initial_rows import InitFunc, RowByRow, WholeTable
from torchrec_recstore_service.wire.protocol import NoInitialRow
from torchrec_recstore_service.wire.row_requests import RowRead, RowUpdate
from torchrec_recstore_service.wire.table_spec import TableSpec

if TYPE_CHECKING:
    from torchrec_recstore_service.client.server_set import ServerSet

# of an update whose rows are deleted by other clients before the update is carried out
_ATTEMPTS = 10
_THREADS = 4  # prefetches that run at the same time; further prefetches wait
# prefetches of several tables that run at the same time: of this batch and of the next
# one
_GROUP_THREADS = 2

_clients: weakref.WeakValueDictionary[int, PlainClient] = weakref.WeakValueDictionary()
_of_servers: weakref.WeakValueDictionary[Servers, PlainClient] = (
    weakref.WeakValueDictionary()
)
_handles = itertools.count(1)
_Self = TypeVar("_Self", bound="PlainClient")


class ReadRows(NamedTuple):
    """The rows of a read that are there."""

    has_row: Tensor | None
    """(N,) bool. Which ids have a row. None: all of them."""
    rows: Tensor
    """(n, dim). The rows of these ids, in order."""


class TableRead(NamedTuple):
    """A read of one table, for a thread."""

    table: str
    ids: Tensor
    read: Callable[[], ReadRows]
    positions: Tensor | None
    """(N,) int64. The positions of the ids in the call, or None for all, in order."""


class _Prefetched(NamedTuple):
    request: TableRead
    result: ReadRows


def _maker_of(
    name: str,
    spec: TableSpec,
    ids: range,
    init_func: InitFunc | None,
    row_func: InitFunc | None,
) -> WholeTable | RowByRow | None:
    """Returns what makes the initial rows of a table from a function of the user."""
    if init_func is not None:
        return WholeTable(
            init_func,
            name=name,
            seed=spec.options.seed,
            ids=ids,
            dim=spec.dim,
            dtype=value_dtype(spec.dtype),
        )
    if row_func is not None:
        return RowByRow(
            row_func,
            name=name,
            seed=spec.options.seed,
            dim=spec.dim,
            dtype=value_dtype(spec.dtype),
        )
    return None


class PlainClient:
    """A client of named embedding tables, which are in this process or on parameter
    servers: :class:`RecStoreClient` without what exists for programs that were written
    for RecStore.

    Each client without servers has tables of its own. See :class:`RecStoreClient` for
    the arguments, and for what all methods raise.
    """

    def __init__(
        self,
        servers: Sequence[str] | None = None,
        *,
        token: str | None = None,
        tls_ca: str | Path | None = None,
        tls_cert: str | Path | None = None,
        tls_key: str | Path | None = None,
        timeout_s: float = 30.0,
        shared_memory: bool = True,
    ) -> None:
        self._access = {
            "token": token,
            "tls_ca": tls_ca,
            "tls_cert": tls_cert,
            "tls_key": tls_key,
            "timeout_s": timeout_s,
            "shared_memory": shared_memory,
        }
        self._tables: HostedTables | ServerSet
        if servers is None:
            self._tables = _tables_here(token, tls_ca, tls_cert, tls_key)
            self._servers = None
        else:
            self._tables = tables_on_servers(servers, self._access)
            self._servers = list(servers)
        self._closed = False
        self._process = os.getpid()
        self._specs: dict[str, TableSpec] = {}
        # of tables with an init_func or a row_func
        self._makers: dict[str, WholeTable | RowByRow] = {}
        self._prefetches: Prefetches[list[_Prefetched]] = Prefetches(_THREADS)
        self._updates = Updates()
        self._groups: Prefetches[list[Tensor]] = Prefetches(_GROUP_THREADS)
        self.handle = next(_handles)
        """The number that identifies this client in the
        ``torch.ops.recstore_ops.emb_*`` ops.
        """
        _clients[self.handle] = self

    def init_data(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        *,
        init_func: InitFunc | None = None,
        base_offset: int = 0,
        row_func: InitFunc | None = None,
        optimizer: Optimizer = RowWiseAdagrad(lr=0.01),  # noqa: B008  (frozen)
        options: TableOptions = TableOptions(),  # noqa: B008  (frozen)
    ) -> None:
        """Creates a table without rows. See :meth:`RecStoreClient.init_data`."""
        tables = self._open()
        rows, dim = checked_shape(checked_name(name), shape)
        ids = checked_offset(name, base_offset, rows)
        if not isinstance(options, TableOptions):
            raise TypeError(
                f"table {name!r}: options must be TableOptions, got"
                f" {type(options).__name__}"
            )
        if options.frozen:
            raise ValueError(
                f"table {name!r}: TableOptions.frozen is an option of the model that"
                " reads the table, and not of the table of a client: leave it out"
            )
        if options.expected_rows is None:
            options = replace(options, expected_rows=rows)
        check_makers(name, init_func, row_func, options)
        spec = TableSpec(
            dim=dim,
            dtype=dtype,
            optimizer=optimizer,
            options=options,
        )
        maker = _maker_of(name, spec, ids, init_func, row_func)
        if maker is not None:
            spec = replace(spec, initial_rows=maker.digest)
        tables.create(name, spec)
        self._specs[name] = spec
        if maker is not None:
            self._makers[name] = maker

    def pull(self, name: str, ids: Tensor) -> Tensor:
        """Reads rows.

        Args:
            name: The name of the table.
            ids: (N,) of integers. The ids whose rows are read. Duplicates are allowed.

        Returns:
            (N, dim) in the table's dtype.
        """
        tables = self._open()
        spec = self.spec(name)
        ids = checked_ids(name, ids)
        if not spec.initial_rows:
            return tables.pull(name, ids)
        result = ReadRows(*tables.found_rows(name, ids))
        return self._with_initial_rows(name, ids, result)

    def push(self, name: str, ids: Tensor, values: Tensor) -> None:
        """Writes rows.

        New rows start with zero optimizer state; existing rows keep their optimizer
        state.

        Args:
            name: The name of the table.
            ids: (N,) of integers. The ids whose rows are written. If an id occurs
                several times, its last row is written.
            values: (N, dim). The weights, which are cast to float32 unless they have
                the table's dtype.
        """
        tables = self._open()
        spec = self.spec(name)
        ids = checked_ids(name, ids)
        rows = checked_rows(name, "values", values, ids, spec)
        tables.push(name, ids, rows)

    def update(
        self,
        name: str,
        ids: Tensor,
        grads: Tensor,
    ) -> None:
        """Applies the optimizer once to the row of each distinct id, with the sum of
        the id's gradients.

        The gradients are summed in the order of ``ids``. An id without a row first gets
        its initial row. One update is one step of the table's clock: LRU, LFU, expiry
        and ``options.admission`` count updates. The update of an id that
        ``options.admission`` does not admit yet is dropped.

        Args:
            name: The name of the table.
            ids: (N,) of integers. The ids whose rows are updated. Duplicates are
                allowed.
            grads: (N, dim). The gradients, which are cast to float32 unless they have
                the table's dtype.
        """
        tables = self._open()
        spec = self.spec(name)
        ids = checked_ids(name, ids)
        grads = checked_rows(name, "grads", grads, ids, spec)
        if spec.initial_rows:
            self._updates.wait_for_earlier()
            self._update(tables, spec, name, ids, grads)
        elif self._updates.pending:  # updates are carried out in the order of the calls
            self.wait(self._updates.start(lambda: tables.update(name, ids, grads)))
        else:
            tables.update(name, ids, grads)

    def update_async(
        self,
        name: str,
        ids: Tensor,
        grads: Tensor,
    ) -> int:
        """Starts an :meth:`update` in another thread.

        Updates are carried out in the order in which they were started.

        Args:
            name: The name of the table.
            ids: (N,) of integers. The ids whose rows are updated. The tensor may be
                changed after this call.
            grads: (N, dim). The gradients; see :meth:`update`. The tensor may be
                changed after this call.

        Returns:
            A handle for :meth:`wait`. Until then, a ``pull`` reads rows as they were
            before the update or as they are after it. ``save``, ``load`` and ``close``
            wait for all updates.
        """
        tables = self._open()
        spec = self.spec(name)
        ids = checked_ids(name, ids).clone()
        grads = checked_rows(name, "grads", grads, ids, spec).clone()
        # init_func is called in the caller's thread, because it seeds the default
        # generator
        if spec.initial_rows:
            self._raise_first(self._updates.wait_for_all())
            self._update(tables, spec, name, ids, grads)
            return self._updates.done()
        return self._updates.start(lambda: tables.update(name, ids, grads))

    def wait(self, handle: int) -> None:
        """Waits for an update of :meth:`update_async`, or raises its error.

        A second call does nothing.

        Raises:
            ValueError: The handle does not exist.
        """
        self._open()
        self._updates.wait(handle)

    def has_finished(self, handle: int) -> bool:
        """Returns whether an update of :meth:`update_each_async` has been carried out.

        It does not wait. False also if the update has failed; :meth:`wait` raises the
        error.

        Raises:
            ValueError: The handle does not exist.
        """
        self._open()
        return self._updates.has_finished(handle)

    def prefetch(self, name: str, ids: Tensor) -> int:
        """Starts a :meth:`pull` in another thread.

        Args:
            name: The name of the table.
            ids: (N,) of integers. The ids whose rows are read. The tensor may be
                changed after this call.

        Returns:
            A handle for :meth:`wait_for_prefetch`. A row that is written before that
            call is read either as it was before the write or as it is after the write.
        """
        copied_ids = ids.clone() if isinstance(ids, Tensor) else ids
        return self._prefetch([self._table_read(name, copied_ids)])

    def wait_for_prefetch(self, handle: int) -> Tensor:
        """Waits for a prefetch and returns its rows, (N, dim) in the table's dtype, or
        raises the error of its pull.

        Raises:
            ValueError: The handle does not exist, or its rows have already been
                fetched.
        """
        self._open()
        prefetched = self._prefetches.wait(handle)
        rows_of_tables = [
            self._with_initial_rows(request.table, request.ids, result)
            for request, result in prefetched
        ]
        first = rows_of_tables[0]
        if len(prefetched) == 1 and prefetched[0].request.positions is None:
            return first
        id_count = sum(map(len, rows_of_tables))
        all_rows = torch.empty(id_count, first.shape[1], dtype=first.dtype)
        for (request, _), rows in zip(prefetched, rows_of_tables, strict=True):
            assert request.positions is not None
            all_rows[request.positions] = rows.to(all_rows.dtype)
        return all_rows

    def pull_each(self, reads: Sequence[RowRead]) -> list[Tensor]:
        """Reads rows of several tables, by one request to each server.

        The servers answer at the same time.

        Args:
            reads: The tables and their ids.

        Returns:
            For each read, (N, dim) in the table's dtype.

        Raises:
            NoInitialRow: A table has an ``init_func``.
        """
        tables = self._open()
        self._check_no_init_func(reads)
        return tables.pull_each(reads)

    def prefetch_each(self, reads: Sequence[RowRead]) -> int:
        """Starts :meth:`pull_each` in another thread and returns a handle for
        :meth:`wait_for_each`.

        The ids must not change until then.
        """
        tables = self._open()
        self._check_no_init_func(reads)
        return self._groups.start(lambda: tables.pull_each(reads))

    def wait_for_each(self, handle: int) -> list[Tensor]:
        """Waits for :meth:`prefetch_each` and returns its rows, or raises its error.

        Raises:
            ValueError: The handle does not exist, or its rows have already been
                fetched.
        """
        self._open()
        return self._groups.wait(handle)

    def update_each(self, updates: Sequence[RowUpdate]) -> None:
        """Makes an ``update`` of each of several tables, by one request to each server.

        Each table makes one step of its clock and of its optimizer, also if its update
        has no ids. A server applies the updates of one request to all of its tables, or
        to none if one of them fails, and it applies a repeated request once. Updates of
        more than 64 MiB are sent as several requests.

        Raises:
            NoInitialRow: A table has an ``init_func``.
        """
        tables = self._open()
        self._check_no_init_func(updates)
        if self._updates.pending:  # updates are carried out in the order of the calls
            self._updates.wait(self._updates.start(lambda: tables.update_each(updates)))
        else:
            tables.update_each(updates)

    def update_each_async(self, updates: Sequence[RowUpdate]) -> int:
        """Starts :meth:`update_each` in another thread, after all earlier updates.

        The tensors must not change until then.

        Returns:
            A handle for ``wait``. ``save``, ``load`` and ``close`` wait for all
            updates.
        """
        tables = self._open()
        self._check_no_init_func(updates)
        return self._updates.start(lambda: tables.update_each(updates))

    def table(
        self,
        name: str,
        shape: tuple[int, int],
        dtype: torch.dtype,
        optimizer: Optimizer,
        options: TableOptions,
        staleness: int = 0,
    ) -> ClientTable:
        """Returns a table for groups, and creates it if it does not exist.

        See :class:`ClientTable`.
        """
        return ClientTable(
            self,
            name,
            shape,
            dtype=dtype,
            optimizer=optimizer,
            options=options,
            staleness=staleness,
        )

    def pooled_group(
        self,
        tables: Sequence[ClientTable],
        feature_tables: Sequence[int],
        pooling: Any,
    ) -> RemotePooledGroup:
        """Returns a group that pools rows of tables of this client."""
        return RemotePooledGroup(tables, feature_tables, pooling)

    def sequence_group(self, tables: Sequence[ClientTable]) -> RemoteSequenceGroup:
        """Returns a group that looks up rows of tables of this client."""
        return RemoteSequenceGroup(tables)

    def delete(self, name: str, ids: Tensor) -> int:
        """Deletes the rows of ``ids``, (N,) of integers, and returns their number."""
        tables = self._open()
        self.spec(name)  # raises an error for an unknown table
        return tables.delete(name, checked_ids(name, ids))

    def exists(self, name: str, ids: Tensor) -> Tensor:
        """Returns (N,) bool, True for the ``ids``, (N,) of integers, that have a row."""
        tables = self._open()
        self.spec(name)  # raises an error for an unknown table
        return tables.exists(name, checked_ids(name, ids))

    def stats(self, name: str) -> TableStats:
        """Returns the statistics of a table, summed over all servers."""
        tables = self._open()
        self.spec(name)  # raises an error for an unknown table
        return tables.stats(name)

    def spec(self, name: str) -> TableSpec:
        """Returns the specification that a table was created with."""
        spec = None
        if isinstance(name, str) and not self._closed:
            spec = self._specs.get(name)
        if spec is None:
            spec = self._open().spec(checked_name(name))
            if spec is None:
                raise ValueError(f"there is no table {name!r}: init_data makes one")
            self._specs[name] = spec
        return spec

    def rows_addresses(self) -> list[str]:
        """Returns where each server takes calls on rows by TCP: ``host:port``, or
        ``host:port/host:port`` for a pair.

        Raises:
            ValueError: The tables are in this process, or a server takes no such calls.
        """
        tables = self._open()
        if isinstance(tables, HostedTables):
            raise ValueError(
                "the tables of the client are in this process, not on servers"
            )
        return tables.rows_addresses()

    @property
    def is_encrypted(self) -> bool:
        """Whether connections to the servers are encrypted."""
        return self._access["tls_ca"] is not None

    def dtypes(self) -> set[torch.dtype]:
        """Returns the dtypes of the rows of the tables that this client has used."""
        return {value_dtype(spec.dtype) for spec in self._specs.values()}

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Saves all tables in the format of ``save_checkpoint``.

        The tables can be used during the save.

        Args:
            path: The path of a directory. With servers: a name below the data directory
                of each server.
            overwrite: Whether a checkpoint at ``path`` is replaced. The replacement is
                atomic. Default: False.

        Raises:
            FileExistsError: ``path`` exists.
            OSError: A file cannot be written. Nothing new is left at ``path``. With
                several servers, some servers may have saved when one of them fails:
                repeat the save with ``overwrite=True``.
        """
        tables = self._open()
        self._raise_first(self._updates.wait_for_all())
        tables.save(path, overwrite)

    def load(
        self,
        path: str | Path,
        *,
        optimizer: bool = True,
        tables: Iterable[str] | None = None,
        rename: Mapping[str, str] | None = None,
        rows: Mapping[str, RowFunction] | None = None,
    ) -> None:
        """Replaces all tables by the tables of a checkpoint of :meth:`save` or
        ``save_checkpoint``.

        The learning rates and bounds of the tables are not changed. The last four
        arguments make a warm start, in a client without servers only. See
        docs/service.md for the way to servers.

        Args:
            path: The path of the checkpoint. See :meth:`save`.
            optimizer: Whether the optimizer states are loaded. See
                :func:`torchrec_recstore.load_checkpoint`. Default: True.
            tables: The names of the tables that are loaded. All other tables stay as
                they are. Default: None, which means all tables.
            rename: The names of tables here by their names in the checkpoint. Default:
                None.
            rows: Functions that make the rows of tables that exist, by the names of the
                tables here. See :func:`torchrec_recstore.load_checkpoint`. Default:
                None.

        Raises:
            FileNotFoundError: The checkpoint does not exist.
            TypeError: An argument is of another type.
            ValueError: A file is missing or damaged (``CheckpointError``), or a table
                is not in the checkpoint or has another specification there; a name is
                unknown; or there is a warm start and the tables are on servers. Nothing
                has changed. With several servers, some servers may have loaded when one
                of them fails.
        """
        warm = WarmStart.checked(optimizer, tables, rename, rows)
        opened = self._open()
        self._raise_first(self._updates.wait_for_all())
        if isinstance(opened, HostedTables):
            opened.load(path, warm)
        elif warm == WarmStart():
            opened.load(path)
        else:
            raise ValueError(
                "load: optimizer, tables, rename and rows need a client without"
                " servers. Servers replace all of their tables by those of a save. To"
                " take over a part of a checkpoint, load it with load_checkpoint into a"
                " module without sharding, and write the rows of its table to the"
                " servers with push(table, ids, rows)"
            )
        self._specs.clear()

    def close(self) -> None:
        """Waits for all updates, and frees the tables or closes the connections.

        It may be called twice.

        An update that has failed and that nobody has waited for gives a warning.
        """
        self._closed = True
        # a forked process must not close the tables of its parent
        if os.getpid() == self._process:
            self._updates.warn_of_errors()
            self._prefetches.close()
            self._groups.close()
            self._tables.close()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> str:
        raise TypeError(
            "a RecStoreClient cannot be copied or pickled: make one in each process"
        )

    def __repr__(self) -> str:
        return f"RecStoreClient({'' if self._servers is None else self._servers})"

    def _open(self) -> HostedTables | ServerSet:
        if self._closed:
            raise ValueError(f"{self!r} is closed")
        # a forked process has neither the threads nor usable locks
        if os.getpid() != self._process:
            raise ValueError(
                f"{self!r}: the client was made in another process; make one in each"
            )
        return self._tables

    def _check_no_init_func(
        self, calls: Sequence[RowRead] | Sequence[RowUpdate]
    ) -> None:
        for call in calls:
            if self.spec(call.table).initial_rows:
                raise NoInitialRow(call.table)

    def _raise_first(self, errors: list[Exception]) -> None:
        if errors:
            raise errors[0]

    def _table_read(
        self,
        name: str,
        ids: object,
        positions: Tensor | None = None,
    ) -> TableRead:
        """Checks ``ids`` and returns a read of their rows, for any thread."""
        tables = self._open()
        spec = self.spec(name)
        row_ids = checked_ids(name, ids)

        def found_rows() -> ReadRows:
            return ReadRows(*tables.found_rows(name, row_ids))

        def pulled_rows() -> ReadRows:
            return ReadRows(None, tables.pull(name, row_ids))

        read = found_rows if spec.initial_rows else pulled_rows
        return TableRead(
            table=name,
            ids=row_ids,
            read=read,
            positions=positions,
        )

    def _prefetch(self, reads: Sequence[TableRead]) -> int:
        """Starts reads in another thread, and returns their handle."""
        return self._prefetches.start(
            lambda: [_Prefetched(request, request.read()) for request in reads]
        )

    def _with_initial_rows(
        self,
        name: str,
        ids: Tensor,
        result: ReadRows,
    ) -> Tensor:
        """Returns (N, dim): the rows that were read, and initial rows for the ids
        without a row.

        The initial rows are made in the caller's thread, because making them seeds
        torch's default generator.
        """
        has_row, rows = result
        if has_row is None or bool(has_row.all()):
            return rows
        new_ids, places = torch.unique(ids[~has_row], return_inverse=True)
        new_rows = self._maker(name, self.spec(name)).rows(new_ids)
        all_rows = rows.new_empty(len(ids), rows.shape[1])
        all_rows[has_row] = rows
        all_rows[~has_row] = new_rows[places]
        return all_rows

    def _update(
        self,
        tables: HostedTables | ServerSet,
        spec: TableSpec,
        name: str,
        ids: Tensor,
        grads: Tensor,
    ) -> None:
        """Updates rows of a table with a function of initial rows, and sends those of
        the ids without a row.

        It must be called in the thread of the user, because making initial rows seeds
        torch's default generator.
        """
        for attempt in range(_ATTEMPTS):
            # After a refused attempt, initial rows are sent for all ids that have one:
            # the next attempt lacks none.
            missing = ~tables.exists(name, ids)
            if attempt:
                missing |= self._maker(name, spec).makes(ids)
            missing = torch.unique(ids[missing])
            initial = None
            if len(missing):
                initial = (missing, self._maker(name, spec).rows(missing).float())
            try:
                tables.update(name, ids, grads, initial)
                return
            except NoInitialRow as error:  # a row was deleted between exists and update
                if error.pending is None or attempt + 1 == _ATTEMPTS:
                    raise
                ids = ids[error.pending]
                grads = grads[error.pending]

    def _maker(self, name: str, spec: TableSpec) -> WholeTable | RowByRow:
        maker = self._makers.get(name)
        if maker is None or maker.digest != spec.initial_rows:
            raise NoInitialRow(name)
        return maker


def client_of_servers(servers: Servers) -> PlainClient:
    """Returns the client of servers.

    All tables of this process with equal :class:`Servers` have the same client.

    Raises:
        ValueError, OSError: The access to the servers is invalid.
    """
    client = _of_servers.get(servers)
    if client is None:
        client = PlainClient(
            servers.addresses,
            token=servers.token,
            tls_ca=servers.tls_ca,
            tls_cert=servers.tls_cert,
            tls_key=servers.tls_key,
            timeout_s=servers.timeout_s,
        )
        _of_servers[servers] = client
    return client


def client_of(handle: int) -> PlainClient:
    """Returns the client with the given handle.

    Raises:
        ValueError: No client with this handle exists.
    """
    client = _clients.get(handle)
    if client is None:
        raise ValueError(f"there is no RecStoreClient with the handle {handle}")
    return client


def _tables_here(*access_to_servers: object) -> HostedTables:
    if any(argument is not None for argument in access_to_servers):
        raise ValueError(
            "token, tls_ca, tls_cert and tls_key are for servers, and none are given"
        )
    return HostedTables()


def tables_on_servers(servers: Sequence[str], access: dict[str, Any]) -> ServerSet:
    """Connects to servers. ``access`` has the fields of :class:`Access`."""
    from torchrec_recstore_service.client.server_set import ServerSet
    from torchrec_recstore_service.wire.access import Access

    return ServerSet(servers, Access(**access))
