"""Which addresses only this machine reaches, and the pauses between calls that are
repeated.

It imports no torch.

Tests: tests/service/test_access.py and test_connections.py.
"""

from __future__ import annotations

import ipaddress
import random
import time

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach the host."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class Backoff:
    """The pauses between the repetitions of a failing call, until ``timeout_s`` seconds
    are over.

    A pause is up to twice as long as the pause before it, from 50 ms to 1 s. Each is
    shortened at random by up to one half, so that many clients do not repeat their
    calls at the same moment.
    """

    def __init__(self, timeout_s: float) -> None:
        self._end = time.monotonic() + timeout_s
        self._pause = _FIRST_PAUSE_S

    @property
    def left_s(self) -> float:
        """The time in seconds until the end."""
        return self._end - time.monotonic()

    def pause(self) -> None:
        """Sleeps until the next repetition, or until the end if that comes first."""
        time.sleep(max(0.0, min(self.left_s, self._pause * random.uniform(0.5, 1))))
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)
