"""Bounds on what every table keeps: the command's flags, and the table options that they stand for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from common.command import DataError

from torchrec_recstore.options import RedisStore, TableOptions, cold_store_of_flag, options_of_flags

Eviction = Literal["lru", "lfu"]


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Which rows a table keeps, in memory and at all; without any, every row that it has made.

    Attributes:
        max_rows: rows that each table keeps in memory, over all ranks.
        eviction: which rows leave when there are more; LRU where ``max_rows`` stands alone.
        half_life_steps: of LFU's frequencies.
        expire_steps: rows that no step has looked up for longer leave.
        min_frequency: steps that look an id up before it gets its row.
        cold_store: URL of a Redis server or a path for RocksDB, where evicted rows go.
    """

    max_rows: int | None = None
    eviction: Eviction | None = None
    half_life_steps: int | None = None
    expire_steps: int | None = None
    min_frequency: int | None = None
    cold_store: str | None = None

    def flags(self) -> dict[str, int | str]:
        """The flags that are set, and their values."""
        return {f"--{name.replace('_', '-')}": value for name, value in asdict(self).items() if value is not None}

    def check(self) -> None:
        """Finds what the tables would refuse.

        Raises:
            DataError: a bound does not fit another, or makes no sense.
        """
        try:
            self.options()
        except ValueError as error:
            raise DataError(str(error)) from error

    def options(self, seed: int = 0) -> TableOptions:
        """The options of each table."""
        return options_of_flags(**asdict(self), seed=seed)

    def shown(self) -> dict[str, int | str | None]:
        """The bounds as they may be written down: a URL without its credentials."""
        store = None if self.cold_store is None else cold_store_of_flag(self.cold_store)
        return asdict(self) | ({"cold_store": store.public_url} if isinstance(store, RedisStore) else {})
