"""Replaces the rows of several tables together.

Tests: tests/sharders/test_reset.py, tests/checkpoint/test_checkpoint.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from torchrec_recstore.store.table import Table
from torchrec_recstore.utils import warn_user


def check_replaceable(tables: Iterable[Table]) -> None:
    """Refuses tables whose rows are being written to a checkpoint.

    Raises:
        ValueError: A table is being saved.
    """
    for table in tables:
        if table.is_being_saved:
            raise ValueError(f"table '{table.name}': the table is being saved already: wait until the save has ended")


def check_applied(tables: Iterable[Table]) -> None:
    """Refuses tables with backward passes whose gradients have not been applied yet.

    Raises:
        ValueError: A kernel with ``accumulation_steps`` keeps the gradients of a table.
    """
    for table in tables:
        if waiting := len(table.pending_passes):
            raise ValueError(
                f"table '{table.name}': the gradients of {waiting} backward passes have not been applied yet: call it "
                "after a multiple of accumulation_steps"
            )


def warn_of_pending_passes(tables: Iterable[Table]) -> None:
    """Warns that a saved state lacks the gradients that a kernel with ``accumulation_steps`` keeps of a table."""
    for table in tables:
        if waiting := len(table.pending_passes):
            warn_user(
                f"table '{table.name}': the gradients of {waiting} backward passes have not been applied yet, and are "
                "not saved: save after a multiple of accumulation_steps"
            )
            return


def exchange_all(pairs: Iterable[tuple[Table, Table]]) -> None:
    """Replaces the rows of the first table of each pair by those of the second, and closes the second.

    The first tables have passed :func:`check_replaceable`.
    """
    for table, fresh in pairs:
        table.exchange_rows(fresh)
        fresh.close()
