"""The client, which reads and writes named embedding tables in its own process or on parameter servers."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Generic, TypeVar, cast

import torch
from torch import Tensor

from torchrec_recstore.optim import Optimizer, RowWiseAdagrad
from torchrec_recstore.options import TableOptions
from torchrec_recstore.row_types import value_dtype
from torchrec_recstore.rpc.table_spec import TableSpec
from torchrec_recstore.service.backend import Backend, InitialRows, NoInitialRow
from torchrec_recstore.service.hosted import HostedBackend
from torchrec_recstore.service.initial_rows import InitFunc, InitialRowMaker
from torchrec_recstore.store import TableStats
from torchrec_recstore.store.arguments import check_ids, check_rows

_THREADS = 4  # prefetches that run at the same time; further prefetches wait
_ATTEMPTS = 10  # of an update whose rows are deleted by other clients before the update is carried out

_Result = TypeVar("_Result")
_Read = tuple[Tensor | None, Tensor]  # (N,) bool, which ids have a row, or None for all; and the rows of these ids

_clients: weakref.WeakValueDictionary[int, RecStoreClient] = weakref.WeakValueDictionary()
_handles = itertools.count(1)


def checked_name(name: object) -> str:
    """Checks and returns the name of a table.

    Raises:
        TypeError, ValueError: ``name`` is not a str, or is empty.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {type(name).__name__}")
    if not name:
        raise ValueError("name must not be empty")
    return name


def checked_shape(name: str, shape: Sequence[int]) -> tuple[int, int]:
    """Checks a shape and returns its two numbers: the expected number of rows, and the dim.

    Raises:
        TypeError, ValueError: ``shape`` is not two positive ints.
    """
    if not isinstance(shape, Sequence) or any(isinstance(n, bool) or not isinstance(n, int) for n in shape):
        raise TypeError(f"table {name!r}: shape must be two ints, (rows, dim), got {shape!r}")
    if len(shape) != 2 or min(shape) < 1:
        raise ValueError(f"table {name!r}: shape must be two ints above 0, (rows, dim), got {tuple(shape)}")
    return shape[0], shape[1]


def checked_ids(name: str, ids: object) -> Tensor:
    """Checks ids and returns them as a contiguous tensor.

    Raises:
        TypeError, ValueError: ``ids`` is not an (N,) int64 tensor on the CPU.
    """
    check_ids(ids, f"table {name!r}: ")
    return cast(Tensor, ids).detach().contiguous()


def checked_rows(name: str, argument: str, rows: object, ids: Tensor, spec: TableSpec) -> Tensor:
    """Checks the rows of ``ids`` and returns them as a contiguous tensor.

    Raises:
        TypeError, ValueError: ``rows`` is not an (N, dim) tensor on the CPU in the table's dtype or float32.
    """
    dtypes = sorted((torch.float32, value_dtype(spec.dtype)), key=str)
    check_rows(rows, argument, (len(ids), spec.dim), dtypes, f"table {name!r}: ")
    return cast(Tensor, rows).detach().contiguous()


