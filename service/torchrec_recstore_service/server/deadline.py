"""Something that is done after a time, unless it is cancelled or begun again.

Tests: tests/service/test_set_calls.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Deadline:
    """Calls a function after a time.

    Args:
        seconds: The time in seconds.
        name: The name of the thread.
    """

    def __init__(self, seconds: float, name: str) -> None:
        self._seconds = seconds
        self._name = name
        self._timer: threading.Timer | None = None

    def begin(self, action: Callable[[], object]) -> None:
        """Calls ``action`` after the time, in place of an earlier action."""
        self.cancel()
        self._timer = threading.Timer(self._seconds, action)
        self._timer.name = self._name
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        """Calls nothing, unless the time has passed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
