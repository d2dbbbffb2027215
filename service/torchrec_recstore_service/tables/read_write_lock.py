"""A lock that readers share.

Tests: tests/service/tables/test_read_write_lock.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class ReadWriteLock:
    """A lock that many readers share, or one writer has alone. It is not reentrant.

    ``with lock:`` has it alone, and ``with lock.shared():`` shares it. As in the lock
    of a native table (``csrc/rows/table_mutex.h``), readers and writers pass one turnstile,
    and whoever has to wait holds up those that come later. Neither a stream of readers
    nor a stream of writers starves the others.
    """

    def __init__(self) -> None:
        self._turnstile = threading.Lock()
        # held by the writer, or by the readers together
        self._inside = threading.Lock()
        self._counting = threading.Lock()  # guards _readers
        self._readers = 0

    def __enter__(self) -> None:
        with self._turnstile:
            self._inside.acquire()

    def __exit__(self, *error: object) -> None:
        self._inside.release()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Shares the lock with other readers."""
        with self._turnstile, self._counting:
            if self._readers == 0:
                # no reader is inside, so that none waits for _counting
                self._inside.acquire()
            self._readers += 1
        try:
            yield
        finally:
            with self._counting:
                self._readers -= 1
                if self._readers == 0:
                    self._inside.release()
