"""A cold store of a third party: a dict that can be told to fail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_recstore.store import ColdStoreError, open_cold_store


@dataclass(frozen=True)
class DictStoreOptions:
    name: str = "dict"


class DictStore:
    ascending_snapshots = True
    failing = False
    reads = 0
    """The number of ids that were requested from all stores."""

    def __init__(self, row_bytes: int) -> None:
        self.rows: dict[int, Tensor] = {}
        self._row_bytes = row_bytes

    def _check(self) -> None:
        if DictStore.failing:
            raise ColdStoreError("the dict is out of order")

    def get(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        self._check()
        DictStore.reads += len(ids)
        found = torch.tensor([int(i) in self.rows for i in ids], dtype=torch.bool)
        rows = [self.rows[int(i)] for i in ids[found]]
        return found, (
            torch.stack(rows)
            if rows
            else torch.empty(0, self._row_bytes, dtype=torch.uint8)
        )

    def put(self, ids: Tensor, rows: Tensor) -> None:
        self._check()
        self.rows.update(
            {int(i): row.clone() for i, row in zip(ids, rows, strict=True)}
        )

    def delete(self, ids: Tensor) -> None:
        self._check()
        for i in ids.tolist():
            self.rows.pop(i, None)

    def scan(self) -> Iterator[tuple[Tensor, Tensor]]:
        self._check()
        rows = sorted(self.rows.items())
        return ((torch.tensor([i]), row.unsqueeze(0)) for i, row in rows)

    def close(self) -> None:
        self.rows.clear()


@open_cold_store.register
def _(options: DictStoreOptions, *, name: str, row_bytes: int) -> DictStore:
    return DictStore(row_bytes)
