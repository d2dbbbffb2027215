"""The cold store that an option of a table stands for."""

from __future__ import annotations

from functools import singledispatch

from torchrec_recstore.options import RedisStore, RocksDBStore, ServerStore
from torchrec_recstore.store.cold_store import ColdStore


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
