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

    @property
    def is_final(self) -> bool:
        """Whether the file is not read again."""
        return self.contents is not None and self.times >= _LAST_READ


class BadReads:
    """Files that could not be used.

    Each is read again after a pause, which doubles up to a minute.

    A read may fail for a moment: a file is not whole yet, the cache of a network's file
    system is old, or there is no memory. Only a file whose checksum was wrong in eight
    reads in a row, each time with the same bytes, is not read again.
    """

    def __init__(self) -> None:
        self._bad_reads: dict[Hashable, _BadRead] = {}

    def cause(self, file: Hashable) -> str | None:
        """Returns the reason why a file must not be read now. None: it can be read."""
        bad_read = self._bad_reads.get(file)
        if bad_read is None:
            return None
        if bad_read.is_final or time.monotonic() < bad_read.again_at:
            return bad_read.cause
        return None

    def add(self, file: Hashable, error: BaseException) -> str:
        """Records a failed read, and returns the reason."""
        bad_read = self._bad_reads.setdefault(file, _BadRead(""))
        contents: str | None = getattr(error, "contents", None)
        bad_read.times = bad_read.times + 1 if contents == bad_read.contents else 1
        bad_read.contents = contents
        bad_read.cause = last_line(error)
        pause_s = max(2 * bad_read.pause_s, _FIRST_PAUSE_S)
        bad_read.pause_s = min(pause_s, _LONGEST_PAUSE_S)
        bad_read.again_at = time.monotonic() + bad_read.pause_s
        if bad_read.is_final:
            bad_read.cause = f"{bad_read.cause}, in {bad_read.times} reads"
        return bad_read.cause

    def next_read(self, file: Hashable) -> str:
        """Returns when a file is read again: ``which is read again in 1.5 s``."""
        bad_read = self._bad_reads.get(file)
        if bad_read is None:
            return "which is read now"
        if bad_read.is_final:
            return "which is not read again"
        seconds = max(0.0, bad_read.again_at - time.monotonic())
        return f"which is read again in {seconds:.1f} s"

    def is_final(self, file: Hashable) -> bool:
        """Returns whether a file is not read again."""
        return file in self._bad_reads and self._bad_reads[file].is_final

    def clear(self) -> None:
        """Forgets all files."""
        self._bad_reads.clear()


def last_line(error: BaseException) -> str:
    """Returns the last line of an error's message."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
