"""The bounds of all tables of a process, and the options that a table gets from them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from torchrec_recstore.options import (
    LFU,
    LRU,
    Expiry,
    MinFrequency,
    Scored,
    TableOptions,
    not_on_servers,
    shard_options,
)
from torchrec_recstore_service.wire.table_spec import TableSpec


@dataclass(frozen=True)
class Limits:
    """The bounds of all tables of a process, which apply where a table's specification
    sets none.

    Args:
        max_rows: The largest number of rows of each table in this process. A
            specification can lower this limit but not raise it. Default: None, no
            limit.
        eviction: The eviction policy of tables with ``max_rows``. See
            :class:`TableOptions`.
        expiry: The expiry of all tables. See :class:`TableOptions`.
        admission: The admission policy of all tables. See :class:`TableOptions`.
        cold_store: The cold store of tables with ``max_rows``. See
            :class:`TableOptions`.
        max_tables: The largest number of tables of this process. Default: None, no
            limit.
        max_counter_bytes: The largest size in bytes of the memory in which all tables
            count how often they have seen ids. See :class:`MinFrequency`. Default:
            None, no limit.

    Raises:
        TypeError, ValueError: A value is invalid. The message names it.
    """

    max_rows: int | None = None
    eviction: LRU | LFU | Scored | None = None
    expiry: Expiry | None = None
    admission: MinFrequency | None = None
    cold_store: Hashable | None = None
    max_tables: int | None = None
    max_counter_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.max_tables is not None and self.max_tables < 1:
            raise ValueError(f"max_tables must be at least 1, got {self.max_tables}")
        # max_rows=1 passes the check that eviction and cold_store need max_rows:
        # specifications may set it later.
        options = TableOptions(
            max_rows=1 if self.max_rows is None else self.max_rows,
            eviction=self.eviction,
            expiry=self.expiry,
            admission=self.admission,
            cold_store=self.cold_store,
        )
        reason = not_on_servers(options)
        if reason is not None:
            raise ValueError(reason)


def limits_of(options: TableOptions) -> Limits:
    """Returns the bounds of ``options`` as bounds of all tables of a process."""
    return Limits(
        max_rows=options.max_rows,
        eviction=options.eviction,
        expiry=options.expiry,
        admission=options.admission,
        cold_store=options.cold_store,
    )


def held_options(
    name: str,
    spec: TableSpec,
    limits: Limits,
) -> TableOptions:
    """Returns the options of the shard of a table that this process holds.

    Args:
        name: The name of the table.
        spec: The specification of the table. Its ``max_rows`` counts the rows of all
            shards.
        limits: The bounds of this process.

    Raises:
        ValueError: ``max_rows`` is less than the number of shards. The message names
            the table.
    """
    shard, shards = spec.shard
    options = shard_options(spec.options, (shards, shard), name)
    bounds = [rows for rows in (options.max_rows, limits.max_rows) if rows is not None]
    bounded = bool(bounds)
    if spec.lossless:
        keeps = limits.eviction if limits.cold_store is not None else None
        limits = replace(limits, eviction=keeps, expiry=None, admission=None)
    return replace(
        options,
        max_rows=min(bounds, default=None),
        eviction=options.eviction or (limits.eviction if bounded else None),
        expiry=options.expiry or limits.expiry,
        admission=options.admission or limits.admission,
        cold_store=limits.cold_store if bounded else None,
        missing="init",  # a client reads an id without a row as its initial row
    )
