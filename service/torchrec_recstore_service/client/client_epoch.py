"""The epoch that the calls of a client are for, and the numbers of its writes.

Tests: tests/service/test_agreement.py.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torchrec_recstore_service.wire.protocol import ServerRestartedError


def writes_lost(error: ServerRestartedError) -> ServerRestartedError:
    """Returns the error of a client whose writes may be lost, for the error of a server."""
    return ServerRestartedError(
        f"{error}; this client's writes since its last save are lost: load a save, or continue with a new client"
    )


class ClientEpoch:
    """The epoch that the calls of a client are for, and the numbers of its writes, for all servers of a set.

    A client accepts another epoch by itself if all of its writes are in a save. Otherwise its writes may be lost, and
    its calls raise errors until it loads a save.

    Args:
        find: A function that returns the label of the epoch in which all servers are. Its argument is the name of the
            table of the call, for errors.
    """

    def __init__(self, find: Callable[[str], str]) -> None:
        self.client = uuid.uuid4().hex
        self._find = find
        self._lock = threading.Lock()
        self._finding = threading.Lock()
        self._label = ""
        self._requests = 0
        self._pending: set[int] = set()
        self._saved = 0  # the writes up to this number are in a save

    def label(self, table: str) -> str:
        """Returns the label of the epoch for a call."""
        return self._label or self._find_after("", table)

    def after(self, error: ServerRestartedError, label: str, table: str, write: int | None = None) -> str:
        """Returns the label of the epoch for the repetition of a call that the servers of another epoch have refused.

        Args:
            error: The error of the call.
            label: The label of the epoch that the call was for.
            table: The name of the table of the call, for errors.
            write: The number of the write. Default: None, for a read.

        Raises:
            ServerRestartedError: This client has writes that none of its saves contains.
            ServerSetError: The servers are not in one epoch.
        """
        with self._lock:
            last = self._requests if write is None else write - 1
            if self._saved < last:
                raise writes_lost(error)
        return self._find_after(label, table)

    def begin(self, label: str, saved: int) -> None:
        """Sets the label of an epoch that this client has begun, and the number of its last write before."""
        with self._lock:
            self._label = label
            self._saved = max(self._saved, saved)

    @contextmanager
    def write(self) -> Iterator[int]:
        """Returns a context with the number of a write."""
        with self._lock:
            self._requests += 1
            number = self._requests
            self._pending.add(number)
        try:
            yield number
        finally:
            with self._lock:
                self._pending.remove(number)

    @property
    def done_before(self) -> int:
        """The number below which no write will be repeated."""
        with self._lock:
            return min(self._pending, default=self._requests + 1)

    @property
    def done(self) -> int:
        """The number of the last write before which no write is running, and which is not running itself."""
        return self.done_before - 1

    def set_saved(self, number: int) -> None:
        """Notes that the writes up to a number are in a save."""
        with self._lock:
            self._saved = max(self._saved, number)

    def _find_after(self, label: str, table: str) -> str:
        with self._finding:
            if self._label == label:  # otherwise another thread has found the epoch
                found = self._find(table)
                with self._lock:
                    self._label = found
            return self._label
