"""A lock that a forked process cannot wait for."""

from __future__ import annotations

import os
import threading

from torchrec_recstore import ops


class ProcessLock:
    """A reentrant lock that works only in the process that created it.

    In a forked process, the thread that held the lock may not exist, so that the lock would never be released. Entering
    the lock there raises the error that every call of the native table raises in a forked process.

    Args:
        handle: The handle of the native table.
    """

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._lock = threading.RLock()
        self._process = os.getpid()

    def __enter__(self) -> None:
        if os.getpid() != self._process:
            ops.table_image_bytes(self._handle)  # raises
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()
