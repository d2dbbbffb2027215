"""The client: named embedding tables in its own process or on parameter servers."""

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
from torchrec_recstore.rpc.table_spec import TableSpec
from torchrec_recstore.service.backend import Backend, InitialRows, NoInitialRow
from torchrec_recstore.service.hosted import HostedBackend
from torchrec_recstore.service.initial_rows import InitFunc, InitialRowMaker
from torchrec_recstore.store import TableStats
from torchrec_recstore.store.arguments import check_ids, check_rows


def checked_name(name: object) -> str:
    """The name of a table.

    Raises:
        TypeError, ValueError: it is no str, or empty.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {type(name).__name__}")
    if not name:
        raise ValueError("name must not be empty")
    return name


def checked_shape(name: str, shape: Sequence[int]) -> tuple[int, int]:
    """The rows that a table is expected to have, and its dim.

    Raises:
        TypeError, ValueError: ``shape`` is something else.
    """
    if not isinstance(shape, Sequence) or any(isinstance(n, bool) or not isinstance(n, int) for n in shape):
        raise TypeError(f"table {name!r}: shape must be two ints, (rows, dim), got {shape!r}")
    if len(shape) != 2 or min(shape) < 1:
        raise ValueError(f"table {name!r}: shape must be two ints above 0, (rows, dim), got {tuple(shape)}")
    return shape[0], shape[1]


def checked_ids(name: str, ids: object) -> Tensor:
    """Ids as the tables take them.

    Raises:
        TypeError, ValueError: they are not (N,) int64 on the CPU.
    """
    check_ids(ids, f"table {name!r}: ")
    return cast(Tensor, ids).detach().contiguous()


def checked_rows(name: str, argument: str, rows: object, ids: Tensor, spec: TableSpec) -> Tensor:
    """Rows of ``ids`` as the tables take them.

    Raises:
        TypeError, ValueError: they are not (N, dim) of the table's dtype or float32, on the CPU.
    """
    dtypes = sorted((torch.float32, spec.dtype), key=str)
    check_rows(rows, argument, (len(ids), spec.dim), dtypes, f"table {name!r}: ")
    return cast(Tensor, rows).detach().contiguous()


_Result = TypeVar("_Result")

_THREADS = 4  # reads that are under way at a time; others wait for their turn


class Prefetches(Generic[_Result]):
    """Reads that run beside the caller, each to be waited for once."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._numbers = itertools.count(1)
        self._pending: dict[int, Future[_Result]] = {}
        self._lock = threading.Lock()

    def start(self, read: Callable[[], _Result]) -> int:
        """Has ``read`` called in another thread; returns its handle."""
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_THREADS, "recstore-prefetch")
            handle = next(self._numbers)
            self._pending[handle] = self._threads.submit(read)
            return handle

    def wait(self, handle: int) -> _Result:
        """What ``read`` has returned, or raised.

        Raises:
            ValueError: there is no such handle, or it has been waited for.
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
        """Forgets reads that have not begun, and waits for the others."""
        with self._lock:
            threads, self._threads = self._threads, None
            self._pending.clear()
        if threads is not None:
            threads.shutdown(cancel_futures=True)


_ATTEMPTS = 10  # of an update whose rows others delete in between

_clients: weakref.WeakValueDictionary[int, RecStoreClient] = weakref.WeakValueDictionary()
_handles = itertools.count(1)

_Read = tuple[Tensor | None, Tensor]  # which ids have a row, where that is asked for, and rows


class RecStoreClient:
    """Embedding tables by name, in this process or on parameter servers.

    A table takes any int64 id. Rows come into being as they are written or updated: ``pull`` inserts nothing, and reads
    an id without a row as the row it would begin with. Every method may be called from any thread. Arguments are
    checked before anything is sent; after an error of theirs nothing has changed. Also a context manager.

    Args:
        servers: ``host:port`` of each server, in the same order for every client; ids are shared out among them by
            hash. None: the tables are in this process.
        token: that the servers want.
        tls_ca: file of the certificates that theirs are signed by, PEM; with it connections are encrypted.
        tls_cert: file of this client's certificate, where they want one.
        tls_key: file of its key.
        timeout_s: seconds that a call may take; saves and loads take as long as they take.

    Raises:
        TypeError, ValueError: an argument makes no sense. So do all methods, also for a table that does not exist and
            after :meth:`close`; the message names argument and table.
        ImportError: ``servers`` without grpcio.
        ServiceError: a server cannot be reached, or refuses; each call raises it. MemoryError: no room for the rows.

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
        """By which ``torch.ops.recstore_ops.emb_read`` and the others know the client."""
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
        """Makes a table, without rows. One that was made with the same arguments stays as it is.

        Args:
            name: of the table; decides initial rows together with ``options.seed``.
            shape: (rows, dim). ``rows`` limits nothing: it stands for ``options.expected_rows`` where that is None.
            dtype: of the weights: ``torch.float32``, ``float16`` or ``bfloat16``.
            init_func: ``(shape, dtype) -> tensor``, called with ``(1, dim)`` for each id whose row is wanted for the
                first time, by this client, with torch's default generator seeded for the id. None: the initializer of
                ``options``.
            optimizer: what :meth:`update` does.
            options: without ``cold_store``; ``max_rows`` is over all servers. An :meth:`update` is a step.

        Raises:
            ValueError: there is such a table, made with other arguments; the message names what differs.
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
                raise ValueError(f"table {name!r}: init_func and options.initializer say both how rows begin")
            maker = InitialRowMaker(init_func, name, options.seed, dim, dtype)
            spec = replace(spec, initial_rows=maker.digest)
        tables.create(name, spec)
        self._specs[name] = spec
        if maker is not None:
            self._makers[name] = maker

    def pull(self, name: str, ids: Tensor) -> Tensor:
        """Reads the rows of ``ids``, (N,) int64, duplicates allowed: (N, dim) of the table's dtype."""
        ids, read = self._reading(name, ids)
        return self._whole(name, ids, read())

    def push(self, name: str, ids: Tensor, values: Tensor) -> None:
        """Writes rows: new ones start with zero optimizer state, existing ones keep theirs.

        Args:
            name: of the table.
            ids: (N,) int64; of duplicates the last one wins.
            values: (N, dim), float32 or the table's dtype.
        """
        tables, spec = self._open(), self.spec(name)
        ids = checked_ids(name, ids)
        tables.push(name, ids, checked_rows(name, "values", values, ids, spec))

    def update(self, name: str, ids: Tensor, grads: Tensor) -> None:
        """Applies the optimizer once to each distinct id's row, on the sum of its gradients in the order given.

        An id without a row gets its initial row first. One update is one step: of the clock that LRU, LFU and expiry
        go by, and of what ``options.admission`` counts; updates of ids that it holds back are dropped.

        Args:
            name: of the table.
            ids: (N,) int64.
            grads: (N, dim), float32 or the table's dtype.
        """
        tables, spec = self._open(), self.spec(name)
        ids = checked_ids(name, ids)
        grads = checked_rows(name, "grads", grads, ids, spec)
        for attempt in range(_ATTEMPTS):
            initial = None
            if spec.initial_rows:
                # After a first refusal for all, so that there is no reason for another.
                missing = torch.unique(ids[~tables.exists(name, ids)] if attempt == 0 else ids)
                initial = self._initial_rows(name, missing)
            try:
                tables.update(name, ids, grads, initial)
                return
            except NoInitialRow as error:  # a row has left between the question and the update
                if error.pending is None or attempt + 1 == _ATTEMPTS:
                    raise
                ids, grads = ids[error.pending], grads[error.pending]

    def prefetch(self, name: str, ids: Tensor) -> int:
        """Begins a :meth:`pull` beside the caller; ``ids``, (N,) int64, may be changed afterwards.

        Returns:
            A handle for :meth:`wait_for_prefetch`. Rows that are written in between are read before or after that.
        """
        ids, read = self._reading(name, ids.clone() if isinstance(ids, Tensor) else ids)
        return self._prefetches.start(lambda: (name, ids, read()))

    def wait_for_prefetch(self, handle: int) -> Tensor:
        """What :meth:`pull` would have returned, or raised; once for each handle.

        Raises:
            ValueError: there is no such handle, or it has been waited for.
        """
        self._open()
        return self._whole(*self._prefetches.wait(handle))

    def delete(self, name: str, ids: Tensor) -> int:
        """Forgets the rows of ``ids``, (N,) int64; returns how many there were."""
        tables, _ = self._open(), self.spec(name)
        return tables.delete(name, checked_ids(name, ids))

    def exists(self, name: str, ids: Tensor) -> Tensor:
        """Tells which of ``ids``, (N,) int64, have a row: (N,) bool."""
        tables, _ = self._open(), self.spec(name)
        return tables.exists(name, checked_ids(name, ids))

    def stats(self, name: str) -> TableStats:
        """What the table holds and has done, over all servers."""
        tables, _ = self._open(), self.spec(name)
        return tables.stats(name)

    def spec(self, name: str) -> TableSpec:
        """What a table was made with."""
        tables = self._open()
        spec = self._specs.get(checked_name(name)) or tables.spec(name)
        if spec is None:
            raise ValueError(f"there is no table {name!r}: init_data makes one")
        self._specs[name] = spec
        return spec

    def dtypes(self) -> set[torch.dtype]:
        """Of the tables that this client has used so far."""
        return {spec.dtype for spec in self._specs.values()}

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Saves all tables, in the format of ``save_checkpoint``; others may go on with them meanwhile.

        Args:
            path: a directory; on servers a name below the data directory of each.
            overwrite: whether a checkpoint at ``path`` may be replaced, which happens at once.

        Raises:
            FileExistsError: there is something at ``path``.
            OSError: a file cannot be written; there is nothing new at ``path``. Of several servers some may have saved
                when another fails: repeat it with ``overwrite``.
        """
        self._open().save(path, overwrite)

    def load(self, path: str | Path) -> None:
        """Replaces all tables by those saved, also by ``save_checkpoint``; learning rates and bounds stay.

        Args:
            path: as for :meth:`save`.

        Raises:
            FileNotFoundError: there is no checkpoint.
            ValueError: a file of it is missing or damaged (``CheckpointError``), or a table that is here is missing or
                another one there. Nothing has changed; of several servers some may have loaded when another fails.
        """
        self._open().load(path)
        self._specs.clear()

    def close(self) -> None:
        """Frees the tables, or ends the connections; closing twice is fine."""
        self._closed = True
        if os.getpid() == self._process:  # else they are the parent's, from which this process was forked
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
        if os.getpid() != self._process:  # nor are the locks and threads of that one here
            raise ValueError(f"{self!r}: the client was made in another process; make one in each")
        return self._tables

    def _reading(self, name: str, ids: Tensor) -> tuple[Tensor, Callable[[], _Read]]:
        """Checked ids, and what reads their rows, in any thread."""
        tables, spec = self._open(), self.spec(name)
        ids = checked_ids(name, ids)
        if spec.initial_rows:
            return ids, lambda: tables.found_rows(name, ids)
        return ids, lambda: (None, tables.pull(name, ids))

    def _whole(self, name: str, ids: Tensor, read: _Read) -> Tensor:
        """(N, dim): rows that have been read, and initial rows of the other ids.

        These are made in the caller's own thread, since torch's default generator has to be lent for it.
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
        """Of ``ids``, distinct."""
        return (ids, self._maker(name).rows(ids).float()) if len(ids) else None

    def _maker(self, name: str) -> InitialRowMaker:
        maker = self._makers.get(name)
        if maker is None or maker.digest != self.spec(name).initial_rows:
            raise NoInitialRow(name)
        return maker


def client_of(handle: int) -> RecStoreClient:
    """The client with that handle.

    Raises:
        ValueError: there is none, or none any more.
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
