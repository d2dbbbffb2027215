"""The process that shows items to users: it asks the served model for a score, and then
writes the user's click.

It does not wait for a server: a click without a score is written a second after its
time. A generator that was killed continues behind the last click of the stream.
"""

from __future__ import annotations

import json
import math
import queue
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Iterator
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from online.clicks import ANSWERED, NO_ANSWER, NOT_ASKED, REFUSED, Clicks, generated
from online.settings import Settings
from online.streams import ClickStream, stream_of

TICK_S = 0.1
MOST = 2048
"""The number of clicks that are written together."""
ANSWER_S = 1.0
"""The time for which an item waits for its score. Then it is shown without."""
QUEUED = 4  # requests that wait for a server
ALONE_S = 1.0  # A server that has refused a request is left alone for this time.


class Request:
    """A request for the scores of clicks.

    Args:
        clicks: (B,) of the dtype ``CLICK``.

    Attributes:
        outcome: What has become of the request, a number of ``OUTCOMES``.
        logits: The logits, (B,). NaN: there is none.
        fresh: The moment of the rows that have answered, in seconds since 1970.
        done: Set when the request has ended.
    """

    def __init__(self, clicks: Clicks) -> None:
        features = {
            name: [[id] for id in clicks[name].tolist()] for name in ("user", "item")
        }
        self.body = json.dumps({"arguments": {"features": features}}).encode()
        self.until = time.monotonic() + ANSWER_S
        self.outcome, self.logits, self.fresh = (
            NO_ANSWER,
            np.full(len(clicks), np.nan),
            math.nan,
        )
        self.done = threading.Event()

    def end(self, outcome: int) -> None:
        """Ends a request without an answer."""
        self.outcome = outcome
        self.done.set()

    @property
    def is_over(self) -> bool:
        """Whether the request has ended, or has waited for its time."""
        return self.done.is_set() or time.monotonic() >= self.until


class Server:
    """Asks ``recstore follow`` for scores over HTTP, in a thread, so that a caller
    never waits.

    Args:
        address: The address of the server, ``host:port``.
    """

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}/predict"
        self._again = 0.0
        self._requests: queue.Queue[Request] = queue.Queue(QUEUED)
        threading.Thread(target=self._work, daemon=True).start()

    def ask(self, clicks: Clicks) -> Request:
        """Asks for the logits of clicks (B,).

        A server that is left alone, or has too much to answer, is not asked.
        """
        request = Request(clicks)
        try:
            if time.monotonic() < self._again:
                raise queue.Full
            self._requests.put_nowait(request)
        except queue.Full:
            request.end(NOT_ASKED)
        return request

    def _work(self) -> None:
        while True:
            request = self._requests.get()
            if request.is_over:
                continue
            try:
                with urllib.request.urlopen(
                    self._url, request.body, timeout=ANSWER_S
                ) as answer:
                    told = json.loads(b"".join(_parts(answer, request)))
                (logits,) = told["outputs"].values()
                request.logits = np.array(logits, dtype=np.float64)
                request.fresh = time.time() - told["seconds_behind"]
                request.end(ANSWERED)
            except (
                OSError,
                HTTPException,
                ValueError,
            ) as error:  # killed, hung, or without a model yet
                self._again = time.monotonic() + ALONE_S
                # urllib raises a timeout of the connection as the reason of a URLError.
                hung = isinstance(getattr(error, "reason", error), TimeoutError)
                request.end(NO_ANSWER if hung else REFUSED)


def _parts(answer: HTTPResponse, request: Request) -> Iterator[bytes]:
    """Reads an answer.

    The timeout of a connection does not end one that arrives byte by byte.
    """
    while part := answer.read1(1 << 16):
        yield part
        if request.is_over:
            raise TimeoutError


