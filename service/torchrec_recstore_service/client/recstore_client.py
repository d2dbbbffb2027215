"""The client, which reads and writes named embedding tables in its own process or on
parameter servers.
"""

from __future__ import annotations

import inspect
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor

from torchrec_recstore.checkpoint.warm_start import RowFunction, WarmStart
from torchrec_recstore.optim import Optimizer, RowWiseAdagrad
from torchrec_recstore.options import Servers, TableOptions
from torchrec_recstore.row_types import value_dtype
from torchrec_recstore.store import TableStats
from torchrec_recstore.utils import warn_user
from torchrec_recstore_service.client.background import Prefetches, Updates
from torchrec_recstore_service.client.call_arguments import (
    checked_ids,
    checked_init_func,
    checked_name,
    checked_offset,
    checked_rows,
    checked_shape,
    split_by_range,
)
from torchrec_recstore_service.client.remote_kernels import (
    ClientTable,
    RemotePooledKernel,
    RemoteSequenceKernel,
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

# (N,) bool, which ids have a row, or None for all; and the rows of these ids
_Read = tuple[Tensor | None, Tensor]
# table, ids, read, positions of ids in the call
_Part = tuple[str, Tensor, Callable[[], _Read], Tensor | None]

_clients: weakref.WeakValueDictionary[int, RecStoreClient] = (
    weakref.WeakValueDictionary()
)
_of_servers: weakref.WeakValueDictionary[Servers, RecStoreClient] = (
    weakref.WeakValueDictionary()
)
_handles = itertools.count(1)
_of_process: list[RecStoreClient] = []  # none, or the client of the process
_making = threading.Lock()  # held while the client of the process is made
os.register_at_fork(after_in_child=lambda: _of_process.clear())
os.register_at_fork(
    before=_making.acquire,
    after_in_parent=_making.release,
    after_in_child=_making.release,
)


class _OneOfProcess(type):
    """Returns the client of the process for a call without servers.

    RecStore's programs make it in many places.
    """

    def __call__(cls, servers: Sequence[str] | None = None, **arguments: Any) -> Any:
        if servers is not None or arguments.get("private"):
            return super().__call__(servers, **arguments)
        with _making:
            if not _of_process:
                _of_process.append(super().__call__(servers, **arguments))
            else:
                _of_process[0]._check_same(**arguments)
            return _of_process[0]


class RecStoreClient(metaclass=_OneOfProcess):
    """A client of named embedding tables, which are in this process or on parameter
    servers.

    All calls of ``RecStoreClient()`` without servers return the same client, until it
    is closed. A call with servers makes a client of its own each time.

    A table takes any int64 id. Rows are created when they are written or updated.
    ``pull`` creates no rows: an id without a row reads as its initial row. Methods may
    be called from any thread. Arguments are checked before anything is sent, and an
    invalid argument changes nothing. The client is also a context manager.

    Args:
        servers: The address of each server, as ``host:port``, in any order. Ids are
            distributed over the servers by hash. The first client of new servers makes
            them a set. Default: None, the tables are in this process.
        private: Whether a client without servers has tables of its own, which no other
            client of this process sees. Default: False, it is the client of the
            process.
        library_path: Has no effect, and a warning says so: the package contains its
            library. It is accepted for programs that were written for RecStore.
            Default: None.
        role: Has no effect, and a warning says so. It is accepted for programs that
            were written for RecStore. Default: "default".
        token: The token of the servers, if they require one.
        tls_ca: The path of a PEM file with the CA certificates that sign the servers'
            certificates. Connections are encrypted if it is given.
        tls_cert: The path of a PEM file with this client's certificate, if the servers
            require one.
        tls_key: The path of a PEM file with the private key of ``tls_cert``.
        timeout_s: The longest time in seconds that a call may take. Saves and loads
            have no limit. Default: 30.
        shared_memory: Whether rows travel by shared memory to servers on this host that
            run as the same user. Default: True.

    Raises:
        TypeError, ValueError: An argument is invalid. All methods raise these errors
            too, for invalid arguments, for a table that does not exist and after
            :meth:`close`. The message names the argument and the table.
        ImportError: ``servers`` is given and grpcio is not installed.
        ServiceError: A server cannot be reached, or refuses a call. All methods that
            call a server raise it.
        MemoryError: There is not enough memory for the rows.

    Example::

        client = RecStoreClient()
        client.init_data("user", (1_000_000, 64))
        ids = torch.tensor([7, -1])
        rows = client.pull("user", ids)  # (2, 64)
        client.update("user", ids, torch.ones(2, 64))
    """

    # of __init__, because the metaclass hides it
    __signature__: ClassVar[inspect.Signature]

    def __init__(
        self,
        servers: Sequence[str] | None = None,
        *,
        private: bool = False,
        library_path: str | Path | None = None,
        role: str = "default",
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
        self._tables = (
            _here(token, tls_ca, tls_cert, tls_key)
            if servers is None
            else _on_servers(servers, self._access)
        )
        self._servers = None if servers is None else list(servers)
        self._closed = False
        self._process = os.getpid()
        self._specs: dict[str, TableSpec] = {}
        # of tables with an init_func or a row_func
        self._makers: dict[str, WholeTable | RowByRow] = {}
        # the ids that init_data has named, by table
        self._ranges: dict[str, range] = {}
        self._said: set[str] = set()
        self._prefetches: Prefetches[list[tuple[str, Tensor, _Read, Tensor | None]]] = (
            Prefetches(_THREADS)
        )
        self._updates = Updates()
        self._groups: Prefetches[list[Tensor]] = Prefetches(_GROUP_THREADS)
        self.handle = next(_handles)
        """The number that identifies this client in the
        ``torch.ops.recstore_ops.emb_*`` ops.
        """
        _clients[self.handle] = self
        self._warn_of(library_path, role)

    def init_data(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        part_policy: object = None,
        init_func: InitFunc | None = None,
        is_gdata: bool = True,
        base_offset: int = 0,
        initialize_values: bool = True,
        *,
        row_func: InitFunc | None = None,
        optimizer: Optimizer = RowWiseAdagrad(lr=0.01),  # noqa: B008  (frozen)
        options: TableOptions = TableOptions(),  # noqa: B008  (frozen)
    ) -> None:
        """Creates a table without rows.

        A table that was created with the same arguments is not changed.

        Without ``init_func`` and ``row_func``, the initializer of ``options`` makes the
        initial rows of all ids.

        Args:
            name: The name of the table. The name and ``options.seed`` determine the
                initial rows.
            shape: (rows, dim). ``rows`` is not a limit: it is the value of
                ``options.expected_rows`` if that is None.
            dtype: The dtype of the weights: ``torch.float32``, ``float16``,
                ``bfloat16`` or ``int8``. Rows of an ``int8`` table are read and written
                as float32. Default: ``float32``.
            part_policy: Has no effect, and a warning says so: ids are distributed over
                the servers by hash. A function in its place is ``init_func``. Default:
                None.
            init_func: A function ``(shape, dtype) -> tensor`` that makes the initial
                rows of the ids from ``base_offset`` to ``base_offset + rows - 1``. It
                is called once, with the whole shape, and this client keeps the rows, at
                most 4 GiB. Other ids have no initial row. Default: None.
            is_gdata: Has no effect, and a warning says so if it is False. Default:
                True.
            base_offset: The first id of the table, for ``init_func`` and for
                ``prefetch(ids)`` without a table's name: the ids from ``base_offset``
                to ``base_offset + rows - 1`` are then the table's. It changes no id.
                Default: 0.
            initialize_values: If False, ``init_func`` is not called, and a warning says
                so. Default: True.
            row_func: A function ``(shape, dtype) -> tensor`` that makes the initial row
                of any id. This client calls it with ``(1, dim)`` when the row of an id
                is needed for the first time; torch's default generator is then seeded
                for the id. Default: None.
            optimizer: The optimizer that :meth:`update` applies.
            options: The options of the table. ``cold_store`` must be None. ``max_rows``
                counts the rows of all servers. Each :meth:`update` is one step.

        Raises:
            ValueError: The table exists and was created with other arguments. The
                message names the difference.
        """
        tables = self._open()
        rows, dim = checked_shape(checked_name(name), shape)
        ids = checked_offset(name, base_offset, rows, is_gdata)
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
        part_policy, init_func = checked_init_func(
            name, part_policy, init_func, row_func, options
        )
        spec = TableSpec(dim, dtype, optimizer, options)
        if init_func is not None and not initialize_values:
            warn_user(
                "init_func of init_data has no effect with initialize_values=False:"
                " options.initializer applies"
            )
            init_func = None
        maker: WholeTable | RowByRow | None = None
        if init_func is not None:
            maker = WholeTable(
                init_func, name, options.seed, ids, dim, value_dtype(dtype)
            )
        elif row_func is not None:
            maker = RowByRow(row_func, name, options.seed, dim, value_dtype(dtype))
        if maker is not None:
            spec = replace(spec, initial_rows=maker.digest)
        tables.create(name, spec)
        self._specs[name], self._ranges[name] = spec, ids
        if part_policy is not None and self._first("part_policy"):
            warn_user(
                "part_policy of init_data has no effect: a hash of the id selects its"
                " server"
            )
        if not is_gdata and self._first("is_gdata"):
            warn_user("is_gdata of init_data has no effect: there is no graph")
        if maker is not None:
            self._makers[name] = maker

    def data_name_list(self) -> list[str]:
        """Returns the names of the tables that :meth:`init_data` of this client has
        made or found.
        """
        return list(self._ranges)

    def get_data_meta(self, name: str) -> tuple[torch.dtype, tuple[int, int]]:
        """Returns the dtype of the weights of a table, and (rows, dim), where ``rows``
        is ``options.expected_rows``.
        """
        spec = self.spec(name)
        return spec.dtype, (spec.options.expected_rows or 0, spec.dim)

    def pull(self, name: str, ids: Tensor) -> Tensor:
        """Reads rows.

        Args:
            name: The name of the table.
            ids: (N,) of integers. The ids whose rows are read. Duplicates are allowed.

        Returns:
            (N, dim) in the table's dtype.
        """
        tables, spec, ids = self._open(), self.spec(name), checked_ids(name, ids)
        if not spec.initial_rows:
            return tables.pull(name, ids)
        return self._whole(name, ids, tables.found_rows(name, ids))

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
        tables, spec = self._open(), self.spec(name)
        ids = checked_ids(name, ids)
        tables.push(name, ids, checked_rows(name, "values", values, ids, spec))

    def update(self, name: str, ids: Tensor, grads: Tensor) -> None:
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
        tables, spec = self._open(), self.spec(name)
        ids = checked_ids(name, ids)
        grads = checked_rows(name, "grads", grads, ids, spec)
        if spec.initial_rows:
            self._updates.wait_for_earlier()
            self._update(tables, spec, name, ids, grads)
        elif self._updates.pending:  # updates are carried out in the order of the calls
            self.wait(self._updates.start(lambda: tables.update(name, ids, grads)))
        else:
            tables.update(name, ids, grads)

    def update_async(self, name: str, ids: Tensor, grads: Tensor) -> int:
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
        tables, spec = self._open(), self.spec(name)
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

    def prefetch(self, ids: Tensor | str, name: str | Tensor | None = None) -> int:
        """Starts a :meth:`pull` in another thread.

        The two arguments may have either order, as their types tell.

        ``prefetch(ids)`` without a name reads each id from the table that has it: the
        client's only table, or the table whose ids ``init_data`` has named by
        ``base_offset`` and ``shape``.

        Args:
            ids: (N,) of integers. The ids whose rows are read. The tensor may be
                changed after this call.
            name: The name of the table. Default: None.

        Returns:
            A handle for :meth:`wait_for_prefetch` or :meth:`wait_and_get`. A row that
            is written before that call is read either as it was before the write or as
            it is after the write.

        Raises:
            ValueError: There is no name, and an id belongs to no table, to two tables
                or to a table of another dim than the other ids.
        """
        if not isinstance(ids, Tensor) and (
            isinstance(ids, str) or isinstance(name, Tensor)
        ):
            ids, name = name, ids  # type: ignore[assignment]
        if isinstance(ids, Tensor) and isinstance(name, Tensor):
            raise TypeError("prefetch takes ids, or ids and the name of a table")
        # _reading checks them
        table, wanted = cast(str | None, name), cast(Tensor, ids)
        if table is None:
            parts = self._parts_by_range(wanted)
        else:
            copied, read = self._reading(
                table, wanted.clone() if isinstance(wanted, Tensor) else wanted
            )
            parts = [(table, copied, read, None)]
        return self._prefetches.start(
            lambda: [(table, some, read(), place) for table, some, read, place in parts]
        )

    def wait_for_prefetch(self, handle: int) -> Tensor:
        """Waits for a prefetch and returns its rows, (N, dim) in the table's dtype, or
        raises the error of its pull.

        Raises:
            ValueError: The handle does not exist, or its rows have already been
                fetched.
        """
        self._open()
        parts = [
            (place, self._whole(name, ids, read))
            for name, ids, read, place in self._prefetches.wait(handle)
        ]
        if len(parts) == 1 and parts[0][0] is None:
            return parts[0][1]
        whole = torch.empty(
            sum(len(rows) for _, rows in parts),
            parts[0][1].shape[1],
            dtype=parts[0][1].dtype,
        )
        for place, rows in parts:
            assert place is not None
            whole[place] = rows.to(whole.dtype)
        return whole

    def wait_and_get(
        self,
        handle: int,
        embedding_dim: int,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Waits for a prefetch and returns its rows on a device.

        See :meth:`wait_for_prefetch`.

        Args:
            handle: The handle of the prefetch.
            embedding_dim: The number of columns of the rows.
            device: The device of the result. Default: the CPU.

        Raises:
            ValueError: The rows have another number of columns. They have then been
                fetched.
        """
        rows = self.wait_for_prefetch(handle)
        if rows.shape[1] != embedding_dim:
            raise ValueError(
                f"embedding_dim is {embedding_dim}, but the rows of the prefetch have"
                f" {rows.shape[1]} columns"
            )
        return rows.to(device)

    def set_ps_config(self, host: str, port: int) -> None:
        """Connects the client to one server, ``host:port``, with the token and the
        certificates of the constructor.

        Raises:
            ValueError: The client has used tables already, which are on its present
                servers or in this process.
        """
        self._open()
        address = f"{host}:{int(port)}"
        if self._servers == [address]:
            return
        if self._specs:
            raise ValueError(
                f"{self!r} has tables already"
                f" ({', '.join(map(repr, sorted(self._specs)))}): call set_ps_config"
                " before init_data, or make another client,"
                f" RecStoreClient([{address!r}])"
            )
        tables = _on_servers([address], self._access)
        self._tables.close()
        self._tables, self._servers = tables, [address]

    def set_ps_backend(self, backend: str) -> None:
        """Has no effect, and a warning says so: the client selects the transport
        itself.

        Raises:
            TypeError: ``backend`` is not a str.
        """
        if not isinstance(backend, str):
            raise TypeError(f"backend must be a str, got {type(backend).__name__}")
        if self._first(f"set_ps_backend {backend}"):
            warn_user(
                f"set_ps_backend({backend!r}) has no effect: the client selects the"
                " transport itself"
            )

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
        """Returns a table for kernels, and creates it if it does not exist.

        See :class:`ClientTable`.
        """
        return ClientTable(self, name, shape, dtype, optimizer, options, staleness)

    def pooled_kernel(
        self, tables: Sequence[ClientTable], feature_tables: Sequence[int], pooling: Any
    ) -> RemotePooledKernel:
        """Returns a kernel that pools rows of tables of this client."""
        return RemotePooledKernel(tables, feature_tables, pooling)

    def sequence_kernel(self, tables: Sequence[ClientTable]) -> RemoteSequenceKernel:
        """Returns a kernel that looks up rows of tables of this client."""
        return RemoteSequenceKernel(tables)

    def delete(self, name: str, ids: Tensor) -> int:
        """Deletes the rows of ``ids``, (N,) of integers, and returns the number of rows
        that existed.
        """
        tables, _ = self._open(), self.spec(name)
        return tables.delete(name, checked_ids(name, ids))

    def exists(self, name: str, ids: Tensor) -> Tensor:
        """Returns (N,) bool, True for the ``ids``, (N,) of integers, that have a row."""
        tables, _ = self._open(), self.spec(name)
        return tables.exists(name, checked_ids(name, ids))

    def stats(self, name: str) -> TableStats:
        """Returns the statistics of a table, summed over all servers."""
        tables, _ = self._open(), self.spec(name)
        return tables.stats(name)

    def spec(self, name: str) -> TableSpec:
        """Returns the specification that a table was created with."""
        spec = (
            self._specs.get(name)
            if isinstance(name, str) and not self._closed
            else None
        )
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
        """Returns the dtypes of the rows of the tables that this client has used so
        far.
        """
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
        if self in _of_process:
            _of_process.remove(self)
        # a forked process must not close the tables of its parent
        if os.getpid() == self._process:
            self._updates.warn_of_errors()
            self._prefetches.close()
            self._groups.close()
            self._tables.close()

    def __enter__(self) -> RecStoreClient:
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

    def _check_same(
        self, library_path: object = None, role: str = "default", **access: object
    ) -> None:
        """Checks the arguments of a call that returns this client, which was made with
        other ones perhaps.
        """
        access.pop("private", None)
        for argument, value in access.items():
            if self._access[argument] != value:
                raise ValueError(
                    "the client of this process was made with"
                    f" {argument}={self._access[argument]}, and {argument}={value} is"
                    " given: pass private=True for a client of its own, or close the"
                    " first one"
                )
        self._warn_of(library_path, role)

    def _warn_of(self, library_path: object, role: str) -> None:
        if library_path is not None:
            warn_user(
                f"RecStoreClient(library_path={str(library_path)!r}) has no effect:"
                " there is no library to load"
            )
        if role != "default":
            warn_user(
                f"RecStoreClient(role={role!r}) has no effect: all clients are equal"
            )

    def _check_no_init_func(
        self, calls: Sequence[RowRead] | Sequence[RowUpdate]
    ) -> None:
        for call in calls:
            if self.spec(call.table).initial_rows:
                raise NoInitialRow(call.table)

    def _first(self, argument: str) -> bool:
        """Returns whether the client has not yet warned that an argument has no effect."""
        first = argument not in self._said
        self._said.add(argument)
        return first

    def _raise_first(self, errors: list[Exception]) -> None:
        if errors:
            raise errors[0]

    def _parts_by_range(self, ids: Tensor) -> list[_Part]:
        """Returns the parts of a read without a table's name: the ids of each table,
        and how they are read.
        """
        self._open()
        if len(self._ranges) == 1:
            [name] = self._ranges
            ids, read = self._reading(name, ids.clone())
            return [(name, ids, read, None)]
        parts = split_by_range(
            ids,
            {name: (ids, self.spec(name).dim) for name, ids in self._ranges.items()},
        )
        return [
            (name, *self._reading(name, some), place) for name, some, place in parts
        ]

    def _reading(self, name: str, ids: object) -> tuple[Tensor, Callable[[], _Read]]:
        """Returns the checked ids and a function that reads their rows; it may be
        called in any thread.
        """
        tables, spec = self._open(), self.spec(name)
        ids = checked_ids(name, ids)
        if spec.initial_rows:
            return ids, lambda: tables.found_rows(name, ids)
        return ids, lambda: (None, tables.pull(name, ids))

    def _whole(self, name: str, ids: Tensor, read: _Read) -> Tensor:
        """Returns (N, dim): the rows that were read, and initial rows for the ids
        without a row.

        The initial rows are made in the caller's thread, because making them seeds
        torch's default generator.
        """
        found, rows = read
        if found is None or bool(found.all()):
            return rows
        missing, places = torch.unique(ids[~found], return_inverse=True)
        whole = rows.new_empty(len(ids), rows.shape[1])
        whole[found] = rows
        whole[~found] = self._maker(name, self.spec(name)).rows(missing)[places]
        return whole

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
            initial = (
                (missing, self._maker(name, spec).rows(missing).float())
                if len(missing)
                else None
            )
            try:
                tables.update(name, ids, grads, initial)
                return
            except NoInitialRow as error:  # a row was deleted between exists and update
                if error.pending is None or attempt + 1 == _ATTEMPTS:
                    raise
                ids, grads = ids[error.pending], grads[error.pending]

    def _maker(self, name: str, spec: TableSpec) -> WholeTable | RowByRow:
        maker = self._makers.get(name)
        if maker is None or maker.digest != spec.initial_rows:
            raise NoInitialRow(name)
        return maker


# Sphinx finds the types of a text in the module of a class, and a signature has no
# module.
_of_init = inspect.signature(RecStoreClient.__init__, eval_str=True)
# without self
RecStoreClient.__signature__ = _of_init.replace(
    parameters=[*_of_init.parameters.values()][1:]
)


def get_kv_client() -> RecStoreClient:
    """Returns the client of the process, as ``RecStoreClient()`` does, for programs
    that were written for RecStore.
    """
    return RecStoreClient()


def client_of_servers(servers: Servers) -> RecStoreClient:
    """Returns the client of servers.

    All tables of this process with equal :class:`Servers` have the same client.

    Raises:
        ValueError, OSError: The access to the servers is invalid.
    """
    client = _of_servers.get(servers)
    if client is None:
        client = _of_servers[servers] = RecStoreClient(
            servers.addresses,
            token=servers.token,
            tls_ca=servers.tls_ca,
            tls_cert=servers.tls_cert,
            tls_key=servers.tls_key,
            timeout_s=servers.timeout_s,
        )
    return client


def client_of(handle: int) -> RecStoreClient:
    """Returns the client with the given handle.

    Raises:
        ValueError: No client with this handle exists.
    """
    client = _clients.get(handle)
    if client is None:
        raise ValueError(f"there is no RecStoreClient with the handle {handle}")
    return client


def _here(*for_servers: object) -> HostedTables:
    if any(value is not None for value in for_servers):
        raise ValueError(
            "token, tls_ca, tls_cert and tls_key are for servers, and none are given"
        )
    return HostedTables()


def _on_servers(servers: Sequence[str], access: dict[str, Any]) -> ServerSet:
    from torchrec_recstore_service.client.server_set import ServerSet
    from torchrec_recstore_service.wire.access import Access

    return ServerSet(servers, Access(**access))
