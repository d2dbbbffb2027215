"""Writing more rows than a table with a bound takes at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from torchrec_recstore.store.table import Table

_PARTS = 8  # of max_rows: what is written last stays whatever it is, so that had better be little


def insert_all(table: Table, ids: Tensor, weights: Tensor) -> None:
    """As :meth:`Table.insert`, part by part; not all or nothing."""
    for part in _parts(table, ids):
        table.insert(ids[part], weights[part])


def write_all(table: Table, ids: Tensor, rows: Mapping[str, Tensor]) -> None:
    """As :meth:`Table.write_rows`, part by part; not all or nothing."""
    for part in _parts(table, ids):
        table.write_rows(ids[part], {key: value[part] for key, value in rows.items()})


def _parts(table: Table, ids: Tensor) -> Iterator[slice]:
    size = max(1, len(ids))
    if table.options.max_rows is not None:
        size = min(size, max(1, table.options.max_rows // _PARTS))
    return (slice(begin, begin + size) for begin in range(0, max(1, len(ids)), size))
