from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class TableStats:
    """What a table holds and has done. Counts are of distinct ids in a step: a hundred new ids are a hundred misses.

    A training step is counted when its backward has run, or its graph is gone, or its table is asked for these numbers.
    Evaluation lookups are not counted.

    Args:
        rows: resident rows.
        cold_rows: rows in the cold store; 0 where it is shared, and its rows are no table's alone.
        bytes: memory of rows with their state, index and bookkeeping, admission's counter and the cold store's filter.
        lookups: ids that training steps looked up.
        hits: of these, those that had a row.
        misses: of these, those that had none.
        inserts: rows made, by training lookups, ``update`` and ``insert``; those that a cold store had are not made.
        refused: of the misses, ids that admission held back.
        evicted: rows that left DRAM.
        expired: rows that left for age.
        cold_hits: misses that were found in the cold store.
        updates: rows that a backward or ``update`` has changed.
        steps: training lookups.
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


def combined(shards: Iterable[TableStats]) -> TableStats:
    """Counts over shards that hold different rows: sums, and the steps of the furthest."""
    shards = list(shards)
    total = {f.name: sum(getattr(stats, f.name) for stats in shards) for f in fields(TableStats)}
    return replace(TableStats(**total), steps=max(stats.steps for stats in shards))
