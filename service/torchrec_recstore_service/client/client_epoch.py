"""The epoch that the calls of a client are for, and the numbers of its writes.

Tests: tests/service/test_agreement.py.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torchrec_recstore_service.wire.protocol import ServerRestartedError

MOST_ANSWERS = 1024
"""The writes of a client whose answers a server keeps, from the oldest on that it may
repeat: csrc/applied.cpp.
"""


@dataclass(frozen=True, eq=False)
class Runs:
    """The epoch in which all servers of a set are, and the run of each of them.

    Args:
        label: The label of the epoch. Empty if it is not known.
        by_address: The run of each server.
    """

    label: str
    by_address: Mapping[str, str]


def writes_lost(error: ServerRestartedError) -> ServerRestartedError:
    """Returns the error of a client whose writes may be lost."""
    return ServerRestartedError(
        f"{error}; this client's writes since its last save are lost: load a save, or"
        " continue with a new client"
    )


class ClientEpoch:
    """The epoch that the calls of a client are for, and the numbers of its writes, for
    all servers of a set.

    A client accepts another epoch by itself if all of its writes are in a save.
    Otherwise its writes may be lost, and its calls raise errors until it loads a save.

    Args:
        find: A function that returns the epoch in which all servers are. Its argument
            is the name of the table of the call, for errors. It resumes servers that
            wait.
    """

    def __init__(self, find: Callable[[str], Runs]) -> None:
        self.client = uuid.uuid4().hex
        self._find = find
        self._lock = threading.Lock()
        self._finding = threading.Lock()
        self.runs = Runs("", {})
        """The epoch of the calls, and the runs that this client knows."""
        self._requests = 0
        self._pending: set[int] = set()
        self._ended = threading.Condition(self._lock)  # a write has ended
        self._saved = 0  # the writes up to this number are in a save

    def label(self, table: str) -> str:
        """Returns the label of the epoch for a call."""
        return self.runs.label or self._find_after("", table)

    def resumed(self, known_runs: Runs, table: str) -> None:
        """Finds the runs of the servers again, after a server has refused a call as one
        for an earlier run.

        Args:
            known_runs: The value of :attr:`runs` before the call.
            table: The name of the table of the call, for errors.

        Raises:
            ServerRestartedError: A server has lost a run that this client knows.
            ServerSetError: The servers are not in one epoch.
        """
        with self._finding:
            if self.runs is known_runs:  # otherwise another thread has found them
                runs = self._find(table)
                if runs.label == known_runs.label:  # see ``after`` for another epoch
                    with self._lock:
                        self.runs = runs

    def after(
        self,
        error: ServerRestartedError,
        label: str,
        table: str,
        write: int | None = None,
    ) -> str:
        """Returns the label of the epoch for the repetition of a call that the servers
        of another epoch have refused.

        Args:
            error: The error of the call.
            label: The label of the epoch that the call was for.
            table: The name of the table of the call, for errors.
            write: The number of the write. Default: None, for a read.

        Raises:
            ServerRestartedError: This client has writes that none of its saves
                contains.
            ServerSetError: The servers are not in one epoch.
        """
        with self._lock:
            last = self._requests if write is None else write - 1
            if self._saved < last:
                raise writes_lost(error)
        return self._find_after(label, table)

    def begin(self, runs: Runs, saved: int) -> None:
        """Sets the epoch that this client has begun after its write ``saved``."""
        with self._lock:
            self.runs = runs
            self._saved = max(self._saved, saved)

    @contextmanager
    def write(self) -> Iterator[int]:
        """Returns a context with the number of a write.

        It waits for a write that is 1024 numbers behind.
        """
        with self._lock:
            while self._pending and self._is_far_ahead():
                self._ended.wait()
            self._requests += 1
            number = self._requests
            self._pending.add(number)
        try:
            yield number
        finally:
            with self._lock:
                self._pending.remove(number)
                self._ended.notify_all()

    def _is_far_ahead(self) -> bool:
        return self._requests >= min(self._pending) + MOST_ANSWERS - 1

    @property
    def done_before(self) -> int:
        """The number below which no write will be repeated."""
        with self._lock:
            return min(self._pending, default=self._requests + 1)

    @property
    def done(self) -> int:
        """The number of the last write before which no write is running, and which is
        not running itself.
        """
        return self.done_before - 1

    def set_saved(self, number: int) -> None:
        """Notes that the writes up to a number are in a save."""
        with self._lock:
            self._saved = max(self._saved, number)

    def _find_after(self, label: str, table: str) -> str:
        with self._finding:
            if self.runs.label == label:  # otherwise another thread has found the epoch
                runs = self._find(table)
                with self._lock:
                    self.runs = runs
            return self.runs.label
