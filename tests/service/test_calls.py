from __future__ import annotations

import threading
import time

import pytest

from torchrec_recstore_service.server.calls import (
    PATIENCE_S,
    Call,
    CallThreads,
    RequestMemory,
)


class _Event:
    """The event of a new call, as grpcio passes it to the threads."""

    def __init__(self, peer: str) -> None:
        self.call_details = None
        self.call = self
        self.cancelled = False
        self._peer = peer

    def peer(self) -> str:
        return self._peer

    def cancel(self) -> None:
        self.cancelled = True


@pytest.fixture
def memory() -> RequestMemory:
    return RequestMemory(100)


def _hold(threads: CallThreads, end: threading.Event) -> None:
    """Takes the only thread until ``end`` is set."""
    begun = threading.Event()
    threads.submit(lambda: (begun.set(), end.wait()))
    begun.wait()


def test_connections_take_turns() -> None:
    threads = CallThreads(1, "test")
    begin, order = threading.Event(), []
    _hold(threads, begin)
    works = [
        threads.submit(lambda event: order.append(event.peer()), _Event(peer))
        for peer in ["a"] * 5 + ["b"] * 2 + ["c"]
    ]
    assert threads.queued == 8
    begin.set()
    for work in works:
        work.result(60)
    assert order == ["a", "b", "c", "a", "b", "a", "a", "a"]
    threads.shutdown()


def test_a_connection_with_a_long_queue_gets_no_further_calls() -> None:
    threads = CallThreads(1, "test", 3)
    begin = threading.Event()
    _hold(threads, begin)
    events = [_Event(peer) for peer in ["a"] * 5 + ["b"] * 2]
    works = [threads.submit(lambda event: None, event) for event in events]
    cancelled = [event.cancelled for event in events]
    assert (
        cancelled
        == [False] * 3 + [True] * 2 + [False, True]
        == [work.cancelled() for work in works]
    )
    assert (threads.queued, threads.refused) == (4, 3)
    begin.set()
    for work in works:
        assert work.cancelled() or work.result(60) is None
    threads.shutdown()


def test_a_connection_has_few_calls() -> None:
    threads = CallThreads(1, "test", of_one=2)
    begin = threading.Event()
    held = threads.submit(lambda event: begin.wait(), _Event("a"))
    events = [_Event(peer) for peer in "aabbb"]
    works = [threads.submit(lambda event: None, event) for event in events]
    assert [event.cancelled for event in events] == [False, True, False, False, True]
    begin.set()
    for work in (held, works[0], works[2], works[3]):
        work.result(60)
    # the calls before have ended
    threads.submit(lambda event: None, _Event("a")).result(60)
    assert threads.refused == 2
    threads.shutdown()


@pytest.mark.parametrize("stopping", [False, True])
def test_calls_end_whose_clients_keep_threads_that_others_need(
    memory: RequestMemory, stopping: bool
) -> None:
    threads = CallThreads(3, "test")
    ended = [threading.Event() for _ in range(3)]
    done = threading.Event()

    def run(number: int) -> None:
        call = Call(ended[number].set, memory)
        with threads.place(call):
            if number:  # it works, and does not wait for its client
                done.wait()
                return
            call.wait()
            ended[number].wait()

    running = [threads.submit(run, number) for number in range(3)]
    time.sleep(2 * PATIENCE_S)
    assert not any(event.is_set() for event in ended)  # nobody waits for a thread
    if stopping:
        threads.stop()
        assert ended[0].wait(60)
    else:
        threads.submit(lambda: None).result(60)
    assert [event.is_set() for event in ended] == [True, False, False]
    assert threads.ended == 1
    done.set()
    for each in running:
        each.result(60)
    threads.shutdown()


def test_errors_and_results_of_calls() -> None:
    threads = CallThreads(2, "test")
    assert threads.submit(divmod, 7, 2).result(60) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        threads.submit(divmod, 7, 0).result(60)
    threads.shutdown()


def test_the_memory_of_requests_is_bounded(memory: RequestMemory) -> None:
    one, other = Call(print, memory), Call(print, memory)
    assert memory.take(one, 60)
    assert not memory.take(other, 41)
    assert memory.take(other, 40)
    assert memory.held == 100
    memory.give_back(one)
    assert memory.held == 40
    assert memory.take(other, 60)


def test_a_client_that_sends_little_is_late_and_one_that_sends_much_is_not(
    memory: RequestMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    drips, streams = Call(print, memory), Call(print, memory)
    for _ in range(10):
        for call, size in ((drips, 1), (streams, 1 << 20)):
            call.wait()
            now += 0.2
            call.go_on(size)
            assert call.late_s == 0
    drips.wait()
    streams.wait()
    assert drips.late_s > 1.9
    assert streams.late_s == 0
    now += 3.0  # what a client has sent before does not count for later
    assert streams.late_s == 3.0
