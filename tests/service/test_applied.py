from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from torchrec_recstore_service.server.applied import AppliedRequests, ServerStoppingError
from torchrec_recstore_service.server.calls import CallRefusedError


def _never() -> int:
    raise AssertionError("carried out twice")


def test_a_repeated_request_is_answered_and_not_carried_out() -> None:
    applied = AppliedRequests()
    assert applied.once("a", 1, 1, lambda: 5) == 5
    assert applied.once("a", 1, 1, _never) == 5
    assert applied.once("b", 1, 1, lambda: 6) == 6
    assert applied.once("a", 2, 2, lambda: 7) == 7
    with pytest.raises(ValueError, match="has been answered already"):
        applied.once("a", 1, 1, _never)


def test_answers_are_kept_up_to_the_first_that_may_come_again() -> None:
    """``done_before`` is the number of the first unfinished request. Earlier requests are refused."""
    applied = AppliedRequests()
    for request in (1, 2, 3):
        assert applied.once("a", request, 1, lambda request=request: request) == request  # type: ignore[misc]
    assert applied.once("a", 4, 2, lambda: 4) == 4  # 1 is done, 2 and 3 are not
    for request in (2, 3, 4):
        assert applied.once("a", request, 2, _never) == request
    with pytest.raises(ValueError, match="request 1 of client 'a' has been answered already"):
        applied.once("a", 1, 1, _never)
    assert applied.once("a", 3, 3, _never) == 3
    with pytest.raises(ValueError, match="request 2 of client 'a' has been answered already"):
        applied.once("a", 2, 2, _never)
    assert applied.once("a", 5, 5, lambda: 5) == 5  # done up to the request itself
    assert applied.once("a", 5, 5, _never) == 5


def test_one_that_failed_may_come_again() -> None:
    applied = AppliedRequests()
    with pytest.raises(ZeroDivisionError):
        applied.once("a", 1, 1, lambda: 1 // 0)
    assert applied.once("a", 1, 1, lambda: 5) == 5


def test_a_repeated_request_waits_for_the_first() -> None:
    applied = AppliedRequests()
    begun, go = threading.Event(), threading.Event()

    def slow() -> int:
        begun.set()
        go.wait()
        return 5

    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(applied.once, "a", 1, 1, slow)
        begun.wait()
        again = threads.submit(applied.once, "a", 1, 1, _never)
        closed = threads.submit(applied.close)
        while not applied._closed:
            pass
        assert not closed.done()
        with pytest.raises(ServerStoppingError):
            applied.once("a", 2, 1, _never)
        go.set()
        assert first.result() == again.result() == 5
        closed.result()
    after = AppliedRequests()
    after.from_json(json.loads(json.dumps(applied.to_json())))
    assert after.once("a", 1, 1, _never) == 5


def test_clients_that_come_and_go_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    applied = AppliedRequests()
    for client in range(12_000):
        now += 1.0
        applied.once(str(client), 1, 1, lambda: 0)
    for request in range(1, 1000):
        applied.once("a", request, request, lambda: 0)
    assert applied.clients == len(applied._clients) == 10_000
    assert len(applied._clients["a"].answers) == 1


def test_a_client_that_may_still_repeat_a_write_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    applied = AppliedRequests()
    for client in range(10_000):
        applied.once(str(client), 1, 1, lambda: 5)
    with pytest.raises(CallRefusedError, match="10000 clients have written in the last 300 s"):
        applied.once("one more", 1, 1, _never)
    assert applied.once("0", 1, 1, _never) == 5
    now += 301.0
    assert applied.once("9", 2, 1, lambda: 6) == 6
    assert applied.once("one more", 1, 1, lambda: 7) == 7
    assert applied.once("9", 1, 1, _never) == 5


def test_the_answers_of_a_client_are_bounded() -> None:
    applied = AppliedRequests()
    for request in range(1, 1025):
        applied.once("a", request, 1, lambda: 0)
    with pytest.raises(ValueError, match="client 'a' may repeat 1024 requests"):
        applied.once("a", 1025, 1, _never)
    assert applied.once("a", 1025, 2, lambda: 1) == 1
