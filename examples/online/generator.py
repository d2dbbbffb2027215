"""The process that shows items to users.

It asks the served model for a score, and then writes the user's click. It does not wait
for a server: a click without a score is written a second after its time. A generator
that was killed continues behind the last click of the stream.
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
MAX_CLICKS = 2048
"""The number of clicks that are written together."""
ANSWER_S = 1.0
"""The time for which an item waits for its score. Then it is shown without a score."""
MAX_QUEUED = 4
"""The number of requests that wait for a server."""
PAUSE_S = 1.0
"""The time for which a server that has refused a request is not asked."""


class Request:
    """A request for the scores of clicks.

    Args:
        clicks: (B,) of the dtype ``CLICK``.

    Attributes:
        outcome: The outcome of the request, a number of ``OUTCOMES``.
        logits: The logits, (B,). NaN: there is none.
        rows_time: The moment of the rows that have answered, in seconds since 1970.
        done: Set when the request has ended.
    """

    def __init__(self, clicks: Clicks) -> None:
        features = {}
        for name in ("user", "item"):
            features[name] = [[id_] for id_ in clicks[name].tolist()]
        body = {"arguments": {"features": features}}
        self.body = json.dumps(body).encode()
        self.until = time.monotonic() + ANSWER_S
        self.outcome = NO_ANSWER
        self.logits = np.full(len(clicks), np.nan)
        self.rows_time = math.nan
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
    """Asks ``recstore follow`` for scores over HTTP.

    It asks in a thread, so that a caller never waits.

    Args:
        address: The address of the server, ``host:port``.
    """

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}/predict"
        self._paused_until = 0.0
        self._requests: queue.Queue[Request] = queue.Queue(MAX_QUEUED)
        threading.Thread(target=self._work, daemon=True).start()

    def ask(self, clicks: Clicks) -> Request:
        """Asks for the logits of clicks (B,).

        A server that has just refused a request, or has too many to answer, is not
        asked.
        """
        request = Request(clicks)
        try:
            if time.monotonic() < self._paused_until:
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
                reply = self._reply_to(request)
                (logits,) = reply["outputs"].values()
                request.logits = np.array(logits, dtype=np.float64)
                request.rows_time = time.time() - reply["seconds_behind"]
                request.end(ANSWERED)
            except (OSError, HTTPException, ValueError) as error:
                # The server was killed, hangs, or has no model yet.
                self._paused_until = time.monotonic() + PAUSE_S
                # urllib raises a timeout of the connection as the reason of a URLError.
                reason = getattr(error, "reason", error)
                hangs = isinstance(reason, TimeoutError)
                request.end(NO_ANSWER if hangs else REFUSED)

    def _reply_to(self, request: Request) -> Any:
        with urllib.request.urlopen(
            self._url,
            request.body,
            timeout=ANSWER_S,
        ) as response:
            return json.loads(b"".join(_parts(response, request)))


def _parts(response: HTTPResponse, request: Request) -> Iterator[bytes]:
    """Reads a response for at most the time of a request.

    The timeout of a connection does not end a response that arrives byte by byte.
    """
    while part := response.read1(1 << 16):
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
        self,
        number: int,
        clicks: Clicks,
        served: Server,
        frozen: Server,
    ) -> None:
        self.number = number
        self.clicks = clicks
        self.requests = {"served": served.ask(clicks), "frozen": frozen.ask(clicks)}

    @property
    def is_over(self) -> bool:
        """Whether the clicks can be written."""
        return all(request.is_over for request in self.requests.values())

    def complete(self, rows_time: float, due: npt.NDArray[np.float64]) -> float:
        """Completes the clicks with the scores, the age of the rows, and the waits.

        Args:
            rows_time: The moment of the rows that have answered last, in seconds since
                1970.
            due: (B,) float64. The moments at which the clicks were due, in seconds
                since 1970.

        Returns:
            The moment of the rows that have answered last, by now.
        """
        now = time.time()
        self.clicks["waited"] = now - due
        outcomes = {}
        for name, request in self.requests.items():
            outcome = NO_ANSWER
            if request.done.is_set():
                outcome = request.outcome
            outcomes[name] = outcome
            self.clicks[f"{name}_outcome"] = outcome
            self.clicks[name] = request.logits if outcome == ANSWERED else np.nan
        if outcomes["served"] == ANSWERED:
            rows_time = self.requests["served"].rows_time
            self.clicks["age"] = now - rows_time
        else:
            # The rows that have answered last become older, until they or newer ones
            # answer again.
            self.clicks["age"] = np.maximum(now - rows_time, now - due)
        return rows_time


def generate(settings: Settings) -> None:
    """Writes the clicks that the stream lacks.

    The history is written at once, and each live click when its time has come.
    """
    stream = stream_of(settings)
    number = stream.last()
    last_at_once = settings.history if settings.paced else settings.clicks
    while number < last_at_once:
        last = min(number + MAX_CLICKS, last_at_once)
        stream.append(number + 1, generated(settings, number + 1, last))
        number = last
    if number < settings.clicks:
        _generate_live(settings, stream, number)


def _generate_live(
    settings: Settings,
    stream: ClickStream,
    number: int,
) -> None:
    """Writes the live clicks after click ``number``."""
    served = Server(settings.http)
    frozen = Server(settings.frozen_http)
    opened, rows_time = _opened(settings, served, frozen, number)
    # If a generator was killed, the rows that had answered last are those of the last
    # click.
    if math.isnan(rows_time):
        rows_time = opened
        if number > settings.history:
            (click,) = stream.read(number - 1, 1)
            written = _due(settings, opened, number) + click["waited"]
            rows_time = float(written - click["age"])
    max_clicks = max(MAX_CLICKS, settings.rate // 5)
    batches: deque[Batch] = deque()
    last_asked = number
    ask_at = 0.0
    while number < settings.clicks:
        if time.monotonic() >= ask_at:
            ask_at = time.monotonic() + TICK_S
            due_clicks = math.floor((time.time() - opened) * settings.rate)
            last_due = settings.history + 1 + due_clicks
            last = min(last_due, last_asked + max_clicks, settings.clicks)
            if last > last_asked:
                first = last_asked + 1
                clicks = generated(settings, first, last)
                batches.append(Batch(first, clicks, served, frozen))
                last_asked = last
        while batches and batches[0].is_over:
            batch = batches.popleft()
            numbers = batch.number + np.arange(len(batch.clicks))
            due = _due(settings, opened, numbers)
            rows_time = batch.complete(rows_time, due)
            stream.append(batch.number, batch.clicks)
            number = int(numbers[-1])
            _write(settings.written, number)
        time.sleep(TICK_S / 20)


def _opened(
    settings: Settings,
    served: Server,
    frozen: Server,
    number: int,
) -> tuple[float, float]:
    """Waits until both servers answer, with rows of this session.

    Then the click after ``number`` is due.

    Returns:
        The moment of the first live click, in seconds since 1970, as if the run had
        never been interrupted, and the moment of the rows of the answer. NaN: the
        clicks of this session have already begun.
    """
    if settings.opened.exists():
        return int(settings.opened.read_text()) / 1000, math.nan
    while True:
        clicks = generated(settings, number + 1, number + 1)
        requests = [server.ask(clicks) for server in (served, frozen)]
        for request in requests:
            request.done.wait(ANSWER_S)
        have_answered = all(request.outcome == ANSWERED for request in requests)
        rows_time = requests[0].rows_time
        if have_answered and rows_time * 1000 >= settings.session_ms:
            opened = time.time() - (number - settings.history) / settings.rate
            _write(settings.opened, int(opened * 1000))
            return opened, rows_time
        time.sleep(TICK_S)


def _due(
    settings: Settings,
    opened: float,
    number: Any,
) -> Any:
    """Returns the moment at which a click is due, in seconds since 1970."""
    return opened + (number - 1 - settings.history) / settings.rate


def _write(path: Path, number: int) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_text(str(number))
    temporary.replace(path)
