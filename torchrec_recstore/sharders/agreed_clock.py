"""The time by which the rows of sharded tables expire, the same on all ranks.

Tests: tests/distributed/test_wall_clock.py.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable
from itertools import count

import torch
from torch import Tensor
from torchrec.distributed.types import ShardingEnv

from torchrec_recstore import ops
from torchrec_recstore.fake_ops import register_python_op
from torchrec_recstore.sharders.gather import all_gathered
from torchrec_recstore.store import Table

_PARTS = 32  # The ranks agree on the time about this often within Expiry.seconds.
_MOST_STEPS = 1 << 20  # The largest number of steps between two exchanges.
_handles = count(1)
_clocks: weakref.WeakValueDictionary[int, AgreedClock] = weakref.WeakValueDictionary()


class Pace:
    """Chooses the steps, the same on every rank, in which all ranks exchange the time.

    The first step is chosen.
    """

    def __init__(self) -> None:
        self._step = 0
        self._next = 1
        # The last chosen step and its time.
        self._last: tuple[int, float] | None = None

    def begin_step(self) -> bool:
        """Counts a step.

        Returns whether the ranks exchange the time in this step, and then call
        :meth:`plan`.
        """
        self._step += 1
        return self._step >= self._next

    def plan(self, unix_seconds: float, seconds: float) -> None:
        """Chooses the next step of an exchange.

        It is about ``seconds`` after the time ``unix_seconds``, which is the same on
        every rank.
        """
        # It follows from the time of the steps since the last exchange, and is at most
        # twice as many steps away.
        steps = 1
        if self._last is not None:
            last_step, last_time = self._last
            steps_since = self._step - last_step
            seconds_since = unix_seconds - last_time
            steps = min(2 * steps_since, _MOST_STEPS)
            if seconds_since * steps > seconds * steps_since:
                steps = max(1, int(seconds * steps_since / seconds_since))
        if seconds <= 0:
            steps = 1
        self._last = self._step, unix_seconds
        self._next = self._step + steps


class AgreedClock:
    """The clock of a sharded module's tables, that of the first rank.

    ``seconds`` is their shortest expiry.
    """

    def __init__(
        self,
        env: ShardingEnv,
        seconds: float,
        tables: Iterable[Table],
    ) -> None:
        self._env = env
        self._interval = seconds / _PARTS
        self._tables = list(tables)
        self._pace = Pace()
        self._anchor = torch.empty(0)
        self.handle = next(_handles)  # The number of the clock in graphs.
        _clocks[self.handle] = self

    def begin_step(self) -> None:
        """Sets the time of the tables if an exchange is due in this step.

        Collective.
        """
        if torch.compiler.is_compiling():
            torch.ops.recstore_ops.agree_on_time(self.handle, self._anchor)
        else:
            self.agree()

    def agree(self) -> None:
        """See :meth:`begin_step`."""
        if not self._pace.begin_step():
            return
        times_of_ranks = all_gathered(time.time(), self._env)
        unix_seconds = times_of_ranks[0]
        self._pace.plan(unix_seconds, self._interval)
        unix_microseconds = round(unix_seconds * 1e6)
        for table in self._tables:
            ops.table_follow_time(table.handle, unix_microseconds)


def _agree(handle: int, anchor: Tensor) -> None:
    clock = _clocks.get(handle)
    if clock is None:
        raise ValueError(
            f"no sharded module of this process has a clock of the handle {handle}: its"
            " model no longer exists"
        )
    clock.agree()


register_python_op(
    "agree_on_time(int clock, Tensor anchor) -> ()",
    _agree,
    lambda handle, anchor: None,
)
