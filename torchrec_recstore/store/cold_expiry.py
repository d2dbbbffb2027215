"""How many rows a cold store has, and when they expire.

Tests: tests/store/test_expiry.py, test_wall_clock.py and test_cold_changes.py.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.options import Expiry
from torchrec_recstore.store.parts import STAMP_BYTES, last_marks, last_steps

KNOWN_MARKS = 127
"""The least number of marks that csrc/snapshot/changes.h remembers.

The largest is twice this and one.
"""

_MARKS = 1 << 29  # more than there are marks
_MAX_UNCOUNTED = 1 << 16  # the stamps that wait to be counted together
# The place in ops.table_times of the step before which rows have expired, and that of
# the first tick. Each tick is followed by its time.
_EXPIRED_BEFORE = 2
_FIRST_TICK = 7
_NO_STAMPS = torch.empty(0, STAMP_BYTES, dtype=torch.uint8)


class ColdExpiry:
    """Counts the rows that are in the store and not in memory, by the step in which
    they expire and their last change.

    That is the step in which the native pass would remove them (csrc/bounds/eviction.h,
    csrc/bounds/wall_clock.h). The last change is a mark of csrc/snapshot/changes.h. A
    key of the counts is that of the step, times _MARKS, plus this mark.
    """

    def __init__(self, expiry: Expiry | None) -> None:
        self._by_time = expiry is not None and expiry.seconds is not None
        self._steps = 0
        if expiry is not None and expiry.steps is not None:
            self._steps = expiry.steps
        # rows expire in the steps that are multiples of this number
        self._every = max(1, self._steps // 4)
        self.expires = expiry is not None
        """Whether unused rows expire."""
        self.valid_from = 0
        """A row has expired if its last step is earlier than this step."""
        self.rows = 0
        """The number of rows in the store that are not in memory.

        For a shared store it means nothing.
        """
        self._counts: Counter[int] = Counter()
        # The stamps of rows that have come and of rows that have left, which have yet
        # to be counted. To count those of each step and table would take longer than
        # to write their rows to an SSD.
        self._added: list[Tensor] = []
        self._taken: list[Tensor] = []
        self._uncounted = 0
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
        if not self._ticks:
            return 1
        steps_of_ticks = self._ticks[-1] - self._ticks[0]
        return max(1, steps_of_ticks // 2)

    def counts(self, stamps: Tensor) -> Counter[int]:
        """Returns how many of the rows with these images, or the last STAMP_BYTES of
        these, are counted together.
        """
        marks = last_marks(stamps)
        is_known = marks >= self._known_from
        known_marks = marks * is_known
        keys = self._expiry_keys(stamps) * _MARKS + known_marks

        distinct_keys, numbers = torch.unique(keys, return_counts=True)
        pairs = zip(distinct_keys.tolist(), numbers.tolist(), strict=True)
        return Counter(dict(pairs))

    def _expiry_keys(self, stamps: Tensor) -> Tensor:
        """Returns the part of each row's key that tells when it expires, (N,) int64."""
        if self._by_time:
            steps = last_steps(stamps)
            ticks = torch.tensor(self._ticks, dtype=torch.int64)
            next_ticks = torch.searchsorted(ticks, steps, right=True)
            is_known = next_ticks < len(ticks)
            keys = -1 - steps
            keys[is_known] = ticks[next_ticks[is_known]]
            return keys
        if self.expires:
            # A row expires in the first multiple of _every above its last step plus
            # _steps.
            unused_until = last_steps(stamps) + self._steps
            return unused_until // self._every
        return torch.zeros(len(stamps), dtype=torch.int64)

    def add(self, stamps: Tensor) -> None:
        """Counts rows that have come to the store."""
        self.rows += len(stamps)
        self._count_later(self._added, stamps)

    def take(self, stamps: Tensor) -> None:
        """Counts rows that have left the store.

        Those of a shared store have not been counted, and change nothing.
        """
        self.rows -= len(stamps)
        self._count_later(self._taken, stamps)

    def _count_later(self, uncounted: list[Tensor], stamps: Tensor) -> None:
        uncounted.append(stamps[:, -STAMP_BYTES:].clone())
        self._uncounted += len(stamps)
        if self._uncounted > _MAX_UNCOUNTED:
            self._count_all()

    def _count_all(self) -> None:
        """Counts the stamps that wait."""
        if self._added or self._taken:
            added = torch.cat([_NO_STAMPS, *self._added])
            taken = torch.cat([_NO_STAMPS, *self._taken])
            added_counts = self.counts(added)
            taken_counts = self.counts(taken)
            # The difference drops counts below zero: rows of a shared store are taken
            # and have not been added.
            self._counts = self._counts + added_counts - taken_counts
        self._drop_uncounted()

    def _drop_uncounted(self) -> None:
        self._added.clear()
        self._taken.clear()
        self._uncounted = 0

    def changed_since(self, mark: int, last_mark: int) -> int:
        """Returns the number of rows that have changed since a mark.

        Forgets marks that are too old for this call.
        """
        oldest_known = last_mark - 2 * KNOWN_MARKS - 1
        self._known_from = max(self._known_from, oldest_known)
        self._count_all()

        for key in list(self._counts):
            key_mark = key % _MARKS
            if 0 < key_mark < self._known_from:
                unknown_key = key - key_mark
                self._counts[unknown_key] += self._counts.pop(key)

        changed = 0
        for key, rows in self._counts.items():
            if key % _MARKS >= mark:
                changed += rows
        return changed

    def due(self, handle: int) -> int:
        """Returns the value of :attr:`valid_from` after the present step of a native
        table.
        """
        if self._by_time:
            times = ops.table_times(handle)
            self._note_ticks(times[_FIRST_TICK::2])
            return max(self.valid_from, times[_EXPIRED_BEFORE])
        steps = ops.table_steps(handle)
        if steps % self._every:
            return self.valid_from
        return max(self.valid_from, steps - self._steps)

    def expire(self, valid_from: int) -> int:
        """Lets the rows in the store expire whose last step is earlier than
        ``valid_from``, and returns their number.
        """
        self.valid_from = valid_from
        self._count_all()
        expired = 0
        for key in list(self._counts):
            if self._is_expired(key // _MARKS):
                expired += self._counts.pop(key)
        if self._by_time:
            self._ticks = [tick for tick in self._ticks if tick >= valid_from]
        self.rows -= expired
        return expired

    def _is_expired(self, expiry_key: int) -> bool:
        if self._by_time:
            return 0 <= expiry_key <= self.valid_from
        earliest_last_step = expiry_key * self._every - self._steps
        return earliest_last_step < self.valid_from

    def valid_from_at(self, steps: int) -> int:
        """Returns the value of :attr:`valid_from` if the table's clock is set to
        ``steps``.
        """
        if self._by_time:
            return min(self.valid_from, steps + 1)
        if not self.expires:
            return 0
        last_expiry = steps // self._every * self._every
        expired_before = last_expiry - self._steps
        return max(0, min(self.valid_from, expired_before))

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
        self.valid_from = times[_EXPIRED_BEFORE]
        self._ticks = times[_FIRST_TICK::2]
        self._drop_uncounted()

        is_alive = last_steps(stamps) >= self.valid_from
        self._counts = self.counts(stamps[is_alive])
        self.rows = self._counts.total()

    def _note_ticks(self, ticks: list[int]) -> None:
        """Counts rows whose next tick was not known under one of these ticks."""
        self._count_all()
        for tick in ticks:
            if self._ticks and tick <= self._ticks[-1]:
                continue
            self._ticks.append(tick)
            for key in list(self._counts):
                mark = key % _MARKS
                last_step = -1 - key // _MARKS
                if key < 0 and last_step < tick:
                    new_key = tick * _MARKS + mark
                    self._counts[new_key] += self._counts.pop(key)
