"""Replaces the rows of several tables together."""

from __future__ import annotations

from collections.abc import Iterable

from torchrec_recstore.store.table import Table


def check_replaceable(tables: Iterable[Table]) -> None:
    """Refuses tables whose rows are being written to a checkpoint.

    Raises:
        ValueError: A table is being saved.
    """
    for table in tables:
        if table.is_being_saved:
            raise ValueError(f"table '{table.name}': the table is being saved already: wait until the save has ended")


def exchange_all(pairs: Iterable[tuple[Table, Table]]) -> None:
    """Replaces the rows of the first table of each pair by those of the second, and closes the second.

    The first tables have passed :func:`check_replaceable`.
    """
    for table, fresh in pairs:
        table.exchange_rows(fresh)
        fresh.close()
