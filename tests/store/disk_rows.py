"""Rows of cold stores on a disk, and a check of all rows of a store."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_recstore.store import ColdStore

ROW_BYTES = 512


def random_rows(n: int, seed: int = 0) -> Tensor:
    return torch.randint(
        0,
        256,
        (n, ROW_BYTES),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(seed),
    )


def assert_has(store: ColdStore, ids: Tensor, rows: Tensor) -> None:
    """Checks that a get and a scan return exactly these rows."""
    found, got = store.get(ids)
    assert found.all()
    assert torch.equal(got, rows)
    scanned = list(store.scan())
    ids, order = ids.sort()
    assert torch.equal(torch.cat([batch for batch, _ in scanned]), ids)
    assert torch.equal(torch.cat([batch for _, batch in scanned]), rows[order])
