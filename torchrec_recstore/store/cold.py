"""Where rows lie that have left memory and must not be lost: the protocol, and how an option becomes a store."""

from __future__ import annotations

from collections.abc import Iterator
from functools import singledispatch
from typing import Protocol

from torch import Tensor

from torchrec_recstore.options import RedisStore, RocksDBStore, ServerStore


class ColdStoreError(RuntimeError):
    """A cold store cannot be read or written; the message names it."""


class ColdStore(Protocol):
    """Rows, as bytes, by id: those of one shard of one table.

    A row comes back as it was put, byte for byte, until it is put again or deleted. What a call has done is done when
    it returns; one that raises may be repeated. Calls come from one thread at a time, not always the same; what
    :meth:`scan` has given is read on beside them where ``ascending_snapshots`` is set.

    Every call raises :class:`ColdStoreError` where the store cannot be reached, is full, or has lost rows.
    """

    ascending_snapshots: bool
    """Whether :meth:`scan` gives ids in ascending order and the rows of the moment of its call, whatever is put or
    deleted before it is exhausted. Other stores are scanned while nothing changes."""

    def get(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Reads rows.

        Args:
            ids: (N,) int64, distinct.

        Returns:
            (N,) bool, which of them are there, and the rows of these, (their number, row bytes) uint8, in the order of
            ``ids``.
        """

    def put(self, ids: Tensor, rows: Tensor) -> None:
        """Writes or overwrites rows: ids (N,) int64, distinct, rows (N, row bytes) uint8."""

    def delete(self, ids: Tensor) -> None:
        """Forgets rows, of ids (N,) int64; those that are not there are passed over."""

    def scan(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Every id that is there, once, and its row, batch by batch: ids (n,) int64, rows (n, row bytes) uint8."""

    def close(self) -> None:
        """Forgets all rows and frees what the store takes. Closing twice is fine; any other call then raises."""


class SharedColdStore(ColdStore, Protocol):
    """Rows that other tables of the same name read and write too: where the options' ``shared`` is set.

    It is not empty when it is opened, and keeps its rows when it is closed. Rows of a :meth:`scan` are of any moment
    since its call, and those that others delete meanwhile are passed over.
    """

    def ids(self) -> Tensor:
        """(N,) int64: every id that is there, once."""


@singledispatch
def open_cold_store(options: object, *, name: str, row_bytes: int) -> ColdStore:
    """A cold store, empty unless it is shared: :class:`SharedColdStore`.

    Register a store of your own by the type of its options: ``@open_cold_store.register``. The conformance test in
    ``torchrec_recstore.store.conformance`` tells whether it fits.

    Args:
        options: ``TableOptions.cold_store``, a frozen dataclass.
        name: of the shard: table, rank and columns. Stores of one name that are open at once are kept apart. Shared
            ones are named by table and columns, and those of one name are one.
        row_bytes: of a row.

    Raises:
        TypeError: no store is registered for options of that type.
        ColdStoreError: the store cannot be made.
        ImportError: the library that the store needs is missing.
    """
    raise TypeError(
        f"TableOptions.cold_store: no cold store is registered for {type(options).__name__}: give RocksDBStore, "
        "RedisStore or ServerStore, or register one with open_cold_store.register"
    )


@open_cold_store.register
def _open_rocksdb(options: RocksDBStore, *, name: str, row_bytes: int) -> ColdStore:
    try:
        from torchrec_recstore.store.rocksdb_store import RocksDBColdStore  # here: few tables need the library
    except ModuleNotFoundError as error:
        raise _missing(options, "rocksdict", error) from error
    return RocksDBColdStore(options, name=name, row_bytes=row_bytes)


@open_cold_store.register
def _open_redis(options: RedisStore, *, name: str, row_bytes: int) -> ColdStore:
    try:
        from torchrec_recstore.store.redis_store import RedisColdStore
    except ModuleNotFoundError as error:
        raise _missing(options, "redis hiredis", error) from error
    return RedisColdStore(options, name=name, row_bytes=row_bytes)


@open_cold_store.register
def _open_servers(options: ServerStore, *, name: str, row_bytes: int) -> ColdStore:
    try:
        from torchrec_recstore.store.server_store import ServerColdStore
    except ModuleNotFoundError as error:
        raise _missing(options, "grpcio protobuf", error) from error
    return ServerColdStore(options, name=name, row_bytes=row_bytes)


def _missing(options: object, packages: str, error: ModuleNotFoundError) -> ImportError:
    return ImportError(f"{options!r} needs a package that is missing: pip install {packages} ({error})")
