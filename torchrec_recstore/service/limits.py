"""What whoever holds the rows adds to what clients ask for."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from torchrec_recstore.options import (
    LFU,
    LRU,
    Expiry,
    MinFrequency,
    TableOptions,
    shard_options,
)
from torchrec_recstore.service.spec import TableSpec


@dataclass(frozen=True)
class Limits:
    """Bounds of every table that a process holds, where its specification leaves them open.

    Args:
        max_rows: of each table in this process; a specification may ask for less, not for more.
        eviction: as in :class:`TableOptions`; of tables with a bound.
        expiry: likewise, of all tables.
        admission: likewise.
        cold_store: likewise, of tables with a bound.

    Raises:
        TypeError, ValueError: a value makes no sense; the message names it.
    """

    max_rows: int | None = None
    eviction: LRU | LFU | None = None
    expiry: Expiry | None = None
    admission: MinFrequency | None = None
    cold_store: Hashable | None = None

    def __post_init__(self) -> None:
        # A specification may have the bound that eviction and cold store need.
        TableOptions(
            max_rows=1 if self.max_rows is None else self.max_rows,
            eviction=self.eviction,
            expiry=self.expiry,
            admission=self.admission,
            cold_store=self.cold_store,
        )


def limits_of(options: TableOptions) -> Limits:
    """Those of its bounds that a process can have for all of its tables."""
    return Limits(options.max_rows, options.eviction, options.expiry, options.admission, options.cold_store)


def held_options(name: str, spec: TableSpec, limits: Limits) -> TableOptions:
    """The options of the part of a table that this process holds.

    Args:
        name: of the table.
        spec: whose ``max_rows`` is over all shards.
        limits: of this process.

    Raises:
        ValueError: ``max_rows`` is less than the number of shards; the message names the table.
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
        missing="init",  # a client reads what training would begin with
    )
