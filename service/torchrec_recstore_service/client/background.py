"""The calls of a client that run in other threads: prefetches, and updates that nobody
waits for yet.

Tests: tests/service/test_seed_calls.py.
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

from torchrec_recstore.utils import warn_user

_Result = TypeVar("_Result")
_not_closed: weakref.WeakSet[Updates] = weakref.WeakSet()


class Prefetches(Generic[_Result]):
    """Reads that run in background threads.

    The result of each read can be fetched once.

    Args:
        threads: The number of reads that run at the same time. Further reads wait.
    """

    def __init__(self, threads: int) -> None:
        self._size = threads
        self._threads: ThreadPoolExecutor | None = None
        self._numbers = itertools.count(1)
        self._pending: dict[int, Future[_Result]] = {}
        self._lock = threading.Lock()

    def start(self, read: Callable[[], _Result]) -> int:
        """Calls ``read`` in another thread and returns a handle for :meth:`wait`."""
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self._size, "recstore-prefetch")
            handle = next(self._numbers)
            self._pending[handle] = self._threads.submit(read)
            return handle

    def wait(self, handle: int) -> _Result:
        """Waits for a read and returns its result, or raises its error.

        Raises:
            ValueError: The handle does not exist, or its result has already been
                fetched.
        """
        with self._lock:
            future = self._pending.pop(handle, None)
        if future is None:
            raise ValueError(
                f"there is no prefetch {handle!r}, or it has been waited for already"
            )
        try:
            return future.result()
        except CancelledError:
            raise ValueError("the client is closed") from None

    def close(self) -> None:
        """Cancels the reads that have not begun and waits for the reads that have."""
        with self._lock:
            threads = self._threads
            self._threads = None
            self._pending.clear()
        if threads is not None:
            threads.shutdown(cancel_futures=True)


class Updates:
    """Updates that run in one background thread, in the order of their starts.

    A process that ends without a call of :meth:`close` finishes the updates, and warns
    of those that fail.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._started = 0
        self.pending: dict[int, Future[None]] = {}
        """The updates that nobody has waited for."""
        self._lock = threading.Lock()
        self._process = os.getpid()
        _not_closed.add(self)

    def start(self, update: Callable[[], None]) -> int:
        """Calls ``update`` in the thread, after all earlier updates, and returns a
        handle for :meth:`wait`.
        """
        with self._lock:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "recstore-update")
            self._started += 1
            self.pending[self._started] = self._thread.submit(update)
            return self._started

    def done(self) -> int:
        """Returns a handle of an update that has been carried out already."""
        with self._lock:
            self._started += 1
            return self._started

    def wait(self, handle: int) -> None:
        """Waits for an update, or raises its error.

        It does nothing for an update that has been waited for already.

        Raises:
            ValueError: The handle does not exist.
        """
        with self._lock:
            self._check(handle)
            future = self.pending.pop(handle, None)
        if future is not None:
            future.result()

    def has_finished(self, handle: int) -> bool:
        """Returns whether an update has been carried out: False while it runs, and if
        it has failed and nobody has waited for it.

        Raises:
            ValueError: The handle does not exist.
        """
        with self._lock:
            self._check(handle)
            future = self.pending.get(handle)
            if future is None:
                return True
            if not future.done() or future.exception() is not None:
                return False
            del self.pending[handle]
            return True

    def _check(self, handle: int) -> None:
        if not isinstance(handle, int) or not 0 < handle <= self._started:
            raise ValueError(f"there is no update {handle!r}")

    def wait_for_earlier(self) -> None:
        """Waits for all updates that have been started.

        Their errors are those of their own :meth:`wait`.
        """
        with self._lock:
            pending = list(self.pending.values())
        wait(pending)

    def wait_for_all(self) -> list[Exception]:
        """Waits for all updates that nobody has waited for, and returns their errors."""
        with self._lock:
            pending = self.pending
            self.pending = {}
        errors = [future.exception() for future in pending.values()]
        return [error for error in errors if isinstance(error, Exception)]

    def close(self) -> list[Exception]:
        """Waits for all updates, ends the thread, and returns the errors of the updates
        that nobody has waited for.
        """
        errors = self.wait_for_all()
        _not_closed.discard(self)
        with self._lock:
            thread = self._thread
            self._thread = None
        if thread is not None:
            thread.shutdown()
        return errors

    def warn_of_errors(self) -> None:
        """Closes the thread as :meth:`close` does, and warns of updates that have failed."""
        # a forked process has neither the thread nor usable locks
        if os.getpid() == self._process:
            for error in self.close():
                warn_user(f"an update that was not waited for has failed: {error}")


@atexit.register
def _warn_of_errors() -> None:
    for updates in list(_not_closed):
        updates.warn_of_errors()
