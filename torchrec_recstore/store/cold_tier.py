from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import cast

import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.options import Expiry, TableOptions, is_shared
from torchrec_recstore.row_types import values
from torchrec_recstore.store.arguments import among
from torchrec_recstore.store.cold_backends import open_cold_store
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
    last_marks,
    last_steps,
    with_last_steps_up_to,
)

# the number of ids in one read of a call that may read all rows of a table
_PART = 1 << 16
# the least number of marks that csrc/snapshot/changes.h remembers; the largest is twice this and
# one
_KNOWN_MARKS = 127
_MARKS = 1 << 29  # more than there are marks
# the largest number of parts in which release() works; each part takes a mark
_RELEASES = 64
_NO_STAMPS = torch.empty(0, STAMP_BYTES, dtype=torch.uint8)
_TIMES = 7  # ops.table_times: the numbers before the steps and times
# the next batch, and the batch after it, which is read while the next one is trained on
_STAGED_BATCHES = 2


class ColdExpiry:
    """Counts the rows that are in the store and not in memory, by the step in which
    they expire and their last change.

    That is the step in which the native pass would remove them (csrc/bounds/eviction.h,
    csrc/bounds/wall_clock.h). The last change is a mark of csrc/snapshot/changes.h. A key of the counts
    is that of the step, times _MARKS, plus this mark.
    """

    def __init__(self, expiry: Expiry | None) -> None:
        self._by_time = expiry is not None and expiry.seconds is not None
        self._steps = 0 if expiry is None or expiry.steps is None else expiry.steps
        # rows expire in the steps that are multiples of this number
        self._every = max(1, self._steps // 4)
        self.expires = expiry is not None
        """Whether unused rows expire."""
        self.before = 0
        """A row has expired if its last step is earlier than this step."""
        self.rows = 0
        """The number of rows in the store that are not in memory.

        For a shared store it means nothing.
        """
        self._counts: Counter[int] = Counter()
        # Stamps that have yet to be counted, and 1 or -1. To count those of each step
        # and table would take longer than to write their rows to an SSD.
        self._waiting: list[tuple[int, Tensor]] = []
        self._rows_waiting = 0
        self._known_from = 0  # changes before this mark are counted together
        # For an expiry by time: the ticks, each a step, ascending. Rows with no tick
        # between their last steps expire together. They are counted under the tick
        # after their last step, and before it is known, under -1 - last step.
        self._ticks: list[int] = []

    @property
    def sweep_steps(self) -> int:
        """The number of steps for a sweep over the store: half of those until rows
        expire.

        A faster sweep takes more time of each step; a slower one leaves more expired
        rows in the store.
        """
        if not self._by_time:
            return max(1, self._steps // 2)
        return max(1, (self._ticks[-1] - self._ticks[0]) // 2) if self._ticks else 1

    def counts(self, stamps: Tensor) -> Counter[int]:
        """Returns how many of the rows with these images, or the last STAMP_BYTES of
        these, are counted together.
        """
        keys, marks = torch.zeros(len(stamps), dtype=torch.int64), last_marks(stamps)
        if self._by_time:
            ticks = torch.tensor(self._ticks, dtype=torch.int64)
            after = torch.searchsorted(ticks, last_steps(stamps), right=True)
            known = after < len(ticks)
            keys = -1 - last_steps(stamps)
            keys[known] = ticks[after[known]]
        elif self.expires:  # A row expires in the first multiple of _every above its last step plus _steps.
            keys = (last_steps(stamps) + self._steps) // self._every
        keys = keys * _MARKS + marks * (marks >= self._known_from)
        values, numbers = torch.unique(keys, return_counts=True)
        return Counter(dict(zip(values.tolist(), numbers.tolist(), strict=True)))

    def add(self, stamps: Tensor) -> None:
        """Counts rows that have come to the store."""
        self._wait(1, stamps)

    def take(self, stamps: Tensor) -> None:
        """Counts rows that have left the store.

        Those of a shared store have not been counted, and change nothing.
        """
        self._wait(-1, stamps)

    def _wait(self, sign: int, stamps: Tensor) -> None:
        self.rows += sign * len(stamps)
        self._waiting.append((sign, stamps[:, -STAMP_BYTES:].clone()))
        self._rows_waiting += len(stamps)
        if self._rows_waiting > _PART:
            self._settled()

    def _settled(self) -> Counter[int]:
        """Returns the counts, with all stamps counted."""
        for sign in (1, -1) if self._waiting else ():
            counts = self.counts(
                torch.cat(
                    [stamps for its, stamps in self._waiting if its == sign]
                    or [_NO_STAMPS]
                )
            )
            self._counts = self._counts + counts if sign > 0 else self._counts - counts
        self._waiting.clear()
        self._rows_waiting = 0
        return self._counts

    def changed_since(self, mark: int, last_mark: int) -> int:
        """Returns the number of rows that have changed since a mark.

        Forgets marks that are too old for this call.
        """
        self._known_from = max(self._known_from, last_mark - 2 * _KNOWN_MARKS - 1)
        for key in [
            key for key in self._settled() if 0 < key % _MARKS < self._known_from
        ]:
            self._counts[key - key % _MARKS] += self._counts.pop(key)
        return sum(
            number for key, number in self._counts.items() if key % _MARKS >= mark
        )

    def due(self, handle: int) -> int:
        """Returns the value that :attr:`before` has after the present step of a native
        table.
        """
        if self._by_time:
            times = ops.table_times(handle)
            self._note(times[_TIMES::2])
            return max(self.before, times[2])
        steps = ops.table_steps(handle)
        return (
            max(self.before, steps - self._steps)
            if steps % self._every == 0
            else self.before
        )

    def expire(self, before: int) -> int:
        """Lets the rows in the store expire whose last step is earlier than ``before``.

        Returns their number.
        """
        self.before = before
        self._settled()
        if self._by_time:
            gone = [key for key in self._counts if 0 <= key // _MARKS <= before]
            self._ticks = [tick for tick in self._ticks if tick >= before]
        else:
            gone = [
                key
                for key in self._counts
                if key // _MARKS * self._every - self._steps < before
            ]
        expired = sum(self._counts.pop(key) for key in gone)
        self.rows -= expired
        return expired

    def before_at(self, steps: int) -> int:
        """Returns the value that :attr:`before` has if the table's clock is set to
        ``steps``.
        """
        if self._by_time:
            return min(self.before, steps + 1)
        if not self.expires:
            return 0
        return max(
            0, min(self.before, steps // self._every * self._every - self._steps)
        )

    def loses_ticks(self, steps: int) -> bool:
        """Returns whether ticks are lost if the table's clock is set to ``steps``, so
        that rows are counted again.
        """
        return bool(self._ticks) and self._ticks[-1] > steps

    def restart(self, handle: int, stamps: Tensor) -> None:
        """Counts the rows again, by their stamps as in :meth:`counts`, after the native
        table's ticks have changed.
        """
        times = ops.table_times(handle)
        self.before, self._ticks = times[2], times[_TIMES::2]
        self._waiting.clear()
        self._rows_waiting = 0
        self._counts = self.counts(stamps[last_steps(stamps) >= self.before])
        self.rows = self._counts.total()

    def _note(self, ticks: list[int]) -> None:
        self._settled()
        for tick in ticks:
            if self._ticks and tick <= self._ticks[-1]:
                continue
            self._ticks.append(tick)
            for key in [
                key for key in self._counts if key < 0 and -1 - key // _MARKS < tick
            ]:
                self._counts[tick * _MARKS + key % _MARKS] += self._counts.pop(key)


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
            options.cold_store, name=name, row_bytes=self.image_bytes
        )
        self.dead = torch.empty(0, dtype=torch.int64)
        """(n,) int64, ascending.

        The ids of invalid rows in the store that have yet to be deleted.
        """
        # ids, ascending, and images
        self._staged: deque[tuple[Tensor, Tensor]] = deque(maxlen=_STAGED_BATCHES)
        self._fetching = 0  # the number of calls of prefetch() that are reading
        # the number of calls of _forget_staged(), by which prefetch() sees that it must
        # discard
        self._forgotten = 0
        # the ids that were written or deleted while prefetch() was reading
        self._outdated: list[Tensor] = []
        self._sweep: Iterator[tuple[Tensor, Tensor]] | None = None
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
            found, images, _ = self._fetch(absent, self._staged)
            new = absent[~found]
            admitted = len(new)
            if arrival != "write" and admitted:
                admitted = int(
                    ops.table_admits(self._handle, new, arrival == "lookup").sum()
                )
            self._make_room(ids, len(images) + admitted)
            if len(images):
                ops.table_bring_back(
                    self._handle, absent[found], images, arrival == "lookup"
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
            before = self.expiry.due(self._handle)
            if before > self.expiry.before:
                self._expire(before)
            if self.store.ascending_snapshots:
                self._sweep_on()

    def prefetch(self, ids: Tensor) -> None:
        """See :meth:`MemoryTier.prefetch`.

        It may run in a separate thread while other calls run. No row moves.
        """
        absent = ops.table_absent(self._handle, ids)
        with self.lock:
            wanted = absent[self._may_be_cold(absent)].sort().values
            for staged, _ in self._staged:
                wanted = wanted[~among(wanted, staged)]
            self._fetching += 1
            number, store = self._forgotten, self.store
        fetched: tuple[Tensor, Tensor] | None = None
        try:
            if len(wanted):
                with self._calls:
                    found, images = store.get(wanted)
                fetched = wanted[found], images
        finally:
            with self.lock:
                self._fetching -= 1
                if fetched is not None and number == self._forgotten:
                    self._staged.append(fetched)
                    for outdated in self._outdated:
                        self._unstage(outdated)
                if self._fetching == 0:
                    self._outdated.clear()

    def read(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`MemoryTier.read`."""
        with self.lock:
            cold, images, _ = self._read_with_expired(ids)
            return cold, images

    def read_into(self, rows: Tensor, ids: Tensor) -> None:
        """See :meth:`MemoryTier.read_into`."""
        cold, images = self.read(ids)
        here = among(ids, cold)
        weights = self._layout.unpacked(images)[0]
        rows[here] = values(weights[torch.searchsorted(cold, ids[here])]).to(rows.dtype)

    def export(self, ids: Tensor) -> ops.RowTensors:
        """See :meth:`MemoryTier.export`."""
        cold, images = self.read(ids)
        is_cold = among(ids, cold)
        resident = super().export(ids[~is_cold])
        moved = self._layout.unpacked(images)
        # the places of the ids in a list of all resident rows and then all cold rows
        places = (~is_cold).cumsum(0) - 1
        places[is_cold] = int((~is_cold).sum()) + torch.searchsorted(cold, ids[is_cold])

        def joined(number: int, dim: int = 0) -> Tensor:
            return torch.cat([resident[number], moved[number]], dim).index_select(
                dim, places
            )

        return joined(0), joined(1, dim=1), joined(2), joined(3), joined(4)

    def contains(self, ids: Tensor) -> Tensor:
        """See :meth:`MemoryTier.contains`."""
        with self.lock:
            found = torch.unique(
                torch.cat([self.read(part)[0] for part in torch.split(ids, _PART)])
            )
        return super().contains(ids) | among(ids, found)

    def remove(self, ids: Tensor) -> int:
        """See :meth:`MemoryTier.remove`.

        The rows are removed from the store and from memory.
        """
        with self.lock:
            removed = 0
            for part in torch.split(torch.unique(ids), _PART):
                cold, images, expired = self._read_with_expired(part)
                # before memory: if the store fails, other jobs still use the rows
                if self.shared:
                    with self._calls:
                        self.store.delete(part)
                    self._outdate(part)
                ops.table_note_left(self._handle, cold)
                # before they are deleted, so that no sweep sees them
                self._record_expired(expired)
                self.expiry.take(images)
                removed += len(cold) + int(ops.table_remove(self._handle, part))
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
                place = slice(begin, begin + _PART)
                cold, images = self.read(ids[place])
                ascending = ids[place].sort()
                positions = ascending.indices[
                    torch.searchsorted(ascending.values, cold)
                ]
                changed = ops.table_score_images(
                    self._handle, cold, scores[place][positions], images
                )
                if len(cold):
                    self._put(cold, changed)
                    self._outdate(cold)
                    self.expiry.take(images)
                    self.expiry.add(changed)
                rows += len(cold) + super().set_scores(ids[place], scores[place])
            return rows

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
                for some, images in self.scan():
                    parts.append(
                        some[
                            (last_steps(images) >= self.expiry.before)
                            & ~among(some, self.dead)
                        ]
                    )
        ids: Tensor = torch.unique(torch.cat(parts))
        return ids

    def scan(self) -> Iterator[tuple[Tensor, Tensor]]:
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
            return ids[~among(ids, ops.table_ids(self._handle))]

    def flush(self) -> None:
        """See :meth:`Table.flush`."""
        with self.lock:
            # The mark is set before the rows are read, so that the next flush writes
            # the rows that change meanwhile.
            mark = ops.table_mark(self._handle)
            known = self._written is not None and mark - self._written < _KNOWN_MARKS
            for ids in torch.split(
                self._changed() if known else ops.table_ids(self._handle), _PART
            ):
                self._put(ids, ops.table_images(self._handle, ids))
            self._written = mark

    def release(self) -> None:
        """Calls :meth:`flush`, and then removes from memory all rows that no pending
        backward needs.
        """
        with self.lock:
            self.flush()
            self._forget_staged()
            everything = ops.table_ids(self._handle)
            for ids in torch.split(
                everything, max(_PART, -(-len(everything) // _RELEASES))
            ):
                images = ops.table_images(self._handle, ids)
                # A backward in another thread may have changed rows between the flush
                # and the copy of the images.
                changed = among(ids, self._changed())
                self._put(ids[changed], images[changed])
                ops.table_evict(self._handle, ids, images)

    def set_clock(self, steps: int, times: list[int]) -> None:
        """See :meth:`MemoryTier.set_clock`."""
        with self.lock:
            before = self.expiry.before_at(steps)
            if before < self.expiry.before:
                # The rows that have expired by the old clock would be valid again by
                # the new clock.
                self._bury()
                self._sweep = None
            stamps = self._stamps() if times or self.expiry.loses_ticks(steps) else None
            self.expiry.before = min(before, self.expiry.before)
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

    def _read_with_expired(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what :meth:`read` returns, and the ids of expired rows, (n,) int64,
        which the store still has.
        """
        absent = ops.table_absent(self._handle, ids).sort().values
        # Other jobs may have written to a shared store since rows were staged for a
        # training step.
        found, images, expired = self._fetch(
            absent, () if self.shared else self._staged
        )
        return absent[found], images, absent[expired]

    def _fetch(
        self, ids: Tensor, staged: Iterable[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Reads rows that are not in memory from ``staged``, and from the store if they
        are not there.

        Returns which ids have a row in the store, (N,) bool, the images of these rows,
        in the order of ``ids``, and the positions of ids whose row in the store has
        expired, (n,) int64.
        """
        # positions in ids, ascending, and images
        parts: list[tuple[Tensor, Tensor]] = []
        rest = torch.arange(len(ids))  # the positions that have yet to be found
        if len(self.dead):  # a prefetch may have read them
            rest = rest[~among(ids, self.dead)]
        for staged_ids, staged_images in staged:
            if len(staged_ids) == 0 or len(rest) == 0:
                continue
            at = torch.searchsorted(staged_ids, ids[rest]).clamp_(
                max=len(staged_ids) - 1
            )
            here = staged_ids[at] == ids[rest]
            # index_select copies whole rows, and an index in brackets single bytes.
            parts.append((rest[here], staged_images.index_select(0, at[here])))
            rest = rest[~here]
        if len(rest):
            rest = rest[self._may_be_cold(ids[rest])]
        if len(rest):
            with self._calls:
                is_there, images = self.store.get(ids[rest])
            parts.append((rest[is_there], images))
        found = torch.zeros(len(ids), dtype=torch.bool)
        expired = torch.empty(0, dtype=torch.int64)
        if not parts:
            return found, torch.empty(0, self.image_bytes, dtype=torch.uint8), expired
        places, images = parts[0]
        if len(parts) > 1:
            order = torch.cat([places for places, _ in parts]).sort()
            places, images = (
                order.values,
                torch.cat([images for _, images in parts]).index_select(
                    0, order.indices
                ),
            )
        if self.expiry.expires:
            is_alive = last_steps(images) >= self.expiry.before
            expired = places[~is_alive]
            alive = is_alive.nonzero().squeeze(1)
            places, images = places[alive], images.index_select(0, alive)
        if self.shared:
            images = with_last_steps_up_to(images, ops.table_steps(self._handle))
        found[places] = True
        return found, images, expired

    def _make_room(self, ids: Tensor, new_rows: int) -> None:
        while len(leaving := ops.table_leaving(self._handle, ids, new_rows)):
            images = ops.table_images(self._handle, leaving)
            self._put(leaving, images)
            if len(self.dead):
                self.dead = self.dead[~among(self.dead, leaving.sort().values)]
            evicted = ops.table_evict(self._handle, leaving, images)
            is_done = bool(evicted.all())
            gone = (
                images[:, -STAMP_BYTES:]
                if is_done
                else images[:, -STAMP_BYTES:][evicted]
            )
            if self.expiry.expires:
                # A row can be older than the expiry limit if a pending forward held it
                # when the limit passed. It expires here, because the next expiry step
                # would be too late.
                alive = last_steps(gone) >= self.expiry.before
                ops.table_count_expired(self._handle, int((~alive).sum()))
                gone = gone[alive]
            if not self.shared:
                self.expiry.add(gone)
            # A row that a backward changes after its image was copied stays, and others
            # leave.
            if is_done:
                return

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
            parts = [torch.empty(0, dtype=torch.int64)]
            while left := ops.snapshot_rows_left(snapshot):
                parts.append(ops.snapshot_read(snapshot, min(left, _PART), False)[0])
        finally:
            ops.snapshot_close(snapshot)
        return torch.cat(parts)

    def _may_be_cold(self, ids: Tensor) -> Tensor:
        return (
            torch.ones_like(ids).bool()
            if self.shared
            else ops.table_may_be_cold(self._handle, ids)
        )

    def _shared_ids(self) -> Tensor:
        with self._calls:
            ids = cast(SharedColdStore, self.store).ids()
        return ids if self._owned is None else ids[self._owned(ids)]

    def _delete(self, ids: Tensor) -> None:
        """Deletes the rows of ``ids``, (N,) int64, from the store.

        If the store fails, a later call tries again.
        """
        ids = torch.unique(ids[ops.table_may_be_cold(self._handle, ids)])
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
        """Discards all staged rows, and the rows that :meth:`prefetch` is reading now."""
        self._forgotten += 1
        self._staged.clear()

    def _unstage(self, ids: Tensor) -> None:
        ascending = ids.sort().values if self._staged else ids
        for _ in range(len(self._staged)):
            staged_ids, images = self._staged.popleft()
            stays = (~among(staged_ids, ascending)).nonzero().squeeze(1)
            if len(stays) == len(staged_ids):
                self._staged.append((staged_ids, images))
            elif len(stays):
                self._staged.append((staged_ids[stays], images.index_select(0, stays)))

    def _expire(self, before: int) -> None:
        ops.table_count_expired(self._handle, self.expiry.expire(before))
        old = ops.table_expired(self._handle)
        ops.table_count_expired(self._handle, int(ops.table_remove(self._handle, old)))
        self._delete(old)
        if not self.store.ascending_snapshots:
            self._bury()

    def _bury(self) -> None:
        """Deletes all expired and dead rows from the store."""
        old = [
            ids[last_steps(images) < self.expiry.before] for ids, images in self.scan()
        ]
        expired = torch.cat([*old, self.dead])
        self._record_expired(expired)
        self._delete(expired)

    def _record_expired(self, ids: Tensor) -> None:
        """Records ids that expire in the store, if the table records which ids leave
        it.

        The store also has outdated copies of rows in memory, and dead rows, which left
        the table before.
        """
        if not self._records_left:
            return
        ids = ids[~among(ids, self.dead)]
        ids = ids[~ops.table_contains(self._handle, ids)]
        ops.table_add_left(self._handle, ids, True)

    def _sweep_on(self) -> None:
        """Deletes the expired rows of a part of the store.

        The parts of ``expiry.sweep_steps`` steps cover the store.

        A sweep that reaches the end of the store also renews the filter of the ids that
        may be cold, which would otherwise grow with every id that was ever cold.
        """
        # each row in memory may have an outdated copy in the store
        copies = self.rows + self._max_rows
        self._swept_ahead = max(0, self._swept_ahead) - -(
            -copies // self.expiry.sweep_steps
        )
        while self._swept_ahead < 0:
            if self._sweep is None:
                # before the scan, which does not see the rows of later puts
                ops.table_begin_refilter(self._handle)
                self._sweep = self.scan()
            # a failure ends the sweep, and the new filter is not used
            sweep, self._sweep = self._sweep, None
            batch = next(sweep, None)
            if batch is None:
                ops.table_end_refilter(self._handle)
                self._swept_ahead = 0
                break
            self._swept_ahead += len(batch[0])
            expired = last_steps(batch[1]) < self.expiry.before
            old = batch[0][expired]
            # Rows that were written after the scan began are read again, because the
            # scan has their former state.
            newer = ops.table_may_be_kept(self._handle, old)
            ids, old = old[newer], old[~newer]
            if len(ids):
                with self._calls:
                    found, images = self.store.get(ids)
                old = torch.cat(
                    [old, ids[found][last_steps(images) < self.expiry.before]]
                )
            ops.table_keep_cold(self._handle, batch[0][~expired])
            self._record_expired(old)
            self._delete(old)
            self._sweep = sweep

    def _stamps(self) -> Tensor:
        """Returns the stamps of the rows in the store that are not in memory, (N,
        STAMP_BYTES) uint8.
        """
        resident = ops.table_ids(self._handle)
        parts = [_NO_STAMPS]
        for ids, images in self.scan() if self.rows else ():
            alive = (
                (last_steps(images) >= self.expiry.before)
                & ~among(ids, self.dead)
                & ~among(ids, resident)
            )
            parts.append(images[alive, -STAMP_BYTES:])
        return torch.cat(parts)
