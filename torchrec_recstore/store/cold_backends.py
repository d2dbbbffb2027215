"""Opens the cold store that the options of a table describe.

Tests: tests/store/test_conformance.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, singledispatch
from typing import Any

from torchrec_recstore.options import RedisStore, RocksDBStore, ServerStore, SSDStore
from torchrec_recstore.plugins import plugin
from torchrec_recstore.store.cold_store import ColdStore
from torchrec_recstore.store.ssd_store import SSDColdStore


@singledispatch
def open_cold_store(
    options: object,
    *,
    name: str,
    row_bytes: int,
) -> ColdStore:
    """Opens a cold store. It is empty, unless it is a :class:`SharedColdStore`.

    To add a cold store, write a function that opens it and register the function for
    the type of its options, with the decorator ``@open_cold_store.register``.
    ``torchrec_recstore.store.conformance`` tests whether a cold store fulfills the
    protocol.

    Args:
        options: ``TableOptions.cold_store``, a frozen dataclass.
        name: The name of the shard: table, rank and columns. Two stores with the same
            name that are open at the same time do not share rows. The name of a shared
            store consists of table and columns, and all shared stores with the same
            name share their rows.
        row_bytes: The size of a row in bytes.

    Raises:
        TypeError: No cold store is registered for options of this type.
        ColdStoreError: The cold store cannot be opened.
        ImportError: The package that the cold store needs is missing.
    """
    raise TypeError(
        "TableOptions.cold_store: no cold store is registered for"
        f" {type(options).__name__}: use SSDStore, RocksDBStore, RedisStore or"
        " ServerStore, or register one with open_cold_store.register"
    )


def _open_with(
    packages: str,
    backend: Callable[[], Any],
    options: object,
    *,
    name: str,
    row_bytes: int,
) -> ColdStore:
    """Opens a cold store whose class needs packages that may be missing."""
    try:
        cold_store: ColdStore = backend()(options, name=name, row_bytes=row_bytes)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{options!r} needs a package that is missing: pip install {packages}"
            f" ({error})"
        ) from error
    return cold_store


def _rocksdb() -> Any:
    from torchrec_recstore.store.rocksdb_store import RocksDBColdStore

    return RocksDBColdStore


def _redis() -> Any:
    from torchrec_recstore.store.redis_store import RedisColdStore

    return RedisColdStore


def _server() -> Any:
    return plugin("server_store")


open_cold_store.register(SSDStore, SSDColdStore)
open_cold_store.register(RocksDBStore, partial(_open_with, "rocksdict", _rocksdb))
open_cold_store.register(RedisStore, partial(_open_with, "redis hiredis", _redis))
open_cold_store.register(ServerStore, partial(_open_with, "grpcio protobuf", _server))
