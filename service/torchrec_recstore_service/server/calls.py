"""The threads that carry out the calls of a server, and the end of calls whose clients
keep a thread waiting.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torchrec_recstore_service.server.native import Native, native

PATIENCE_S: float = native["patience_s"]()
"""The time for which a full server waits for a client before it ends the client's call.

The native library has the same rules for the calls on rows, and so the constants.
"""
BYTES_PER_S: float = native["bytes_per_s"]()
"""The number of bytes per second that a call must at least transfer, in the long run,
if the server is full.
"""
_LONGEST_TURN_S = 0.5


@dataclass(eq=False)
class Call:
    """A call that has a thread.

    Args:
        end: The function that ends the call. The call's thread then gets an error from
            gRPC.
        memory: The memory of the requests of all calls.
    """

    end: Callable[[], object]
    memory: RequestMemory
    _late_s: float = 0.0
    _since: float | None = None
    held: int = 0
    """The size in bytes of the requests that the call keeps in memory."""

    def wait(self) -> None:
        """Notes that the thread waits for the client from now on."""
        self._since = time.monotonic()

    def go_on(self, moved: int) -> None:
        """Notes that the thread goes on after a transfer of ``moved`` bytes."""
        self._late_s = max(0.0, self.late_s - moved / BYTES_PER_S)
        self._since = None

    @property
    def late_s(self) -> float:
        """The time in seconds that the client has kept the thread waiting, beyond the
        time that its bytes may take.

        It is 0 while the thread works.
        """
        since = self._since
        return 0.0 if since is None else self._late_s + time.monotonic() - since


class RequestMemory(Native):
    """Counts the bytes of the requests of all running calls, also of those that the
    native library answers.

    Args:
        limit: The largest number of bytes.
    """

    def __init__(self, limit: int) -> None:
        super().__init__("memory", limit)
        self.limit = limit

    @property
    def held(self) -> int:
        """The number of bytes that all calls keep now."""
        return int(self.invoke("held"))

    def take(self, call: Call, size: int) -> bool:
        """Adds ``size`` bytes to those that ``call`` keeps.

        Returns False, and adds nothing, if that is too much.
        """
        if not self.invoke("take", size):
            return False
        call.held += size
        return True

    def give_back(self, call: Call) -> None:
        """Notes that ``call`` keeps no request any more."""
        self.invoke("give_back", call.held)
        call.held = 0


@dataclass
class _Work:
    future: Future[Any]
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


class CallThreads(ThreadPoolExecutor):
    """The threads for calls.

    Clients take turns, and no client keeps a thread that others need.

    When all threads are taken and a call waits for one, the calls end whose clients
    have kept a thread waiting for more than :data:`PATIENCE_S`: the client has sent no
    request, or has not read the replies. If clients of many connections wait, the
    patience is shorter, so that each connection gets a turn within half a second.

    This is a ThreadPoolExecutor because grpcio accepts only this class for the threads
    of a method. Nothing of that class but its type is used.

    Args:
        threads: The largest number of calls that run at the same time.
        name: The name of the threads.
        queued: The largest number of calls that wait for a thread. Beyond it, a
            connection with a waiting call gets no further one.
        of_one: The largest number of calls of a connection that run or wait. Default:
            None, no limit.
    """

    def __init__(
        self,
        threads: int,
        name: str,
        queued: int = 4096,
        of_one: int | None = None,
    ) -> None:
        super().__init__(1, name)
        self._limit = threads
        self._name = name
        self._longest_queue = queued
        self._most_of_one = of_one
        # by connection, the calls that run or wait
        self._of_one: Counter[str] = Counter()
        self._condition = threading.Condition()
        # by connection, in the order of their turns
        self._queues: OrderedDict[str, deque[_Work]] = OrderedDict()
        self._idle = 0
        self._started = 0
        self._watching = False
        self._stopping = False
        self._closed = False
        self._running: set[Call] = set()
        self.ended = 0
        """The number of calls that were ended because their clients kept a thread
        waiting.
        """
        self.refused = 0
        """The number of calls that were cancelled at once because too many calls run or
        wait.
        """

    @property
    def running(self) -> int:
        """The number of calls that have a thread."""
        return len(self._running)

    @property
    def queued(self) -> int:
        """The number of calls that wait for a thread."""
        return sum(map(len, list(self._queues.values())))

    @property
    def is_busy(self) -> bool:
        """Whether a call runs or waits for a thread."""
        with self._condition:
            return bool(self._queues) or self._started > self._idle

    def submit(
        self,
        function: Callable[..., Any],
        /,
        *arguments: Any,
        **named: Any,
    ) -> Future[Any]:
        """Runs a call in a thread when it is the turn of the call's connection."""
        call = _call_among(arguments)
        work = _Work(Future(), function, arguments)
        peer = "" if call is None else str(call.peer())
        with self._condition:
            if call is not None and self._is_full(peer):
                self.refused += 1
                call.cancel()
                work.future.cancel()
                return work.future
            self._of_one[peer] += 1
            self._queues.setdefault(peer, deque()).append(work)
            if self._idle:
                self._idle -= 1
                self._condition.notify()
            elif self._started < self._limit:
                self._started += 1
                threading.Thread(
                    target=self._run,
                    name=f"{self._name}-{self._started}",
                    daemon=True,
                ).start()
            else:
                self._watch()
        return work.future

    def _is_full(self, peer: str) -> bool:
        if self._most_of_one is not None and self._of_one[peer] >= self._most_of_one:
            return True
        return peer in self._queues and self.queued >= self._longest_queue

    @contextmanager
    def place(self, call: Call) -> Iterator[None]:
        """Returns a context in which a call has this thread until it is ended as late."""
        with self._condition:
            self._running.add(call)
        try:
            yield
        finally:
            with self._condition:
                self._running.discard(call)

    def end_late(self) -> None:
        """Ends the calls whose clients have kept a thread waiting for too long."""
        self._end([call for call in list(self._running) if call.late_s > PATIENCE_S])

    def stop(self) -> None:
        """Ends from now on each call whose client keeps a thread waiting, also while
        there are free threads.
        """
        with self._condition:
            self._stopping = True
            self._watch()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the threads that have no call, and the others after their calls.

        It does not wait.
        """
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def _end(self, calls: list[Call]) -> None:
        with self._condition:
            calls = [call for call in calls if call in self._running]
            self._running.difference_update(calls)
            self.ended += len(calls)
        for call in calls:
            call.end()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._queues:
                    if self._closed:
                        return
                    self._idle += 1
                    self._condition.wait()
                peer, works = next(iter(self._queues.items()))
                work = works.popleft()
                if works:
                    self._queues.move_to_end(peer)
                else:
                    del self._queues[peer]
            if work.future.set_running_or_notify_cancel():
                try:
                    work.future.set_result(work.function(*work.arguments))
                except BaseException as error:
                    work.future.set_exception(error)
            with self._condition:
                self._of_one[peer] -= 1
                if not self._of_one[peer]:
                    del self._of_one[peer]
            del work

    def _watch(self) -> None:
        if not self._watching:
            self._watching = True
            threading.Thread(
                target=self._end_late_calls,
                name=f"{self._name}-watch",
                daemon=True,
            ).start()

    def _end_late_calls(self) -> None:
        """Ends late calls as long as a call waits for a thread."""
        while True:
            with self._condition:
                if self._closed or not (
                    self._queues or (self._stopping and self.is_busy)
                ):
                    self._watching = False
                    return
                running = list(self._running)
                waiting = self.queued
                connections = len(self._queues)
                stopping = self._stopping
            turn_s = _LONGEST_TURN_S * self._limit / max(1, connections)
            patience_s = min(PATIENCE_S, turn_s)
            late_s = {call: call.late_s for call in running}
            late_calls = [call for call in running if late_s[call] > patience_s]
            late_calls.sort(key=lambda call: late_s[call], reverse=True)
            # one for each call that waits for a thread, the latest ones first
            self._end(late_calls if stopping else late_calls[:waiting])
            time.sleep(patience_s / 10)


def _call_among(arguments: Sequence[Any]) -> Any:
    """Returns the new call whose method gRPC wants to be run, or None.

    grpcio 1.85.1 passes the event of the call, which knows the address of the client.
    """
    for argument in arguments:
        if hasattr(argument, "call_details"):
            return argument.call
    return None
