"""The interface of tables whose rows a client reads and updates elsewhere.

``torchrec-recstore-service`` has such a client, ``RecStoreClient``, and the groups of
its tables.

Tests: tests/service/test_remote_groups.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from torchrec_recstore.optim import Optimizer
from torchrec_recstore.options import TableOptions
from torchrec_recstore.store import TableStats


class RemoteTable(Protocol):
    """A table of a :class:`RowService`, as modules and sharders use it."""

    name: str
    dim: int
    optimizer: Optimizer
    handle: int
    """A number that no other table has, native tables included."""

    @property
    def client(self) -> RowService:
        """The client of the table."""

    @property
    def value_dtype(self) -> torch.dtype:
        """The dtype of the rows that are read."""


class RowService(Protocol):
    """A client of named tables, as models use it.

    The methods may be called from any thread.
    """

    def table(
        self,
        name: str,
        shape: tuple[int, int],
        dtype: torch.dtype,
        optimizer: Optimizer,
        options: TableOptions,
        staleness: int = 0,
    ) -> RemoteTable:
        """Returns a table, and creates it if it does not exist."""

    def pooled_group(
        self, tables: Sequence[Any], feature_tables: Sequence[int], pooling: Any
    ) -> Any:
        """Returns a group of this client's tables, called as a ``PooledGroup`` is."""

    def sequence_group(self, tables: Sequence[Any]) -> Any:
        """Returns a group of this client's tables, called as a ``SequenceGroup`` is."""

    def stats(self, name: str) -> TableStats:
        """Returns the statistics of a table."""
