"""Writes of more rows than a table with ``max_rows`` accepts in one call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from torchrec_recstore.store.table import Table

# A part has max_rows / _PARTS rows. The last part always stays in memory, whatever its rows, so it must be small.
_PARTS = 8


def insert_all(table: Table, ids: Tensor, weights: Tensor) -> None:
    """Calls :meth:`Table.insert` part by part. If a part fails, the parts before it stay written.

    Args:
        table: The table.
        ids: (N,) int64. The ids whose rows are written.
        weights: (N, columns), float32 or the table's dtype.
    """
    for part in _parts(table, ids):
        table.insert(ids[part], weights[part])


def write_all(table: Table, ids: Tensor, rows: Mapping[str, Tensor]) -> None:
    """Calls :meth:`Table.write_rows` part by part. If a part fails, the parts before it stay written.

    Args:
        table: The table.
        ids: (N,) int64. The ids whose rows are written.
        rows: The rows, in the form that :meth:`Table.read_rows` returns.
    """
    for part in _parts(table, ids):
        table.write_rows(ids[part], {key: value[part] for key, value in rows.items()})


def _parts(table: Table, ids: Tensor) -> Iterator[slice]:
    size = max(1, len(ids))
    if table.options.max_rows is not None:
        size = min(size, max(1, table.options.max_rows // _PARTS))
    return (slice(begin, begin + size) for begin in range(0, max(1, len(ids)), size))