class Batch:
    """Clicks that wait for the scores of both servers.

    Args:
        number: The number of the first click.
        clicks: (B,) of the dtype ``CLICK``, without scores.
        served: The server of the served model.
        frozen: The server of the frozen model.
    """

    def __init__(
        self, number: int, clicks: Clicks, served: Server, frozen: Server
    ) -> None:
        self.number, self.clicks = number, clicks
        self.requests = {"served": served.ask(clicks), "frozen": frozen.ask(clicks)}

    @property
    def is_over(self) -> bool:
        """Whether the clicks can be written."""
        return all(request.is_over for request in self.requests.values())

    def scored(self, fresh: float, due: npt.NDArray[np.float64]) -> float:
        """Completes the clicks with the scores, the age of the rows, and the time that
        they have waited.

        Args:
            fresh: The moment of the rows that have answered last, in seconds since
                1970.
            due: (B,) float64. The moments at which the clicks were due, in seconds
                since 1970.

        Returns:
            The moment of the rows that have answered last, by now.
        """
        now = time.time()
        self.clicks["waited"] = now - due
        outcomes = {
            name: each.outcome if each.done.is_set() else NO_ANSWER
            for name, each in self.requests.items()
        }
        for name, outcome in outcomes.items():
            self.clicks[f"{name}_outcome"] = outcome
            self.clicks[name] = (
                self.requests[name].logits if outcome == ANSWERED else np.nan
            )
        if outcomes["served"] == ANSWERED:
            fresh = self.requests["served"].fresh
            self.clicks["age"] = now - fresh
        else:  # The rows that have answered last become older, until they or newer ones answer again.
            self.clicks["age"] = np.maximum(now - fresh, now - due)
        return fresh


def generate(settings: Settings) -> None:
    """Writes the clicks that the stream lacks: the history at once, and each live click
    when its time has come.
    """
    stream = stream_of(settings)
    number, first_live = (
        stream.last(),
        (settings.history if settings.paced else settings.clicks),
    )
    while number < first_live:
        last = min(number + MOST, first_live)
        stream.append(number + 1, generated(settings, number + 1, last))
        number = last
    if number < settings.clicks:
        _generate_live(settings, stream, number)


def _generate_live(settings: Settings, stream: ClickStream, number: int) -> None:
    served, frozen = Server(settings.http), Server(settings.frozen_http)
    opened, fresh = _opened(settings, served, frozen, number)
    # A generator that was killed: the rows that had answered last are those of the last
    # click.
    if math.isnan(fresh):
        fresh = opened
        if number > settings.history:
            (click,) = stream.read(number - 1, 1)
            fresh = float(
                _due(settings, opened, number) + click["waited"] - click["age"]
            )
    most = max(MOST, settings.rate // 5)
    batches: deque[Batch] = deque()
    asked, ask_at = number, 0.0
    while number < settings.clicks:
        if time.monotonic() >= ask_at:
            ask_at = time.monotonic() + TICK_S
            due = (
                settings.history
                + 1
                + math.floor((time.time() - opened) * settings.rate)
            )
            last = min(due, asked + most, settings.clicks)
            if last > asked:
                batches.append(
                    Batch(
                        asked + 1, generated(settings, asked + 1, last), served, frozen
                    )
                )
                asked = last
        while batches and batches[0].is_over:
            batch = batches.popleft()
            numbers = batch.number + np.arange(len(batch.clicks))
            fresh = batch.scored(fresh, _due(settings, opened, numbers))
            stream.append(batch.number, batch.clicks)
            number = int(numbers[-1])
            _write(settings.written, number)
        time.sleep(TICK_S / 20)


def _opened(
    settings: Settings, served: Server, frozen: Server, number: int
) -> tuple[float, float]:
    """Waits until both servers answer, with rows of this session.

    Then the click after ``number`` is due.

    Returns:
        The moment of the first live click, in seconds since 1970, as if the run had
        never been interrupted, and the moment of the rows of the answer. NaN: the
        clicks of this session have begun before.
    """
    if settings.opened.exists():
        return int(settings.opened.read_text()) / 1000, math.nan
    while True:
        clicks = generated(settings, number + 1, number + 1)
        requests = [server.ask(clicks) for server in (served, frozen)]
        for request in requests:
            request.done.wait(ANSWER_S)
        fresh = requests[0].fresh
        if (
            all(request.outcome == ANSWERED for request in requests)
            and fresh * 1000 >= settings.session_ms
        ):
            opened = time.time() - (number - settings.history) / settings.rate
            _write(settings.opened, int(opened * 1000))
            return opened, fresh
        time.sleep(TICK_S)


def _due(settings: Settings, opened: float, number: Any) -> Any:
    """Returns the moment at which a click is due, in seconds since 1970."""
    return opened + (number - 1 - settings.history) / settings.rate


def _write(path: Path, number: int) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(str(number))
    beside.replace(path)
