"""The reads and updates of rows that a client sends.

They need neither gRPC nor protobuf.

Tests: tests/service/test_several_tables.py.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

InitialRows = tuple[Tensor, Tensor]
"""Distinct ids, (n,) int64, and their initial rows, (n, dim) float32."""


class RowRead(NamedTuple):
    """The rows of one table that are read.

    Args:
        table: The name of the table.
        ids: (N,) int64. The ids whose rows are read.
        missing: The row of an id without a row: its initial row (``"init"``) or zeros.
            Default: ``"init"``.
    """

    table: str
    ids: Tensor
    missing: Literal["init", "zeros"] = "init"


class RowUpdate(NamedTuple):
    """One update of one table: one step of its clock and one step of its optimizer,
    also without ids.

    Args:
        table: The name of the table.
        ids: (N,) int64. The ids whose rows are updated.
        grads: (N, dim) float32. The gradients.
        learning_rate: The learning rate of this update. Default: None, that of the
            table's optimizer.
    """

    table: str
    ids: Tensor
    grads: Tensor
    learning_rate: float | None = None
