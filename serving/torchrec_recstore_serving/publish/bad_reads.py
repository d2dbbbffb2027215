"""Says when a file that could not be read or used is read again.

Tests: tests/serving/publish/test_follower.py.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass

_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 60.0
_LAST_READ = 8  # The pauses before the eighth read are 32 s together.


@dataclass
class _BadRead:
    """The reads of a file.

    Args:
        cause: The reason of the last read.
        pause_s: The pause after the last read, in seconds.
        again_at: The time of the next read by ``time.monotonic()``.
        contents: The checksum of the bytes, if they are not those that were written.
        times: The number of reads in a row that had these bytes.
    """

    cause: str
    pause_s: float = 0.0
    again_at: float = 0.0
    contents: str | None = None
    times: int = 0


class BadReads:
    """Files that could not be used.

    Each is read again after a pause, which doubles up to a minute.

    A read may fail for a moment: a file is not whole yet, the cache of a network's file
    system is old, or there is no memory. Only a file whose checksum was wrong in eight
    reads in a row, each time with the same bytes, is not read again.
    """

    def __init__(self) -> None:
        self._found: dict[Hashable, _BadRead] = {}

    def cause(self, file: Hashable) -> str | None:
        """Returns the reason why a file must not be read now. None: it can be read."""
        bad = self._found.get(file)
        return (
            bad.cause
            if bad is not None
            and (self._is_final(bad) or time.monotonic() < bad.again_at)
            else None
        )

    def add(self, file: Hashable, error: BaseException) -> str:
        """Records a failed read, and returns the reason."""
        bad = self._found.setdefault(file, _BadRead(""))
        contents: str | None = getattr(error, "contents", None)
        bad.times = bad.times + 1 if contents == bad.contents else 1
        bad.cause, bad.contents = last_line(error), contents
        bad.pause_s = min(max(2 * bad.pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
        bad.again_at = time.monotonic() + bad.pause_s
        if self._is_final(bad):
            bad.cause = f"{bad.cause}, in {bad.times} reads"
        return bad.cause

    def next_read(self, file: Hashable) -> str:
        """Returns when a file is read again, for messages: ``which is read again in 1.5
        s``.
        """
        bad = self._found.get(file)
        if bad is None:
            return "which is read now"
        if self._is_final(bad):
            return "which is not read again"
        return (
            f"which is read again in {max(0.0, bad.again_at - time.monotonic()):.1f} s"
        )

    def is_final(self, file: Hashable) -> bool:
        """Returns whether a file is not read again."""
        return file in self._found and self._is_final(self._found[file])

    def clear(self) -> None:
        """Forgets all files."""
        self._found.clear()

    def _is_final(self, bad: _BadRead) -> bool:
        return bad.contents is not None and bad.times >= _LAST_READ


def last_line(error: BaseException) -> str:
    """Returns the last line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
