"""A shared cold store for the tables of this process.

Its rows are in dicts, and its calls can be made to fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.store.dict_store import DictStore
from torchrec_recstore.store import ColdStoreError, open_cold_store

ROWS: dict[tuple[str, str], dict[int, Tensor]] = {}
"""The rows of each store, by the name of the shared rows and the name of the store."""
WRITTEN: list[int] = []
"""The ids that have been put, over all stores."""


@dataclass(frozen=True)
class SharedDictOptions:
    shared: str = "dict"


class SharedDictStore(DictStore):
    ascending_snapshots = False

    def __init__(self, rows: dict[int, Tensor], row_bytes: int) -> None:
        super().__init__(row_bytes)
        self.rows = rows
        self._closed = False

    def put(self, ids: Tensor, rows: Tensor) -> None:
        super().put(ids, rows)
        WRITTEN.extend(ids.tolist())

    def ids(self) -> Tensor:
        self._check()
        return torch.tensor(list(self.rows), dtype=torch.int64)

    def scan(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (
            (ids[found], rows)
            for ids in self.ids().split(100)
            for found, rows in (self.get(ids),)
        )

    def _check(self) -> None:
        super()._check()
        if self._closed:
            raise ColdStoreError("closed")

    def close(self) -> None:
        """Closes the store. It keeps its rows."""
        self._closed = True


@open_cold_store.register
def _(options: SharedDictOptions, *, name: str, row_bytes: int) -> SharedDictStore:
    return SharedDictStore(ROWS.setdefault((options.shared, name), {}), row_bytes)
