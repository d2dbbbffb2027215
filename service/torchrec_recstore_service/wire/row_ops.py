"""Typed wrappers of the native ops on the rows of tables by name.

The core has the ops and their fake versions, because its library registers them.

Tests: tests/test_ops.py and tests/service/test_messages.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchrec_recstore import ops  # noqa: F401  (the import loads the library)

_ops = torch.ops.recstore_ops

row_api: Callable[[], int] = _ops.row_api.default
"""() -> the address of the functions on rows that a native library calls: RowApi in
csrc/ops/row_api.h.
"""
rows_begin: Callable[[int, Tensor], Tensor] = _ops.rows_begin.default
"""(group, ids (N,) int64) -> the context of a step that looks up the rows of ids, for
the update, without the rows.
"""
rows_empty: Callable[[int, int], Tensor] = _ops.rows_empty.default
"""(n, row bytes) -> (n, row bytes) uint8: uninitialised memory of the buffer pool."""
rows_read: Callable[[Sequence[int], Sequence[Tensor], Sequence[Tensor]], None] = (
    _ops.rows_read.default
)
"""(groups of one feature, the ids (n,) int64 of each group, the memory (n, columns)
float32 of its rows).

Reads the rows of each group, without a step.
"""
rows_update: Callable[
    [
        Sequence[int],
        Sequence[Tensor],
        Sequence[Tensor],
        Sequence[float],
    ],
    None,
] = _ops.rows_update.default
"""(groups of one feature, the ids (n,) int64 of each group, their gradients (n,
columns) float32, learning rates).

Makes a step and an update of each group, also of those without ids. The groups have no
table in common.
"""
rows_put: Callable[
    [
        Sequence[Tensor],
        Tensor | None,
        Sequence[int],
        Tensor,
        int,
    ],
    None,
] = _ops.rows_put.default
"""(out, places, counts, window, at).

Writes the rows of a window of a stream to memory. The stream has the rows of one table
after the other, ``counts[t]`` rows of the table ``t``, and those of each table begin at
a multiple of 4 bytes.

``window``, (bytes,) uint8, begins at the byte ``at`` of the stream. ``out[t]``, (n, row
bytes) uint8, is the memory of the rows of table ``t``. ``places``, (rows of the
stream,) int64, is the index of each row in the memory of all tables together, table by
table. None means all rows, in their order.
"""
rows_take: Callable[
    [
        Sequence[Tensor],
        Tensor | None,
        Sequence[int],
        Tensor,
        int,
    ],
    None,
] = _ops.rows_take.default
"""(rows, places, counts, window, at).

Writes the rows of a stream to a window. See :data:`rows_put`.
"""
ids_split: Callable[
    [Tensor, Sequence[int], Tensor, int], tuple[Tensor, Tensor, Tensor]
] = _ops.ids_split.default
"""(ids (N,) int64, number of ids of each table, owner of each slot (slots,) int64,
number of owners) -> the ids owner by owner, (N,), their positions, (N,), ascending for
each owner, and the number of ids of each owner and table, (owners, tables).

The slot of an id is its ``mix_ids(ids, True)`` modulo the number of slots.
"""
ids_distinct: Callable[[Tensor, Sequence[int]], tuple[Tensor, Tensor, Tensor]] = (
    _ops.ids_distinct.default
)
"""(ids (N,) int64, number of ids of each table) -> the distinct ids of each table,
(n,), in the order in which they first occur, the position of each id among the distinct
ids of its table, (N,), and the number of distinct ids of each table, (tables,).
"""
