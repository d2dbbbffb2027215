"""Answers requests with the newest rows, several small requests at a time.

Tests: tests/serving/predict/test_predictor.py.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from torch import Tensor

from torchrec_recstore_serving.predict.requests import Request, call, merged, split
from torchrec_recstore_serving.publish.follower import Follower

_KEPT_TIMES = 10_000


@dataclass(frozen=True)
class Answer:
    """The answer to a request.

    Args:
        outputs: The tensors that the model returned, by name.
        version: The version of the rows and weights that answered.
        number: The number of the publication with this version.
        seconds_behind: The age of these rows in seconds.
    """

    outputs: Mapping[str, Tensor]
    version: str
    number: int
    seconds_behind: float


@dataclass(frozen=True)
class _Queued:
    """A request that waits for its answer.

    Args:
        request: The request.
        answer: The future that gets the answer.
        begin: The time at which the request was queued, by ``time.perf_counter()``.
    """

    request: Request
    answer: Future[Answer]
    begin: float


class Batcher:
    """A queue of requests, and threads that answer them.

    A thread takes all requests of one kind that wait, up to ``max_examples`` examples,
    and calls the model once. A request that finds a free thread is answered at once, so
    that batches are only made when there is load.

    Args:
        follower: The follower with the model.
        jagged: See :func:`torchrec_recstore_serving.predict.requests.request_of`.
        max_examples: The largest number of examples in a batch of several requests.
        threads: The number of threads that call the model.
        observe: A function that is called for each request, with its time in seconds
            and whether it has failed.
    """

    def __init__(
        self,
        follower: Follower,
        jagged: Mapping[str, tuple[str, int]],
        *,
        max_examples: int,
        threads: int,
        observe: Callable[[float, bool], object] = lambda seconds, failed: None,
    ) -> None:
        self._observe = observe
        self._follower = follower
        self._jagged = dict(jagged)
        self._max_examples = max_examples
        self._waiting: deque[_Queued] = deque()
        self._change = threading.Condition()
        self._closed = False
        self._alone: set[Hashable] = set()
        """The kinds of requests whose result has not one row for each example."""
        self._times: deque[float] = deque(maxlen=_KEPT_TIMES)
        self._requests = 0
        self._batches = 0
        self._failed = 0
        self._busy = 0
        """The number of threads that call the model."""
        self._call_s = math.inf
        """A running mean of the time of a call of the model."""
        self._threads = [
            threading.Thread(target=self._run, name=f"predict-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, request: Request, *, caller_s: float = 0.0) -> Future[Answer]:
        """Queues a request.

        Args:
            request: The request.
            caller_s: The longest time in seconds for which the calling thread may call
                the model itself, which saves the change of threads. It does so if no
                request waits, fewer than ``threads`` threads call the model, and the
                calls before took less time. Default: 0, never.

        Raises:
            RuntimeError: The queue is closed.
        """
        answer: Future[Answer] = Future()
        with self._change:
            if self._closed:
                raise RuntimeError("the server stops")
            queued = _Queued(request, answer, time.perf_counter())
            caller_answers = (
                not self._waiting
                and self._busy < len(self._threads)
                and self._call_s < caller_s
            )
            if caller_answers:
                self._busy += 1
            else:
                self._waiting.append(queued)
                self._change.notify()
        if caller_answers:
            self._answer([queued])
        return answer

    def close(self) -> None:
        """Answers the requests that wait, and ends the threads."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        for thread in self._threads:
            thread.join()

    def report(self) -> dict[str, float]:
        """Returns the counts of requests and batches, and percentiles of the times.

        The time of a request begins when it is queued, and is in milliseconds. Without
        requests, it is 0.
        """
        with self._change:
            times = sorted(self._times)
            counts = {
                "requests": self._requests,
                "failed": self._failed,
                "batches": self._batches,
            }
        return {
            **counts,
            "p50_ms": _percentile(times, 0.50),
            "p99_ms": _percentile(times, 0.99),
        }

    def _take(self) -> list[_Queued]:
        """Waits for requests, and returns those of one batch.

        An empty list: the queue is closed.
        """
        with self._change:
            while not self._waiting and not self._closed:
                self._change.wait()
            if not self._waiting:
                return []
            batch = [self._waiting.popleft()]
            self._take_more(batch)
            self._busy += 1
            return batch

    def _take_more(self, batch: list[_Queued]) -> None:
        """Adds the waiting requests that fit to the first one of a batch."""
        first = batch[0].request
        kind = first.kind()
        if first.examples is None or kind in self._alone:
            return
        total = first.examples
        is_full = False
        still_waiting: deque[_Queued] = deque()
        for queued in self._waiting:
            examples = queued.request.examples
            fits = not is_full and examples is not None
            if not fits or queued.request.kind() != kind:
                still_waiting.append(queued)
                continue
            total += examples or 0
            is_full = total > self._max_examples
            if is_full:
                still_waiting.append(queued)
            else:
                batch.append(queued)
        self._waiting = still_waiting

    def _run(self) -> None:
        while batch := self._take():
            self._answer(batch)

    def _answer(self, batch: Sequence[_Queued]) -> None:
        """Answers the requests of one batch. The caller has counted itself as busy."""
        start = time.perf_counter()
        answers = self._answers_to([queued.request for queued in batch])
        end = time.perf_counter()
        call_s = end - start
        with self._change:
            self._busy -= 1
            if self._call_s == math.inf:
                self._call_s = call_s
            else:
                self._call_s = 0.9 * self._call_s + 0.1 * call_s
            self._batches += 1
            self._requests += len(batch)
            self._failed += sum(isinstance(answer, Exception) for answer in answers)
            self._times.extend(end - queued.begin for queued in batch)
        for queued, answer in zip(batch, answers, strict=True):
            self._observe(end - queued.begin, isinstance(answer, Exception))
            if isinstance(answer, Exception):
                queued.answer.set_exception(answer)
            else:
                queued.answer.set_result(answer)

    def _answers_to(self, requests: Sequence[Request]) -> list[Answer | Exception]:
        """Calls the model once.

        If that fails, or the result cannot be split, calls it for each request.
        """
        seconds_behind = self._follower.seconds_behind
        try:
            model, publication = self._follower.served
            parts = split(call(model, merged(requests), self._jagged), requests)
        except Exception as error:
            if len(requests) == 1:
                return [error]
        else:
            if parts is not None:
                return [
                    Answer(
                        outputs=part,
                        version=publication.version,
                        number=publication.number,
                        seconds_behind=seconds_behind,
                    )
                    for part in parts
                ]
            with self._change:
                self._alone.add(requests[0].kind())
        answers: list[Answer | Exception] = []
        for request in requests:
            answers.extend(self._answers_to([request]))
        return answers


def _percentile(ascending: Sequence[float], share: float) -> float:
    if not ascending:
        return 0.0
    position = min(len(ascending) - 1, int(share * len(ascending)))
    return round(1000 * ascending[position], 3)
