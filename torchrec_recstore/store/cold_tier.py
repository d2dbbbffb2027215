"""The strategy of a table with a cold store: which rows are in memory, and which are in
the store.

Tests: tests/store/test_cold_tier.py, test_tier_failures.py and test_shared.py.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import cast

import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.options import TableOptions, is_shared
from torchrec_recstore.row_types import values
from torchrec_recstore.store.arguments import among
from torchrec_recstore.store.cold_backends import open_cold_store
from torchrec_recstore.store.cold_expiry import KNOWN_MARKS, ColdExpiry
from torchrec_recstore.store.cold_store import (
    ColdStore,
    ColdStoreError,
    SharedColdStore,
)
from torchrec_recstore.store.memory_tier import Arrival, MemoryTier, ProcessLock
from torchrec_recstore.store.parts import (
    STAMP_BYTES,
    ImageLayout,
    Owned,
    last_steps,
    with_last_steps_up_to,
)
from torchrec_recstore.utils import ceil_div

# the number of ids in one read of a call that may read all rows of a table
_PART = 1 << 16
# the largest number of parts in which release() works; each part takes a mark
_RELEASES = 64
_NO_IDS = torch.empty(0, dtype=torch.int64)
_NO_STAMPS = torch.empty(0, STAMP_BYTES, dtype=torch.uint8)
# the next batch, and the batch after it, which is read while the next one is trained on
_STAGED_BATCHES = 2

_Rows = tuple[Tensor, Tensor]
"""Rows of the store: their ids, ascending, or their positions, and their images."""


class ColdTier(MemoryTier):
    """The strategy of a table with a cold store: it moves rows between memory and the
    store.

    A row is removed from memory after it has been stored, and only if it has not
    changed in the meantime, so that no failure of the store loses a row. When a row is
    brought back to memory, the store keeps an outdated copy.

    A caller that needs rows holds :func:`~.memory_tier.holding` from :meth:`bring`
    until the native pass pins the rows.

    Other jobs write to a shared store too. The tier therefore asks the store for every
    id that is not in memory, and does not count the store's rows. If the last step of a
    shared row is later than this table's clock, the row is brought to memory with the
    current step as its last step.

    ``name`` is that of the shard in the store, and ``owned`` tells which of a shared
    store's ids belong to the shard.
    """

    def __init__(
        self,
        handle: int,
        layout: ImageLayout,
        options: TableOptions,
        name: str,
        owned: Owned | None,
    ) -> None:
        super().__init__(handle)
        self._layout = layout
        self.shared = is_shared(options.cold_store)
        self._owned = owned
        # the mark of the last flush: later changes are not in the shared store
        self._written: int | None = None
        self.expiry = ColdExpiry(options.expiry)
        """The number of rows in the store, and when they expire."""
        self._max_rows = options.max_rows or 0
        self._records_left = options.left_ids is not None
        self._process = os.getpid()
        self.lock = ProcessLock(handle)
        # The store takes one call at a time, and prefetch() calls it without holding
        # self.lock.
        self._calls = threading.Lock()
        self.store: ColdStore = open_cold_store(
            options.cold_store,
            name=name,
            row_bytes=self.image_bytes,
        )
        self.dead = _NO_IDS
        """(n,) int64, ascending. The ids of invalid rows in the store that have yet to
        be deleted.
        """
        # the rows that were read ahead
        self._staged: deque[_Rows] = deque(maxlen=_STAGED_BATCHES)
        self._fetching = 0  # the number of calls of prefetch() that are reading
        # the number of calls of _forget_staged(), by which prefetch() sees that it must
        # discard
        self._forgotten = 0
        # the ids that were written or deleted while prefetch() was reading
        self._outdated: list[Tensor] = []
        self._sweep: Iterator[_Rows] | None = None
        # the rows that the sweep has seen too early, because it reads whole batches
        self._swept_ahead = 0

    @property
    def rows(self) -> int:  # type: ignore[override]
        """The number of rows in the store that are not in memory; 0 for a shared store,
        which is not counted.
        """
        # without the lock, which a read of the store holds
        return 0 if self.shared else self.expiry.rows

    @contextmanager
    def resident(self, ids: Tensor, arrival: Arrival | None = None) -> Iterator[None]:
        """See :meth:`MemoryTier.resident`."""
        with self.lock:
            if arrival is not None:
                self.bring(ids, arrival)
            yield
            if arrival == "lookup":
                self.end_step()

    def bring(self, ids: Tensor, arrival: Arrival) -> None:
        """See :meth:`MemoryTier.bring`."""
        with self.lock:
            absent = ops.table_absent(self._handle, ids)
            if len(absent) == 0:
                return

            is_cold, images, _ = self._fetch(absent, self._staged)
            is_lookup = arrival == "lookup"
            new_ids = absent[~is_cold]
            admitted = len(new_ids)
            if arrival != "write" and admitted:
                admits = ops.table_admits(self._handle, new_ids, is_lookup)
                admitted = int(admits.sum())

            self._make_room(ids, len(images) + admitted)
            if len(images):
                ops.table_bring_back(
                    self._handle,
                    absent[is_cold],
                    images,
                    is_lookup,
                )
                self.expiry.take(images)
            self._outdate(absent)

    def end_step(self) -> None:
        """Ends a training step: in the steps in which the native pass removes expired
        rows, cold rows expire too.

        They are invalid at once, and the following steps delete them from the store.
        Because the training step itself has succeeded, a failure of the store raises no
        error, and a later step tries again.
        """
        if not self.expiry.expires:
            return
        with (
            self.lock,
            suppress(ColdStoreError, MemoryError),
            ops.native_errors("expiry"),
        ):
            valid_from = self.expiry.due(self._handle)
            if valid_from > self.expiry.valid_from:
                self._expire(valid_from)
            if self.store.ascending_snapshots:
                self._sweep_on()

    def prefetch(self, ids: Tensor) -> None:
        """See :meth:`MemoryTier.prefetch`.

        It may run in a separate thread while other calls run. No row moves.
        """
        absent = ops.table_absent(self._handle, ids)
        with self.lock:
            may_be_cold = self._may_be_cold(absent)
            cold_ids = absent[may_be_cold].sort().values
            for staged_ids, _ in self._staged:
                is_staged = among(cold_ids, staged_ids)
                cold_ids = cold_ids[~is_staged]

            self._fetching += 1
            forgotten = self._forgotten
            store = self.store

        fetched: _Rows | None = None
        try:
            if len(cold_ids):
                with self._calls:
                    is_found, images = store.get(cold_ids)
                fetched = cold_ids[is_found], images
        finally:
            with self.lock:
                self._fetching -= 1
                if fetched is not None and forgotten == self._forgotten:
                    self._staged.append(fetched)
                    for outdated_ids in self._outdated:
                        self._unstage(outdated_ids)
                if self._fetching == 0:
                    self._outdated.clear()

    def read(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`MemoryTier.read`."""
        with self.lock:
            cold_ids, images, _ = self._read_with_expired(ids)
            return cold_ids, images

    def read_into(self, rows: Tensor, ids: Tensor) -> None:
        """See :meth:`MemoryTier.read_into`."""
        cold_ids, images = self.read(ids)
        is_cold = among(ids, cold_ids)
        weights, *_ = self._layout.unpacked(images)
        positions = torch.searchsorted(cold_ids, ids[is_cold])
        cold_rows = values(weights[positions])
        rows[is_cold] = cold_rows.to(rows.dtype)

    def export(self, ids: Tensor) -> ops.RowTensors:
        """See :meth:`MemoryTier.export`."""
        cold_ids, images = self.read(ids)
        is_cold = among(ids, cold_ids)
        is_resident = ~is_cold
        resident = super().export(ids[is_resident])
        cold = self._layout.unpacked(images)

        # the places of the ids in a list of all resident rows and then all cold rows
        places = is_resident.cumsum(0) - 1
        resident_rows = int(is_resident.sum())
        cold_places = torch.searchsorted(cold_ids, ids[is_cold])
        places[is_cold] = resident_rows + cold_places

        def joined(number: int, dim: int = 0) -> Tensor:
            rows = torch.cat([resident[number], cold[number]], dim)
            return rows.index_select(dim, places)

        return (
            joined(0),
            joined(1, dim=1),
            joined(2),
            joined(3),
            joined(4),
        )

    def contains(self, ids: Tensor) -> Tensor:
        """See :meth:`MemoryTier.contains`."""
        with self.lock:
            parts = []
            for part in torch.split(ids, _PART):
                cold_ids_of_part, _ = self.read(part)
                parts.append(cold_ids_of_part)
            cold_ids = torch.unique(torch.cat(parts))
        return super().contains(ids) | among(ids, cold_ids)

    def remove(self, ids: Tensor) -> int:
        """See :meth:`MemoryTier.remove`.

        The rows are removed from the store and from memory.
        """
        with self.lock:
            removed = 0
            distinct_ids = torch.unique(ids)
            for part in torch.split(distinct_ids, _PART):
                cold_ids, images, expired_ids = self._read_with_expired(part)

                # before memory: if the store fails, other jobs still use the rows
                if self.shared:
                    with self._calls:
                        self.store.delete(part)
                    self._outdate(part)

                ops.table_note_left(self._handle, cold_ids)
                # before they are deleted, so that no sweep sees them
                self._record_expired(expired_ids)
                self.expiry.take(images)
                resident_rows = int(ops.table_remove(self._handle, part))
                removed += len(cold_ids) + resident_rows
                if not self.shared:
                    self._delete(part)
            return removed

    def set_scores(self, ids: Tensor, scores: Tensor) -> int:
        """See :meth:`MemoryTier.set_scores`.

        Cold rows stay in the store, which gets copies with the new scores.
        """
        with self.lock:
            rows = 0
            for begin in range(0, len(ids), _PART):
                end = begin + _PART
                part_ids = ids[begin:end]
                part_scores = scores[begin:end]
                rows += self._set_cold_scores(part_ids, part_scores)
                rows += super().set_scores(part_ids, part_scores)
            return rows

    def _set_cold_scores(self, ids: Tensor, scores: Tensor) -> int:
        """Sets the scores of those rows of distinct ids that are in the store.

        Returns the number of these rows.
        """
        cold_ids, images = self.read(ids)
        ascending_ids, order = ids.sort()
        places = torch.searchsorted(ascending_ids, cold_ids)
        cold_scores = scores[order[places]]

        scored_images = ops.table_score_images(
            self._handle,
            cold_ids,
            cold_scores,
            images,
        )
        if len(cold_ids):
            self._put(cold_ids, scored_images)
            self._outdate(cold_ids)
            self.expiry.take(images)
            self.expiry.add(scored_images)
        return len(cold_ids)

    def bury_expired(self) -> None:
        """See :meth:`MemoryTier.bury_expired`. It reads the whole store."""
        if self.expiry.expires:
            with self.lock:
                self._bury()

    def ids(self) -> Tensor:
        """See :meth:`MemoryTier.ids`. The ids of the store's rows are included."""
        with self.lock:
            parts = [ops.table_ids(self._handle)]
            if self.shared:
                parts.append(self._shared_ids())
            else:
                for cold_ids, images in self.scan():
                    is_valid = self._valid(cold_ids, images)
                    parts.append(cold_ids[is_valid])
        ids: Tensor = torch.unique(torch.cat(parts))
        return ids

    def scan(self) -> Iterator[_Rows]:
        """Scans the store, with its outdated copies of rows in memory, expired rows,
        and :attr:`dead` rows.
        """
        with self._calls:
            return self.store.scan()

    def cold_ids(self) -> Tensor:
        """Returns the ids of the shared rows that belong to the shard and are not in
        memory: (N,) int64, ascending.
        """
        with self.lock:
            ids = self._shared_ids().sort().values
            is_resident = among(ids, ops.table_ids(self._handle))
            return ids[~is_resident]

    def flush(self) -> None:
        """See :meth:`Table.flush`."""
        with self.lock:
            # The mark is set before the rows are read, so that the next flush writes
            # the rows that change meanwhile.
            mark = ops.table_mark(self._handle)
            if self._written is not None and mark - self._written < KNOWN_MARKS:
                ids = self._changed()
            else:
                ids = ops.table_ids(self._handle)

            for part in torch.split(ids, _PART):
                images = self._images(part)
                self._put(part, images)
            self._written = mark

    def release(self) -> None:
        """Calls :meth:`flush`, and then removes from memory all rows that no pending
        backward needs.
        """
        with self.lock:
            self.flush()
            self._forget_staged()

            resident = ops.table_ids(self._handle)
            rows_of_part = max(_PART, ceil_div(len(resident), _RELEASES))
            for ids in torch.split(resident, rows_of_part):
                images = self._images(ids)
                # A backward in another thread may have changed rows between the flush
                # and the copy of the images.
                is_changed = among(ids, self._changed())
                self._put(ids[is_changed], images[is_changed])
                ops.table_evict(self._handle, ids, images)

    def set_clock(self, steps: int, times: list[int]) -> None:
        """See :meth:`MemoryTier.set_clock`."""
        with self.lock:
            valid_from = self.expiry.valid_from_at(steps)
            if valid_from < self.expiry.valid_from:
                # The rows that have expired by the old clock would be valid again by
                # the new clock.
                self._bury()
                self._sweep = None

            stamps: Tensor | None = None
            if times or self.expiry.loses_ticks(steps):
                stamps = self._stamps()

            self.expiry.valid_from = min(valid_from, self.expiry.valid_from)
            super().set_clock(steps, times)
            if stamps is not None:
                self.expiry.restart(self._handle, stamps)

    def exchange(self, other: MemoryTier) -> None:
        """See :meth:`MemoryTier.exchange`."""
        # the native exchange has checked that both tables have a cold store
        assert isinstance(other, ColdTier)
        self.store, other.store = other.store, self.store
        self.expiry, other.expiry = other.expiry, self.expiry
        self.dead, other.dead = other.dead, self.dead
        for tier in (self, other):
            tier._forget_staged()
            tier._sweep = None

    def close(self) -> None:
        """Closes the store, which deletes its rows unless it is shared.

        Does nothing in a forked process.
        """
        if os.getpid() == self._process:
            self.store.close()

    def _valid(self, ids: Tensor, images: Tensor) -> Tensor:
        """Returns which rows of a scan are valid, (n,) bool: neither expired nor dead.

        Some of them may be outdated copies of rows in memory.
        """
        is_alive = last_steps(images) >= self.expiry.valid_from
        is_dead = among(ids, self.dead)
        return is_alive & ~is_dead

    def _read_with_expired(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what :meth:`read` returns, and the ids of expired rows, (n,) int64,
        which the store still has.
        """
        absent = ops.table_absent(self._handle, ids)
        absent = absent.sort().values
        # Other jobs may have written to a shared store since rows were staged for a
        # training step.
        staged = () if self.shared else self._staged
        is_cold, images, expired = self._fetch(absent, staged)
        return absent[is_cold], images, absent[expired]

    def _fetch(
        self,
        ids: Tensor,
        staged: Iterable[_Rows],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Reads rows that are not in memory from ``staged``, and from the store if they
        are not staged.

        Returns which ids have a row in the store, (N,) bool, the images of these rows,
        in the order of ``ids``, and the positions of ids whose row in the store has
        expired, (n,) int64.
        """
        is_cold = torch.zeros(len(ids), dtype=torch.bool)
        expired = _NO_IDS
        parts = self._fetch_parts(ids, staged)
        if not parts:
            no_images = torch.empty(0, self.image_bytes, dtype=torch.uint8)
            return is_cold, no_images, expired

        positions, images = _in_order(parts)
        if self.expiry.expires:
            is_alive = last_steps(images) >= self.expiry.valid_from
            expired = positions[~is_alive]
            alive = is_alive.nonzero().squeeze(1)
            positions = positions[alive]
            images = images.index_select(0, alive)
        if self.shared:
            steps = ops.table_steps(self._handle)
            images = with_last_steps_up_to(images, steps)
        is_cold[positions] = True
        return is_cold, images, expired

    def _fetch_parts(self, ids: Tensor, staged: Iterable[_Rows]) -> list[_Rows]:
        """Returns the rows that :meth:`_fetch` reads, expired rows included.

        Each part has positions in ``ids``, ascending, and the images of their rows.
        """
        parts: list[_Rows] = []
        # the positions whose rows have yet to be read
        missing = torch.arange(len(ids))
        if len(self.dead):  # a prefetch may have read them
            missing = missing[~among(ids, self.dead)]

        for staged_ids, staged_images in staged:
            if len(staged_ids) == 0 or len(missing) == 0:
                continue
            missing_ids = ids[missing]
            places = torch.searchsorted(staged_ids, missing_ids)
            places.clamp_(max=len(staged_ids) - 1)
            is_staged = staged_ids[places] == missing_ids
            # index_select copies whole rows, and an index in brackets single bytes.
            images = staged_images.index_select(0, places[is_staged])
            parts.append((missing[is_staged], images))
            missing = missing[~is_staged]

        if len(missing):
            may_be_cold = self._may_be_cold(ids[missing])
            missing = missing[may_be_cold]
        if len(missing):
            with self._calls:
                is_found, images = self.store.get(ids[missing])
            parts.append((missing[is_found], images))
        return parts

    def _make_room(self, ids: Tensor, new_rows: int) -> None:
        """Evicts rows other than those of ``ids`` until there is room for new rows."""
        while True:
            leaving = ops.table_leaving(self._handle, ids, new_rows)
            if len(leaving) == 0:
                return

            images = self._images(leaving)
            self._put(leaving, images)
            if len(self.dead):
                ascending = leaving.sort().values
                is_stored_again = among(self.dead, ascending)
                self.dead = self.dead[~is_stored_again]

            evicted = ops.table_evict(self._handle, leaving, images)
            is_done = bool(evicted.all())
            stamps = images[:, -STAMP_BYTES:]
            if not is_done:
                stamps = stamps[evicted]
            if self.expiry.expires:
                # A row can be older than the expiry limit if a pending forward held it
                # when the limit passed. It expires here, because the next expiry step
                # would be too late.
                is_alive = last_steps(stamps) >= self.expiry.valid_from
                expired_rows = int((~is_alive).sum())
                ops.table_count_expired(self._handle, expired_rows)
                stamps = stamps[is_alive]
            if not self.shared:
                self.expiry.add(stamps)

            # A row that a backward changes after its image was copied stays, and others
            # leave.
            if is_done:
                return

    def _images(self, ids: Tensor) -> Tensor:
        """Returns the images of rows in memory."""
        if self.settle is not None:
            self.settle(ids)
        return ops.table_images(self._handle, ids)

    def _put(self, ids: Tensor, images: Tensor) -> None:
        """Writes rows that are in memory.

        They are not staged: :meth:`bring` unstages what it brings to memory.
        """
        if not self.shared:
            # before the put, because a failed put may have stored some rows
            ops.table_note_cold(self._handle, ids)
        with self._calls:
            self.store.put(ids, images)

    def _changed(self) -> Tensor:
        """Returns the ids of the rows in memory that have changed since the last flush:
        (n,) int64, ascending.
        """
        snapshot = ops.snapshot_open(self._handle, self._written)
        try:
            parts = [_NO_IDS]
            while rows_left := ops.snapshot_rows_left(snapshot):
                part_rows = min(rows_left, _PART)
                ids, *_ = ops.snapshot_read(snapshot, part_rows, False)
                parts.append(ids)
        finally:
            ops.snapshot_close(snapshot)
        return torch.cat(parts)

    def _may_be_cold(self, ids: Tensor) -> Tensor:
        if self.shared:
            return torch.ones_like(ids).bool()
        return ops.table_may_be_cold(self._handle, ids)

    def _shared_ids(self) -> Tensor:
        with self._calls:
            ids = cast(SharedColdStore, self.store).ids()
        if self._owned is None:
            return ids
        is_owned = self._owned(ids)
        return ids[is_owned]

    def _delete(self, ids: Tensor) -> None:
        """Deletes the rows of ``ids``, (N,) int64, from the store.

        If the store fails, a later call tries again.
        """
        may_be_cold = ops.table_may_be_cold(self._handle, ids)
        ids = torch.unique(ids[may_be_cold])
        self._outdate(ids)

        self.dead = torch.unique(torch.cat([self.dead, ids]))
        if len(self.dead):
            with suppress(ColdStoreError), self._calls:
                self.store.delete(self.dead)
                self.dead = self.dead[:0]

    def _outdate(self, ids: Tensor) -> None:
        """Discards what has been read of the rows of ``ids``, which come to memory or
        change in the store.
        """
        self._unstage(ids)
        if self._fetching:
            self._outdated.append(ids)

    def _forget_staged(self) -> None:
        """Discards all staged rows, and those that :meth:`prefetch` is reading now."""
        self._forgotten += 1
        self._staged.clear()

    def _unstage(self, ids: Tensor) -> None:
        ascending = ids.sort().values if self._staged else ids
        for _ in range(len(self._staged)):
            staged_ids, images = self._staged.popleft()
            is_outdated = among(staged_ids, ascending)
            stays = (~is_outdated).nonzero().squeeze(1)
            if len(stays) == len(staged_ids):
                self._staged.append((staged_ids, images))
            elif len(stays):
                images = images.index_select(0, stays)
                self._staged.append((staged_ids[stays], images))

    def _expire(self, valid_from: int) -> None:
        cold_rows = self.expiry.expire(valid_from)
        ops.table_count_expired(self._handle, cold_rows)

        old_ids = ops.table_expired(self._handle)
        resident_rows = int(ops.table_remove(self._handle, old_ids))
        ops.table_count_expired(self._handle, resident_rows)

        self._delete(old_ids)
        if not self.store.ascending_snapshots:
            self._bury()

    def _bury(self) -> None:
        """Deletes all expired and dead rows from the store."""
        parts = []
        for ids, images in self.scan():
            is_expired = last_steps(images) < self.expiry.valid_from
            parts.append(ids[is_expired])
        invalid_ids = torch.cat([*parts, self.dead])
        self._record_expired(invalid_ids)
        self._delete(invalid_ids)

    def _record_expired(self, ids: Tensor) -> None:
        """Records ids that expire in the store, if the table records which ids leave
        it.

        The store also has outdated copies of rows in memory, and dead rows, which left
        the table before.
        """
        if not self._records_left:
            return
        is_dead = among(ids, self.dead)
        ids = ids[~is_dead]
        is_resident = ops.table_contains(self._handle, ids)
        ids = ids[~is_resident]
        ops.table_add_left(self._handle, ids, True)

    def _sweep_on(self) -> None:
        """Deletes the expired rows of a part of the store.

        The parts of ``expiry.sweep_steps`` steps cover the store.

        A sweep that reaches the end of the store also renews the filter of the ids that
        may be cold, which would otherwise grow with every id that was ever cold.
        """
        # each row in memory may have an outdated copy in the store
        copies = self.rows + self._max_rows
        rows_of_step = ceil_div(copies, self.expiry.sweep_steps)
        self._swept_ahead = max(0, self._swept_ahead) - rows_of_step
        while self._swept_ahead < 0:
            if self._sweep is None:
                # before the scan, which does not see the rows of later puts
                ops.table_begin_refilter(self._handle)
                self._sweep = self.scan()

            # a failure ends the sweep, and the new filter is not used
            sweep = self._sweep
            self._sweep = None
            batch = next(sweep, None)
            if batch is None:
                ops.table_end_refilter(self._handle)
                self._swept_ahead = 0
                break

            ids, images = batch
            self._swept_ahead += len(ids)
            self._sweep_batch(ids, images)
            self._sweep = sweep

    def _sweep_batch(self, ids: Tensor, images: Tensor) -> None:
        """Deletes the expired rows of a batch of a sweep, and keeps the ids of the
        other rows in the new filter.
        """
        is_expired = last_steps(images) < self.expiry.valid_from
        expired_ids = ids[is_expired]

        # Rows that were written after the scan began are read again, because the scan
        # has their former state.
        is_newer = ops.table_may_be_kept(self._handle, expired_ids)
        newer_ids = expired_ids[is_newer]
        expired_ids = expired_ids[~is_newer]
        if len(newer_ids):
            with self._calls:
                is_found, newer_images = self.store.get(newer_ids)
            is_still_expired = last_steps(newer_images) < self.expiry.valid_from
            newer_cold_ids = newer_ids[is_found]
            still_expired_ids = newer_cold_ids[is_still_expired]
            expired_ids = torch.cat([expired_ids, still_expired_ids])

        ops.table_keep_cold(self._handle, ids[~is_expired])
        if self._records_left and len(expired_ids):
            # The scan also has rows that were deleted after it began. They were
            # recorded then.
            with self._calls:
                is_found, _ = self.store.get(expired_ids)
            self._record_expired(expired_ids[is_found])
        self._delete(expired_ids)

    def _stamps(self) -> Tensor:
        """Returns the stamps of the rows in the store that are not in memory, (N,
        STAMP_BYTES) uint8.
        """
        parts = [_NO_STAMPS]
        if self.rows:
            resident = ops.table_ids(self._handle)
            for ids, images in self.scan():
                is_valid = self._valid(ids, images)
                is_cold = is_valid & ~among(ids, resident)
                parts.append(images[is_cold, -STAMP_BYTES:])
        return torch.cat(parts)


def _in_order(parts: list[_Rows]) -> _Rows:
    """Returns the rows of several parts, at least one, in the order of their
    positions.
    """
    if len(parts) == 1:
        return parts[0]
    all_positions = torch.cat([positions for positions, _ in parts])
    all_images = torch.cat([images for _, images in parts])
    positions, order = all_positions.sort()
    return positions, all_images.index_select(0, order)
