"""The steps in which ranks exchange the time."""

from __future__ import annotations

_MOST_STEPS = 1 << 20  # the largest number of steps between two exchanges


class Pace:
    """Chooses the steps in which all ranks exchange the time, so that most steps need no exchange.

    All ranks count the same steps and are told the same times, so that they choose the same steps. The number of steps
    until the next exchange follows from the time of the steps between the last two, and is at most twice their number.
    The first step is chosen.
    """

    def __init__(self) -> None:
        self._step = 0
        self._next = 1  # the next chosen step
        self._last: tuple[int, float] | None = None  # the last chosen step and its time

    def begin_step(self) -> bool:
        """Counts a step. Returns whether the ranks exchange the time in this step, and then call :meth:`plan`."""
        self._step += 1
        return self._step >= self._next

    def plan(self, now: float, seconds: float) -> None:
        """Chooses the next step.

        Args:
            now: The present time in seconds, the same on every rank.
            seconds: The time after which the ranks should exchange the time again. With 0, they do in the next step.
        """
        steps = 1
        if self._last is not None:
            made, passed = self._step - self._last[0], now - self._last[1]
            most = min(2 * made, _MOST_STEPS)
            steps = most if passed * most <= seconds * made else max(1, int(seconds * made / passed))
        self._last = self._step, now
        self._next = self._step + (steps if seconds > 0 else 1)