class Prefetches(Generic[_Result]):
    """Reads that run in background threads. The result of each read can be fetched once."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._numbers = itertools.count(1)
        self._pending: dict[int, Future[_Result]] = {}
        self._lock = threading.Lock()

    def start(self, read: Callable[[], _Result]) -> int:
        """Calls ``read`` in another thread and returns a handle for :meth:`wait`."""
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_THREADS, "recstore-prefetch")
            handle = next(self._numbers)
            self._pending[handle] = self._threads.submit(read)
            return handle

    def wait(self, handle: int) -> _Result:
        """Waits for a read and returns its result, or raises its error.

        Raises:
            ValueError: The handle does not exist, or its result has already been fetched.
        """
        with self._lock:
            future = self._pending.pop(handle, None)
        if future is None:
            raise ValueError(f"there is no prefetch {handle!r}, or it has been waited for already")
        try:
            return future.result()
        except CancelledError:
            raise ValueError("the client is closed") from None

    def close(self) -> None:
        """Cancels the reads that have not begun and waits for the reads that have."""
        with self._lock:
            threads, self._threads = self._threads, None
            self._pending.clear()
        if threads is not None:
            threads.shutdown(cancel_futures=True)


class RecStoreClient:
    """A client of named embedding tables, which are in this process or on parameter servers.

    A table takes any int64 id. Rows are created when they are written or updated. ``pull`` creates no rows: an id
    without a row reads as its initial row. Methods may be called from any thread. Arguments are checked before anything
    is sent, and an invalid argument changes nothing. The client is also a context manager.

    Args:
        servers: The address of each server, as ``host:port``. All clients must name the servers in the same order. Ids
            are distributed over the servers by hash. Default: None, the tables are in this process.
        token: The token of the servers, if they require one.
        tls_ca: The path of a PEM file with the CA certificates that sign the servers' certificates. Connections are
            encrypted if it is given.
        tls_cert: The path of a PEM file with this client's certificate, if the servers require one.
        tls_key: The path of a PEM file with the private key of ``tls_cert``.
        timeout_s: The longest time in seconds that a call may take. Saves and loads have no limit. Default: 30.

    Raises:
        TypeError, ValueError: An argument is invalid. All methods raise these errors too, for invalid arguments, for a
            table that does not exist and after :meth:`close`. The message names the argument and the table.
        ImportError: ``servers`` is given and grpcio is not installed.
        ServiceError: A server cannot be reached, or refuses a call. All methods that call a server raise it.
        MemoryError: There is not enough memory for the rows.

    Example::

        client = RecStoreClient()
        client.init_data("user", (1_000_000, 64))
        ids = torch.tensor([7, -1])
        rows = client.pull("user", ids)  # (2, 64)
        client.update("user", ids, torch.ones(2, 64))
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
    ) -> None:
        self._tables = (
            _here(token, tls_ca, tls_cert, tls_key)
            if servers is None
            else _on_servers(servers, token, tls_ca, tls_cert, tls_key, timeout_s)
        )
        self._servers = None if servers is None else list(servers)
        self._closed = False
        self._process = os.getpid()
        self._specs: dict[str, TableSpec] = {}
        self._makers: dict[str, InitialRowMaker] = {}
        self._prefetches: Prefetches[tuple[str, Tensor, _Read]] = Prefetches()
        self.handle = next(_handles)
        """The number that identifies this client in the ``torch.ops.recstore_ops.emb_*`` ops."""
        _clients[self.handle] = self

    def init_data(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        init_func: InitFunc | None = None,
        *,
        optimizer: Optimizer = RowWiseAdagrad(lr=0.01),  # noqa: B008  (frozen)
        options: TableOptions = TableOptions(),  # noqa: B008  (frozen)
    ) -> None:
        """Creates a table without rows. A table that was created with the same arguments is not changed.

        Args:
            name: The name of the table. The name and ``options.seed`` determine the initial rows.
            shape: (rows, dim). ``rows`` is not a limit: it is the value of ``options.expected_rows`` if that is None.
            dtype: The dtype of the weights: ``torch.float32``, ``float16``, ``bfloat16`` or ``int8``.
                Rows of an ``int8`` table are read and written as float32. Default: ``float32``.
            init_func: A function ``(shape, dtype) -> tensor`` that makes initial rows. This client calls it with
                ``(1, dim)`` when the row of an id is needed for the first time; torch's default generator is then
                seeded for the id. Default: None, the initializer of ``options`` makes the initial rows.
            optimizer: The optimizer that :meth:`update` applies.
            options: The options of the table. ``cold_store`` must be None. ``max_rows`` counts the rows of all servers.
                Each :meth:`update` is one step.

        Raises:
            ValueError: The table exists and was created with other arguments. The message names the difference.
        """
        tables = self._open()
        rows, dim = checked_shape(checked_name(name), shape)
        if not isinstance(options, TableOptions):
            raise TypeError(f"table {name!r}: options must be TableOptions, got {type(options).__name__}")
        if options.expected_rows is None:
            options = replace(options, expected_rows=rows)
        spec = TableSpec(dim, dtype, optimizer, options)
        maker = None
        if init_func is not None:
            if not callable(init_func):
                raise TypeError(f"table {name!r}: init_func must be callable, got {type(init_func).__name__}")
            if options.initializer is not None:
                raise ValueError(
                    f"table {name!r}: init_func and options.initializer both define initial rows: give only one"
                )
            maker = InitialRowMaker(init_func, name, options.seed, dim, value_dtype(dtype))
            spec = replace(spec, initial_rows=maker.digest)
        tables.create(name, spec)
        self._specs[name] = spec
        if maker is not None:
            self._makers[name] = maker

    def pull(self, name: str, ids: Tensor) -> Tensor:
        """Reads rows.

        Args:
            name: The name of the table.
            ids: (N,) int64. The ids whose rows are read. Duplicates are allowed.

        Returns:
            (N, dim) in the table's dtype.
        """
        ids, read = self._reading(name, ids)
        return self._whole(name, ids, read())

    def push(self, name: str, ids: Tensor, values: Tensor) -> None:
        """Writes rows. New rows start with zero optimizer state; existing rows keep their optimizer state.

        Args:
            name: The name of the table.
            ids: (N,) int64. The ids whose rows are written. If an id occurs several times, its last row is written.
            values: (N, dim), float32 or the table's dtype. The weights.
        """
        tables, spec = self._open(), self.spec(name)
        ids = checked_ids(name, ids)
        tables.push(name, ids, checked_rows(name, "values", values, ids, spec))

    def update(self, name: str, ids: Tensor, grads: Tensor) -> None:
        """Applies the optimizer once to the row of each distinct id, with the sum of the id's gradients.

        The gradients are summed in the order of ``ids``. An id without a row first gets its initial row. One update is
        one step of the table's clock: LRU, LFU, expiry and ``options.admission`` count updates. The update of an id
        that ``options.admission`` does not admit yet is dropped.

        Args:
            name: The name of the table.
            ids: (N,) int64. The ids whose rows are updated. Duplicates are allowed.
            grads: (N, dim), float32 or the table's dtype. The gradients.
        """
        tables, spec = self._open(), self.spec(name)
        ids = checked_ids(name, ids)
        grads = checked_rows(name, "grads", grads, ids, spec)
        for attempt in range(_ATTEMPTS):
            initial = None
            if spec.initial_rows:
                # After a refused attempt, initial rows are sent for all ids: the next attempt then lacks none.
                missing = torch.unique(ids[~tables.exists(name, ids)] if attempt == 0 else ids)
                initial = self._initial_rows(name, missing)
            try:
                tables.update(name, ids, grads, initial)
                return
            except NoInitialRow as error:  # a row was deleted between exists and update
                if error.pending is None or attempt + 1 == _ATTEMPTS:
                    raise
                ids, grads = ids[error.pending], grads[error.pending]

    def prefetch(self, name: str, ids: Tensor) -> int:
        """Starts a :meth:`pull` in another thread.

        Args:
            name: The name of the table.
            ids: (N,) int64. The ids whose rows are read. The tensor may be changed after this call.

        Returns:
            A handle for :meth:`wait_for_prefetch`. A row that is written before that call is read either as it was
            before the write or as it is after the write.
        """
        ids, read = self._reading(name, ids.clone() if isinstance(ids, Tensor) else ids)
        return self._prefetches.start(lambda: (name, ids, read()))

    def wait_for_prefetch(self, handle: int) -> Tensor:
        """Waits for a prefetch and returns its rows, (N, dim) in the table's dtype, or raises the error of its pull.

        Raises:
            ValueError: The handle does not exist, or its rows have already been fetched.
        """
        self._open()
        return self._whole(*self._prefetches.wait(handle))

    def delete(self, name: str, ids: Tensor) -> int:
        """Deletes the rows of ``ids``, (N,) int64, and returns the number of rows that existed."""
        tables, _ = self._open(), self.spec(name)
        return tables.delete(name, checked_ids(name, ids))

    def exists(self, name: str, ids: Tensor) -> Tensor:
        """Returns (N,) bool, True for the ``ids``, (N,) int64, that have a row."""
        tables, _ = self._open(), self.spec(name)
        return tables.exists(name, checked_ids(name, ids))

    def stats(self, name: str) -> TableStats:
        """Returns the statistics of a table, summed over all servers."""
        tables, _ = self._open(), self.spec(name)
        return tables.stats(name)

    def spec(self, name: str) -> TableSpec:
        """Returns the specification that a table was created with."""
        tables = self._open()
        spec = self._specs.get(checked_name(name)) or tables.spec(name)
        if spec is None:
            raise ValueError(f"there is no table {name!r}: init_data makes one")
        self._specs[name] = spec
        return spec

    def dtypes(self) -> set[torch.dtype]:
        """Returns the dtypes of the rows of the tables that this client has used so far."""
        return {value_dtype(spec.dtype) for spec in self._specs.values()}

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Saves all tables in the format of ``save_checkpoint``. The tables can be used during the save.

        Args:
            path: The path of a directory. With servers: a name below the data directory of each server.
            overwrite: Whether a checkpoint at ``path`` is replaced. The replacement is atomic. Default: False.

        Raises:
            FileExistsError: ``path`` exists.
            OSError: A file cannot be written. Nothing new is left at ``path``. With several servers, some servers may
                have saved when one of them fails: repeat the save with ``overwrite=True``.
        """
        self._open().save(path, overwrite)

    def load(self, path: str | Path) -> None:
        """Replaces all tables by the tables of a checkpoint of :meth:`save` or ``save_checkpoint``.

        The learning rates and bounds of the tables are not changed.

        Args:
            path: The path of the checkpoint. See :meth:`save`.

        Raises:
            FileNotFoundError: The checkpoint does not exist.
            ValueError: A file is missing or damaged (``CheckpointError``), or a table is not in the checkpoint or has
                another specification there. Nothing has changed. With several servers, some servers may have loaded
                when one of them fails.
        """
        self._open().load(path)
        self._specs.clear()

    def close(self) -> None:
        """Frees the tables or closes the connections. It may be called twice."""
        self._closed = True
        if os.getpid() == self._process:  # a forked process must not close the tables of its parent
            self._prefetches.close()
            self._tables.close()

    def __enter__(self) -> RecStoreClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> str:
        raise TypeError("a RecStoreClient cannot be copied or pickled: make one in each process")

    def __repr__(self) -> str:
        return f"RecStoreClient({'' if self._servers is None else self._servers})"

    def _open(self) -> Backend:
        if self._closed:
            raise ValueError(f"{self!r} is closed")
        if os.getpid() != self._process:  # a forked process has neither the threads nor usable locks
            raise ValueError(f"{self!r}: the client was made in another process; make one in each")
        return self._tables

    def _reading(self, name: str, ids: Tensor) -> tuple[Tensor, Callable[[], _Read]]:
        """Returns the checked ids and a function that reads their rows; it may be called in any thread."""
        tables, spec = self._open(), self.spec(name)
        ids = checked_ids(name, ids)
        if spec.initial_rows:
            return ids, lambda: tables.found_rows(name, ids)
        return ids, lambda: (None, tables.pull(name, ids))

    def _whole(self, name: str, ids: Tensor, read: _Read) -> Tensor:
        """Returns (N, dim): the rows that were read, and initial rows for the ids without a row.

        The initial rows are made in the caller's thread, because making them seeds torch's default generator.
        """
        found, rows = read
        if found is None or bool(found.all()):
            return rows
        missing, places = torch.unique(ids[~found], return_inverse=True)
        whole = rows.new_empty(len(ids), rows.shape[1])
        whole[found] = rows
        whole[~found] = self._maker(name).rows(missing)[places]
        return whole

    def _initial_rows(self, name: str, ids: Tensor) -> InitialRows | None:
        """Returns the distinct ``ids`` with their initial rows, or None if there are no ids."""
        return (ids, self._maker(name).rows(ids).float()) if len(ids) else None

    def _maker(self, name: str) -> InitialRowMaker:
        maker = self._makers.get(name)
        if maker is None or maker.digest != self.spec(name).initial_rows:
            raise NoInitialRow(name)
        return maker


def client_of(handle: int) -> RecStoreClient:
    """Returns the client with the given handle.

    Raises:
        ValueError: No client with this handle exists.
    """
    client = _clients.get(handle)
    if client is None:
        raise ValueError(f"there is no RecStoreClient with the handle {handle}")
    return client


def _here(*for_servers: object) -> Backend:
    if any(value is not None for value in for_servers):
        raise ValueError("token, tls_ca, tls_cert and tls_key are for servers, and none are given")
    return HostedBackend()


def _on_servers(
    servers: Sequence[str],
    token: str | None,
    tls_ca: str | Path | None,
    tls_cert: str | Path | None,
    tls_key: str | Path | None,
    timeout_s: float,
) -> Backend:
    from torchrec_recstore.rpc.connection import Access
    from torchrec_recstore.service.remote import RemoteBackend

    access = Access(token=token, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, timeout_s=timeout_s)
    return RemoteBackend(servers, access)
