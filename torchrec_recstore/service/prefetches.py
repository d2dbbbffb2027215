from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Generic, TypeVar

_Read = TypeVar("_Read")

_THREADS = 4  # reads that are under way at a time; others wait for their turn


class Prefetches(Generic[_Read]):
    """Reads that run beside the caller, each to be waited for once."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._numbers = itertools.count(1)
        self._pending: dict[int, Future[_Read]] = {}
        self._lock = threading.Lock()

    def start(self, read: Callable[[], _Read]) -> int:
        """Has ``read`` called in another thread; returns its handle."""
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_THREADS, "recstore-prefetch")
            handle = next(self._numbers)
            self._pending[handle] = self._threads.submit(read)
            return handle

    def wait(self, handle: int) -> _Read:
        """What ``read`` has returned, or raised.

        Raises:
            ValueError: there is no such handle, or it has been waited for.
        """
        with self._lock:
            future = self._pending.pop(handle, None)
        if future is None:
            raise ValueError(f"there is no prefetch {handle!r}, or it has been waited for already")
        try:
            return future.result()
        except CancelledError:
            raise ValueError("the client is closed") from None

    def close(self) -> None:
        """Forgets reads that have not begun, and waits for the others."""
        with self._lock:
            threads, self._threads = self._threads, None
            self._pending.clear()
        if threads is not None:
            threads.shutdown(cancel_futures=True)
