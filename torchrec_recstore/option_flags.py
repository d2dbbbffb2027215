"""The options of tables from the flags of commands and examples.

Tests: tests/examples/test_bounded.py.
"""

from __future__ import annotations

import math
from typing import Literal

from torchrec_recstore.options import (
    LFU,
    LRU,
    Expiry,
    MinFrequency,
    RedisStore,
    RocksDBStore,
    SSDStore,
    TableOptions,
)


def options_of_flags(
    *,
    max_rows: int | None,
    eviction: Literal["lru", "lfu"] | None,
    half_life_steps: int | None,
    lfu_count: Literal["steps", "occurrences"] | None = None,
    expire_steps: int | None,
    expire_seconds: float | None = None,
    min_frequency: int | None,
    cold_store: str | None,
    seed: int = 0,
) -> TableOptions:
    """Returns the options of a table from the flags ``--max-rows``, ``--eviction`` and
    so on.

    None: the flag is absent.

    Raises ValueError if a flag needs another flag that is absent, or has an invalid
    value.
    """
    for flag, number in (
        ("--max-rows", max_rows),
        ("--half-life-steps", half_life_steps),
        ("--expire-steps", expire_steps),
        ("--min-frequency", min_frequency),
    ):
        if number is not None and number < 1:
            raise ValueError(f"{flag} must be at least 1, got {number}")
    for flag, value in (("--eviction", eviction), ("--cold-store", cold_store)):
        if value is not None and max_rows is None:
            raise ValueError(
                f"{flag} needs --max-rows: a table without a bound evicts nothing"
            )
    if expire_seconds is not None and not 0 < expire_seconds < math.inf:
        raise ValueError(
            f"--expire-seconds must be positive and finite, got {expire_seconds}"
        )
    if expire_steps is not None and expire_seconds is not None:
        raise ValueError("--expire-steps and --expire-seconds cannot be used together")
    for flag, needs_lfu in (
        ("--half-life-steps", half_life_steps),
        ("--lfu-count", lfu_count),
    ):
        if needs_lfu is not None and eviction != "lfu":
            raise ValueError(f"{flag} needs --eviction lfu")
    policy: LRU | LFU | None = None
    if eviction == "lfu":
        policy = LFU(half_life_steps, lfu_count or "steps")
    elif max_rows is not None:
        policy = LRU()
    expiry: Expiry | None = None
    if expire_steps is not None or expire_seconds is not None:
        expiry = Expiry(expire_steps, expire_seconds)
    admission: MinFrequency | None = None
    if min_frequency is not None:
        admission = MinFrequency(min_frequency)
    return TableOptions(
        seed=seed,
        max_rows=max_rows,
        eviction=policy,
        expiry=expiry,
        admission=admission,
        cold_store=None if cold_store is None else cold_store_of_flag(cold_store),
    )


def cold_store_of_flag(url_or_path: str) -> RedisStore | RocksDBStore | SSDStore:
    """Returns the options of the cold store that ``--cold-store`` names by a path,
    ``rocksdb://PATH`` or Redis' URL.
    """
    if url_or_path.startswith("rocksdb://"):
        return RocksDBStore(url_or_path.removeprefix("rocksdb://"))
    if "://" in url_or_path:
        return RedisStore(url_or_path)
    return SSDStore(url_or_path)
