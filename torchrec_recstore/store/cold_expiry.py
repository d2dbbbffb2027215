"""When the rows of a cold store expire, and how many rows it has.

Tests: tests/store/test_cold_tier.py, tests/store/test_wall_clock.py.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.options import Expiry

_TIMES = 7  # ops.table_times: the numbers before the steps and times


class ColdExpiry:
    """Counts the rows that are in the store and not in memory, by the step in which they expire.

    Rows expire in the steps in which the native pass would remove them (csrc/eviction.h, csrc/wall_clock.h).
    """

    def __init__(self, expiry: Expiry | None) -> None:
        self._by_time = expiry is not None and expiry.seconds is not None
        self._steps = 0 if expiry is None or expiry.steps is None else expiry.steps
        self._every = max(1, self._steps // 4)  # rows expire in the steps that are multiples of this number
        self.expires = expiry is not None
        """Whether unused rows expire."""
        self.before = 0
        """A row has expired if its last step is earlier than this step."""
        self._counts: Counter[int] = Counter()
        # For an expiry by time: the ticks, each a step, ascending. Rows expire together if no tick is between their
        # last steps. They are counted under the tick after their last step, and before it is known, under the negative
        # of the last step, minus 1.
        self._ticks: list[int] = []

    @property
    def rows(self) -> int:
        """The number of rows in the store that are not in memory."""
        return self._counts.total()

    @property
    def sweep_steps(self) -> int:
        """The number of steps in which a sweep over the store may take place: half of those until rows expire.

        A faster sweep takes more time of each step, and with a slower one more expired rows remain in the store.
        """
        if not self._by_time:
            return max(1, self._steps // 2)
        return max(1, (self._ticks[-1] - self._ticks[0]) // 2) if self._ticks else 1

    def counts(self, last_steps: Tensor) -> Counter[int]:
        """Returns the counts of rows with these last steps, (N,) int64, for :meth:`add` and :meth:`take`."""
        if not self.expires:
            return Counter({0: len(last_steps)})
        if self._by_time:
            ticks = torch.tensor(self._ticks, dtype=torch.int64)
            after = torch.searchsorted(ticks, last_steps, right=True)
            known = after < len(ticks)
            keys = -1 - last_steps
            keys[known] = ticks[after[known]]
        else:  # A row expires in the first multiple of _every above its last step plus _steps.
            keys = (last_steps + self._steps) // self._every
        values, numbers = torch.unique(keys, return_counts=True)
        return Counter(dict(zip(values.tolist(), numbers.tolist(), strict=True)))

    def add(self, last_steps: Tensor) -> None:
        """Counts rows that have come to the store."""
        self._counts += self.counts(last_steps)

    def take(self, last_steps: Tensor) -> None:
        """Counts rows that have left the store."""
        self._counts -= self.counts(last_steps)

    def due(self, handle: int) -> int:
        """Returns the value that :attr:`before` has after the present step of a native table."""
        if self._by_time:
            times = ops.table_times(handle)
            self._note(times[_TIMES::2])
            return max(self.before, times[2])
        steps = ops.table_steps(handle)
        return max(self.before, steps - self._steps) if steps % self._every == 0 else self.before

    def expire(self, before: int) -> int:
        """Lets the rows in the store expire whose last step is earlier than ``before``. Returns their number."""
        self.before = before
        if self._by_time:
            gone = [tick for tick in self._counts if 0 <= tick <= before]
            self._ticks = [tick for tick in self._ticks if tick >= before]
        else:
            gone = [time for time in self._counts if time * self._every - self._steps < before]
        return sum(self._counts.pop(key) for key in gone)

    def before_at(self, steps: int) -> int:
        """Returns the value that :attr:`before` has if the table's clock is set to ``steps``."""
        if self._by_time:
            return min(self.before, steps + 1)
        if not self.expires:
            return 0
        return max(0, min(self.before, steps // self._every * self._every - self._steps))

    def loses_ticks(self, steps: int) -> bool:
        """Returns whether ticks are lost if the table's clock is set to ``steps``, so that rows are counted again."""
        return bool(self._ticks) and self._ticks[-1] > steps

    def restart(self, handle: int, last_steps: Tensor) -> None:
        """Counts the rows again by their last steps, (N,) int64, after the ticks of the native table have changed."""
        times = ops.table_times(handle)
        self.before, self._ticks = times[2], times[_TIMES::2]
        self._counts = self.counts(last_steps[last_steps >= self.before])

    def _note(self, ticks: list[int]) -> None:
        for tick in ticks:
            if self._ticks and tick <= self._ticks[-1]:
                continue
            self._ticks.append(tick)
            for key in [key for key in self._counts if key < 0 and -1 - key < tick]:
                self._counts[tick] += self._counts.pop(key)
