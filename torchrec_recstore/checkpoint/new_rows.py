"""New rows in the place of a model's: all tables or none."""

from __future__ import annotations

from collections.abc import Iterable

from torchrec_recstore.store import Table


def check_replaceable(tables: Iterable[Table]) -> None:
    """Refuses tables whose rows are being written to a checkpoint.

    Raises:
        ValueError: there is one.
    """
    for table in tables:
        if table.is_being_saved:
            raise ValueError(f"table '{table.name}': it is being saved already: wait for that first")


def exchange_all(pairs: Iterable[tuple[Table, Table]]) -> None:
    """Gives each first table the rows of the second, which is closed; they have passed :func:`check_replaceable`."""
    for table, fresh in pairs:
        table.exchange_rows(fresh)
        fresh.close()
