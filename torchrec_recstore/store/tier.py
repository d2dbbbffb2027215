from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Literal

import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.options import TableOptions
from torchrec_recstore.store.cold import ColdStore, open_cold_store
from torchrec_recstore.store.images import last_steps

Arrival = Literal["lookup", "update", "write"]
"""Why rows are wanted: by a training step, by an update, or to be written. Admission has no say in the last."""

_STAGED_BATCHES = 2  # the batch that is next, and the one that is fetched while that is trained on


class ColdTier:
    """Moves the rows of one shard between memory and its cold store.

    A row leaves memory when it is in the store, and only if it has not changed on the way, so that no failure of the
    store loses one. When it comes back its copy stays behind, out of date: what is in memory counts.

    Calls that need rows hold :func:`holding` from bringing them until they are pinned by the native pass.

    Args:
        handle: of the native table.
        options: the table's, with ``cold_store``.
        name: of the shard, see :func:`torchrec_recstore.store.open_cold_store`.
    """

    def __init__(self, handle: int, options: TableOptions, name: str) -> None:
        self._handle = handle
        self._expiry = options.expiry
        self._max_rows = options.max_rows or 0
        self.lock = threading.RLock()
        self.image_bytes = ops.table_image_bytes(handle)
        self.store: ColdStore = open_cold_store(options.cold_store, name=name, row_bytes=self.image_bytes)
        self.rows = 0
        """That are in the store and not in memory."""
        self._staged: deque[tuple[Tensor, Tensor]] = deque(maxlen=_STAGED_BATCHES)  # ids, ascending, and images
        self._fetching = 0
        self._outdated: list[Tensor] = []  # ids that were written or deleted while others are being fetched
        self._sweep: Iterator[tuple[Tensor, Tensor]] | None = None

    def bring(self, ids: Tensor, arrival: Arrival) -> None:
        """Brings the rows of ``ids``, (N,) int64, into memory, and makes room for those that are new.

        Raises:
            ValueError: they need more rows at once than ``max_rows``.
            ColdStoreError: the store fails; every row is where it was.
        """
        with self.lock:
            if arrival == "lookup":
                self._expire()
            absent = ops.table_absent(self._handle, ids)
            if len(absent) == 0:
                return
            found, images = self._fetch(absent)
            new = absent[~found]
            admitted = len(new)
            if arrival != "write" and admitted:
                admitted = int(ops.table_admits(self._handle, new, arrival == "lookup").sum())
            self._make_room(ids, len(images) + admitted)
            if len(images):
                ops.table_bring_back(self._handle, absent[found], images, arrival == "lookup")
                self.rows -= len(images)
                self._unstage(absent[found])

    def prefetch(self, ids: Tensor) -> None:
        """Reads the cold rows of a batch that is soon to be looked up, so that :meth:`bring` need not wait for them.

        May run in a thread of its own beside everything else; nothing moves.

        Args:
            ids: (N,) int64.

        Raises:
            ColdStoreError: the store fails.
        """
        absent = ops.table_absent(self._handle, ids)
        with self.lock:
            wanted = absent[ops.table_may_be_cold(self._handle, absent)]
            for staged, _ in self._staged:
                wanted = wanted[~among(wanted, staged)]
            self._fetching += 1
        fetched: tuple[Tensor, Tensor] | None = None
        try:
            if len(wanted):
                found, images = self.store.get(wanted)
                ascending = wanted[found].sort()
                fetched = ascending.values, images[ascending.indices]
        finally:
            with self.lock:
                self._fetching -= 1
                if fetched is not None:
                    self._staged.append(fetched)
                    for outdated in self._outdated:
                        self._unstage(outdated)
                if self._fetching == 0:
                    self._outdated.clear()

    def read(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of ``ids``, (N,) int64, that are in the store and not in memory; nothing moves.

        Returns:
            Their ids, (n,) int64, ascending, and images, (n, image bytes) uint8.
        """
        with self.lock:
            absent = ops.table_absent(self._handle, ids).sort().values
            found, images = self._fetch(absent)
            return absent[found], images

    def remove(self, ids: Tensor) -> int:
        """Forgets the rows of ``ids``, (N,) int64, here and in memory; returns how many there were."""
        with self.lock:
            cold = len(self.read(ids)[0])
            self._delete(ids)
            self.rows -= cold
            return cold + int(ops.table_remove(self._handle, ids))

    def ids(self) -> Tensor:
        """(N,) int64: the ids of all rows, here and in memory, ascending."""
        with self.lock:
            parts = [ops.table_ids(self._handle), *(ids for ids, _ in self.store.scan())]
        ids: Tensor = torch.unique(torch.cat(parts))
        return ids

    def exchange(self, other: ColdTier) -> None:
        """Exchanges the stores with another tier, when their native tables exchange rows."""
        self.store, other.store = other.store, self.store
        self.rows, other.rows = other.rows, self.rows
        for tier in (self, other):
            tier._staged.clear()
            tier._sweep = None

    def close(self) -> None:
        """Forgets all rows of the store."""
        self.store.close()

    def _fetch(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Which of ``ids``, distinct and not in memory, are in the store: (N,) bool; and the images of these."""
        found = torch.zeros(len(ids), dtype=torch.bool)
        images = torch.empty(len(ids), self.image_bytes, dtype=torch.uint8)
        unknown = ops.table_may_be_cold(self._handle, ids)
        for staged_ids, staged_images in self._staged:
            here = among(ids, staged_ids) & unknown
            images[here] = staged_images[torch.searchsorted(staged_ids, ids[here])]
            found |= here
            unknown &= ~here
        if unknown.any():
            places = unknown.nonzero().squeeze(1)
            is_there, rows = self.store.get(ids[places])
            images[places[is_there]] = rows
            found[places[is_there]] = True
        return found, images[found]

    def _make_room(self, ids: Tensor, new_rows: int) -> None:
        # Rows that a backward has changed since they were copied have stayed: others go then.
        while len(leaving := ops.table_leaving(self._handle, ids, new_rows)):
            images = ops.table_images(self._handle, leaving)
            self.store.put(leaving, images)
            self._outdate(leaving)
            self.rows += int(ops.table_evict(self._handle, leaving, images))

    def _delete(self, ids: Tensor) -> None:
        ids = torch.unique(ids)
        ids = ids[ops.table_may_be_cold(self._handle, ids)]
        if len(ids):
            self.store.delete(ids)
            self._outdate(ids)

    def _outdate(self, ids: Tensor) -> None:
        """What has been read of ``ids`` is no longer what the store has."""
        self._unstage(ids)
        if self._fetching:
            self._outdated.append(ids)

    def _unstage(self, ids: Tensor) -> None:
        ascending = ids.sort().values
        for place, (staged_ids, images) in enumerate(self._staged):
            stays = ~among(staged_ids, ascending)
            if not stays.all():
                self._staged[place] = staged_ids[stays], images[stays]

    def _expire(self) -> None:
        """Lets old rows go: in memory those that it is the native table's turn to look at, here as large a part."""
        if self._expiry is None:
            return
        old = ops.table_expired(self._handle)
        if len(old):
            self._delete(old)
            ops.table_count_expired(self._handle, int(ops.table_remove(self._handle, old)))
        copies = self.rows + self._max_rows  # rows in memory may have one that is out of date
        seen, part = 0, -(-4 * copies // self._expiry.steps)
        while seen < part:
            if self._sweep is None:
                self._sweep = self.store.scan()
            batch = next(self._sweep, None)
            if batch is None:
                self._sweep = None
                break
            seen += len(batch[0])
            # The scan may be older than the rows: those that seem old are read again.
            suspects = batch[0][self._age(batch[1]) > self._expiry.steps]
            ids, images = self.read(suspects)
            ids = ids[self._age(images) > self._expiry.steps]
            if len(ids):
                self._delete(ids)
                self.rows -= len(ids)
                ops.table_count_expired(self._handle, len(ids))

    def _age(self, images: Tensor) -> Tensor:
        return ops.table_steps(self._handle) - last_steps(images)


@contextmanager
def holding(tiers: Sequence[ColdTier]) -> Iterator[None]:
    """Keeps the rows of several tables from moving."""
    with ExitStack() as stack:
        for tier in sorted(tiers, key=lambda tier: tier._handle):
            stack.enter_context(tier.lock)
        yield


def among(ids: Tensor, ascending: Tensor) -> Tensor:
    """Which of ``ids``, (N,), are in ``ascending``, (M,): (N,) bool."""
    if len(ascending) == 0:
        return torch.zeros(len(ids), dtype=torch.bool)
    places = torch.searchsorted(ascending, ids).clamp_(max=len(ascending) - 1)
    return ascending[places] == ids
