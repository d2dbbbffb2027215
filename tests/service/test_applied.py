from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from torchrec_recstore_service.server.applied import AppliedRequests
from torchrec_recstore_service.server.native import (
    CallRefusedError,
    ServerStoppingError,
)


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
    """``done_before`` is the number of the first unfinished request.

    Earlier requests are refused.
    """
    applied = AppliedRequests()
    for request in (1, 2, 3):
        assert applied.once("a", request, 1, lambda request=request: request) == request  # type: ignore[misc]
    assert applied.once("a", 4, 2, lambda: 4) == 4  # 1 is done, 2 and 3 are not
    for request in (2, 3, 4):
        assert applied.once("a", request, 2, _never) == request
    with pytest.raises(
        ValueError, match="request 1 of client 'a' has been answered already"
    ):
        applied.once("a", 1, 1, _never)
    assert applied.once("a", 3, 3, _never) == 3
    with pytest.raises(
        ValueError, match="request 2 of client 'a' has been answered already"
    ):
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
        while True:
            try:
                applied.check_open()
            except ServerStoppingError:
                break
        assert not closed.done()
        with pytest.raises(ServerStoppingError):
            applied.once("a", 2, 1, _never)
        go.set()
        assert first.result() == again.result() == 5
        closed.result()
    after = AppliedRequests()
    after.from_json(json.loads(json.dumps(applied.to_json())))
    assert after.once("a", 1, 1, _never) == 5


@pytest.mark.parametrize(
    "entry",
    [
        "b",
        {"answers": {}},
        {"done_before": "1", "answers": {}},
        {"done_before": 1, "answers": {"x": 1}},
        {"done_before": 1, "answers": {"1": "../victim"}},
    ],
)
def test_a_damaged_document_changes_nothing(entry: object) -> None:
    applied = AppliedRequests()
    applied.once("a", 1, 1, lambda: 5)
    with pytest.raises(
        ValueError, match="the list of the requests that were carried out is damaged"
    ):
        applied.from_json({"b": {"done_before": 1, "answers": {}}, "c": entry})
    assert applied.once("a", 1, 1, _never) == 5
    assert applied.clients == 1


def test_clients_that_come_and_go_take_no_memory() -> None:
    applied = AppliedRequests(most_clients=1000, kept_s=0.0)
    for client in range(1200):
        applied.once(str(client), 1, 1, lambda: 0)
    for request in range(1, 1000):
        applied.once("a", request, request, lambda: 0)
    applied.close()
    kept = applied.to_json()
    assert applied.clients == len(kept) == 1000
    assert kept["a"] == {"done_before": 999, "answers": {"999": 0}}


def test_a_client_that_may_still_repeat_a_write_is_not_forgotten() -> None:
    applied = AppliedRequests(most_clients=100, kept_s=3.0)
    for client in range(100):
        applied.once(str(client), 1, 1, lambda: 5)
    with pytest.raises(
        CallRefusedError, match="100 clients have written in the last 3 s"
    ):
        applied.once("one more", 1, 1, _never)
    assert applied.once("0", 1, 1, _never) == 5
    time.sleep(3.1)
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
