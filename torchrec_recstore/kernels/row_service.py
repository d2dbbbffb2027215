"""The interface between kernels and the client that reads and updates their rows elsewhere, and one table of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from torchrec_recstore.optim import Optimizer
from torchrec_recstore.options import TableOptions
from torchrec_recstore.row_types import value_dtype
from torchrec_recstore.rpc.row_requests import RowRead, RowUpdate
from torchrec_recstore.store import TableStats

_handles = itertools.count(-1, -1)  # the handles of native tables are positive


class RowService(Protocol):
    """A client of named tables, as kernels use it: ``RecStoreClient``. The methods may be called from any thread."""

    def init_data(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype = ...,
        *,
        optimizer: Optimizer = ...,
        options: TableOptions = ...,
    ) -> None:
        """Creates a table without rows. A table that was created with the same arguments is not changed."""

    def pull_each(self, reads: Sequence[RowRead]) -> list[Tensor]:
        """Reads rows of several tables: (N, dim) in the table's dtype for each read."""

    def prefetch_each(self, reads: Sequence[RowRead]) -> int:
        """Starts :meth:`pull_each` in another thread and returns a handle for :meth:`wait_for_each`."""

    def wait_for_each(self, handle: int) -> list[Tensor]:
        """Waits for :meth:`prefetch_each` and returns the rows, once, or raises its error."""

    def update_each(self, updates: Sequence[RowUpdate]) -> None:
        """Updates several tables."""

    def update_each_async(self, updates: Sequence[RowUpdate]) -> int:
        """Starts :meth:`update_each` in another thread, after all earlier updates; returns a handle for ``wait``."""

    def wait(self, handle: int) -> None:
        """Waits for an update, or raises its error."""

    def stats(self, name: str) -> TableStats:
        """Returns the statistics of a table."""


class RemoteTable:
    """A table whose rows a client reads and updates elsewhere, usually on parameter servers.

    The constructor creates the table if it does not exist. All servers apply ``optimizer``; gradients are clipped by
    value before they are sent, because clipping by value comes before the sum over an id.

    Args:
        client: The client. It must stay open.
        name: The name of the table, on which its initial rows depend.
        shape: (rows, dim). ``rows`` is a hint.
        dtype: The data type of the weights.
        optimizer: The optimizer of the updates.
        options: The options of the table. ``cold_store`` must be None.
        staleness: The number of updates of this process that may be in progress while rows are read. With 0, each
            backward waits for its update. Default: 0.

    Raises:
        TypeError, ValueError: An argument is not valid, or the table exists with another specification.
        ServiceError: A server cannot be reached, or refuses the table.
    """

    def __init__(
        self,
        client: RowService,
        name: str,
        shape: tuple[int, int],
        dtype: torch.dtype,
        optimizer: Optimizer,
        options: TableOptions,
        staleness: int = 0,
    ) -> None:
        if isinstance(staleness, bool) or not isinstance(staleness, int):
            raise TypeError(f"staleness must be an int, got {type(staleness).__name__}")
        if staleness < 0:
            raise ValueError(f"staleness must not be negative, got {staleness}")
        self.client = client
        self.name = name
        self.dim = shape[1]
        self.columns = range(self.dim)
        self.dtype = dtype
        self.optimizer = optimizer
        self.options = options
        self.staleness = staleness
        self.handle = next(_handles)
        """A number that no other table has, native tables included."""
        client.init_data(name, shape, dtype, optimizer=replace(optimizer, max_gradient=None), options=options)

    def lookup(self, ids: Tensor) -> Tensor:
        """Reads rows for evaluation: (N, dim) in the dtype of lookups. ``ids``: (N,) int64."""
        return self.client.pull_each([RowRead(self.name, ids, self.options.missing)])[0]

    @property
    def value_dtype(self) -> torch.dtype:
        """The dtype of the rows that are read."""
        return value_dtype(self.dtype)

    def __repr__(self) -> str:
        return f"RemoteTable({self.name!r}, dim={self.dim}, client={self.client!r})"
