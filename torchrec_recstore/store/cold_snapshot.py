"""The cold rows of a moment, ids ascending."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.ids import among
from torchrec_recstore.store.images import last_steps
from torchrec_recstore.store.tier import ColdTier

_BATCH = 1 << 16

Batches = Iterator[tuple[Tensor, Tensor]]
"""Ids (n,) int64, ascending over all batches, and images (n, image bytes) uint8."""


class ColdSnapshot:
    """The rows that a table has in its cold store, as they are now, to be read while the table goes on.

    Made while nothing moves. A store without ascending snapshots is copied to a temporary file at once, and so is a
    shared one, whose rows nobody has counted.

    Args:
        handle: of the native table.
        tier: of the table.
        left: (N,) int64, ascending: ids that have left memory since a mark, where only what has changed since is wanted
            and that is known; else None. None of a shared store.
        whole: whether all rows are wanted, whose resident ones are read with them, so that copies which are out of date
            can be told.
    """

    def __init__(self, handle: int, tier: ColdTier, left: Tensor | None, *, whole: bool) -> None:
        self.wanted: Tensor | None = None
        """(n,) int64, ascending: the ids in it; None for all that are in the store and not in memory."""
        resident: Tensor | None = None
        if left is not None:
            self.wanted = tier.found(left)
        elif not whole:
            resident = ops.table_ids(handle)
        self.knows_left = not tier.expires
        """Whether the ids are known that have left the store since a mark: those that expire there are not."""
        self.table_rows = tier.rows
        """All that are in the store and not in memory."""
        self.rows = tier.rows if self.wanted is None else len(self.wanted)
        """Those of them that the snapshot has."""
        batches: Batches = iter(())
        if tier.shared:
            self.rows, batches = _spooled(tier, tier.cold_ids())
            self.table_rows = self.rows
        elif self.rows:
            batches = tier.scan() if tier.store.ascending_snapshots else _spooled(tier, self.wanted)[1]
        self._batches = self._filtered(batches, resident, tier.expired_before, tier.dead)

    def next_batch(self) -> tuple[Tensor, Tensor] | None:
        """The next rows; None behind the last one."""
        return next(self._batches, None)

    def _filtered(self, batches: Batches, resident: Tensor | None, expired_before: int, dead: Tensor) -> Batches:
        for ids, images in batches:
            keep = (last_steps(images) >= expired_before) & ~among(ids, dead)
            if self.wanted is not None:
                keep &= among(ids, self.wanted)
            elif resident is not None:
                keep &= ~among(ids, resident)
            if keep.any():
                yield ids[keep], images[keep]


def _spooled(tier: ColdTier, wanted: Tensor | None) -> tuple[int, Batches]:
    """How many rows the store has, or those that are wanted, and a copy of them."""
    file = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the iterator)
    parts = []
    rows = tier.scan() if wanted is None else (tier.read(ids) for ids in torch.split(wanted, _BATCH))
    for ids, images in rows:
        file.write(images.numpy().data)
        parts.append(ids)
    file.flush()
    ids = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
    return len(ids), _sorted(file, ids, tier.image_bytes)


def _sorted(file: BinaryIO, ids: Tensor, image_bytes: int) -> Batches:
    ascending = ids.sort()
    with file:
        if len(ids) == 0:
            return
        images = np.memmap(file, np.uint8, "r", shape=(len(ids), image_bytes))
        for some, places in zip(
            torch.split(ascending.values, _BATCH), torch.split(ascending.indices, _BATCH), strict=True
        ):
            yield some, torch.from_numpy(images[places.numpy()])
