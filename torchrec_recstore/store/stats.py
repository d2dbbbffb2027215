from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from torchrec_recstore.display import html_table, text_table


@dataclass(frozen=True)
class TableStats:
    """Statistics of a table: its size, and counts of its operations.

    Counts are numbers of distinct ids in a step: a hundred new ids are a hundred misses. A training step is counted
    when its backward has run, when its graph has been freed, or when the statistics are read. Evaluation lookups are
    not counted.

    Args:
        rows: The number of rows in memory.
        cold_rows: The number of rows in the cold store. It is 0 for a shared cold store.
        bytes: The size in bytes of the memory for rows with their state, index and bookkeeping, for the counter of
            admission, and for the filter of the cold store.
        lookups: The number of ids that training steps looked up.
        hits: The number of these ids that had a row.
        misses: The number of these ids that had no row in memory.
        inserts: The number of rows created by training lookups, ``update`` and ``insert``. Rows that were brought back
            from a cold store are not included.
        refused: The number of misses for which admission created no row.
        evicted: The number of rows that were evicted from memory.
        expired: The number of rows that expired.
        cold_hits: The number of misses that were found in the cold store.
        updates: The number of rows that a backward or ``update`` has changed.
        steps: The number of training lookups.
        refused_times: The number of calls of ``set_time`` with a time that was refused. See ``Expiry.max_jump_s``.
    """

    rows: int = 0
    cold_rows: int = 0
    bytes: int = 0
    lookups: int = 0
    hits: int = 0
    misses: int = 0
    inserts: int = 0
    refused: int = 0
    evicted: int = 0
    expired: int = 0
    cold_hits: int = 0
    updates: int = 0
    steps: int = 0
    refused_times: int = 0


class StatsByTable(dict[str, TableStats]):
    """Statistics by the name of the table, which are shown as a table, also in notebooks."""

    def __str__(self) -> str:
        return text_table(*self._shown()) if self else "{}"

    def _repr_html_(self) -> str:
        return html_table(*self._shown())

    def _shown(self) -> tuple[list[str], list[list[str]]]:
        """Returns the columns and rows. Counts that are 0 for all tables are left out."""
        counts = [f.name for f in fields(TableStats) if f.name not in ("lookups", "misses", "hits")]
        always = ("rows", "bytes", "steps")
        names = [name for name in counts if name in always or any(getattr(each, name) for each in self.values())]
        columns = ["table", *(name.replace("_", " ") for name in names), "hit rate"]
        cells = [
            [table, *(f"{getattr(each, name):,}" for name in names), f"{each.hits / max(each.lookups, 1):.1%}"]
            for table, each in self.items()
        ]
        return columns, cells


def combined(shards: Iterable[TableStats]) -> TableStats:
    """Returns the statistics of a table from those of its shards, which hold different rows.

    Each count is the sum over the shards. ``steps`` and ``refused_times`` are the maximum.

    Args:
        shards: The statistics of at least one shard.
    """
    shards = list(shards)
    total = {f.name: sum(getattr(stats, f.name) for stats in shards) for f in fields(TableStats)}
    most = {name: max(getattr(stats, name) for stats in shards) for name in ("steps", "refused_times")}
    return TableStats(**(total | most))
