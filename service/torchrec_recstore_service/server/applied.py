"""The writes that a parameter server has carried out, so that a repeated write is not carried out twice."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from torchrec_recstore_service.server.calls import CallRefusedError

_CLIENTS = 10_000
_ANSWERS = 1024  # of a client
_NAME_BYTES = 64
_KEPT_S = 300.0  # time for which a client may repeat a write


class ServerStoppingError(RuntimeError):
    """The server is stopping and accepts no more writes."""


@dataclass
class _Client:
    done_before: int = 0
    answers: dict[int, Future[int] | int] = field(default_factory=dict)  # a Future while the request is carried out
    last_used: float = field(default_factory=time.monotonic)


class AppliedRequests:
    """The writes that have been carried out or are running. A repeated write is answered without a second execution.

    Clients number their requests. With each request, a client sends the number below which it repeats no request.
    """

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._changes = 0
        self._clients: OrderedDict[str, _Client] = OrderedDict()
        self._closed = False

    def once(self, client: str, request: int, done_before: int, action: Callable[[], int]) -> int:
        """Calls ``action`` and returns its result, or returns the first result if the request is repeated.

        A request that raised an error may be repeated; ``action`` is then called again.

        Args:
            client: The name of the client.
            request: The number of the request.
            done_before: The number below which the client repeats no request.
            action: The function that carries out the request.

        Raises:
            ValueError: ``request`` is below the number below which the client repeats no request, the client may repeat
                too many requests, or its name is too long.
            CallRefusedError: Too many clients have written.
            ServerStoppingError: :meth:`close` has been called.
        """
        if not 0 < len(client.encode()) <= _NAME_BYTES:
            raise ValueError(
                f"the name of a client must have from 1 to {_NAME_BYTES} bytes, got {len(client)} characters"
            )
        with self._lock:
            self.check_open()
            known = self._client(client)
            if done_before > known.done_before:
                known.done_before = done_before
                for number in [number for number in known.answers if number < done_before]:
                    del known.answers[number]
            if request < known.done_before:
                raise ValueError(f"request {request} of client {client!r} has been answered already")
            answer = known.answers.get(request)
            if answer is None:
                if len(known.answers) >= _ANSWERS:
                    raise ValueError(
                        f"client {client!r} may repeat {_ANSWERS} requests: it must send a higher done_before"
                    )
                mine: Future[int] = Future()
                known.answers[request] = mine
        if answer is not None:
            return answer if isinstance(answer, int) else answer.result()
        try:
            result = action()
        except BaseException as error:
            with self._lock:
                known.answers.pop(request, None)
            mine.set_exception(error)
            raise
        with self._lock:
            if request in known.answers:
                known.answers[request] = result
        mine.set_result(result)
        return result

    @property
    def clients(self) -> int:
        """The number of clients that may repeat a request."""
        return len(self._clients)

    def _client(self, name: str) -> _Client:
        """Returns what is known of a client. The client that has not written for the longest time may be forgotten."""
        known = self._clients.get(name)
        now = time.monotonic()
        if known is None:
            if len(self._clients) >= _CLIENTS:
                if now - next(iter(self._clients.values())).last_used < _KEPT_S:
                    raise CallRefusedError(
                        grpc.StatusCode.UNAVAILABLE,
                        f"{_CLIENTS} clients have written in the last {_KEPT_S:g} s: use one client for many calls",
                    )
                self._clients.popitem(last=False)
            known = self._clients[name] = _Client()
        known.last_used = now
        self._clients.move_to_end(name)
        return known

    def check_open(self) -> None:
        """Raises ServerStoppingError if :meth:`close` has been called."""
        if self._closed:
            raise ServerStoppingError("the server stops")

    @contextmanager
    def change(self) -> Iterator[None]:
        """Returns a context for a change without a number. :meth:`close` waits for its end.

        Raises:
            ServerStoppingError: :meth:`close` has been called.
        """
        with self._lock:
            self.check_open()
            self._changes += 1
        try:
            yield
        finally:
            with self._lock:
                self._changes -= 1
                self._lock.notify_all()

    def close(self) -> None:
        """Refuses new requests and waits for the running requests."""
        with self._lock:
            self._closed = True
            answers = [answer for client in self._clients.values() for answer in client.answers.values()]
            self._lock.wait_for(lambda: self._changes == 0)
        wait([answer for answer in answers if isinstance(answer, Future)])

    def reopen(self) -> None:
        """Accepts requests again after :meth:`close`."""
        self._closed = False

    def to_json(self) -> dict[str, Any]:
        """Returns the requests that have been carried out, for :meth:`from_json`. Call :meth:`close` before."""
        with self._lock:
            return {
                name: {
                    "done_before": client.done_before,
                    "answers": {
                        str(number): answer.result() if isinstance(answer, Future) else answer
                        for number, answer in client.answers.items()
                    },
                }
                for name, client in self._clients.items()
            }

    def from_json(self, document: dict[str, Any]) -> None:
        """Adds the requests that another server has carried out."""
        for name, entry in document.items():
            client = self._clients[name] = _Client(entry["done_before"])
            client.answers.update((int(number), deleted) for number, deleted in entry["answers"].items())
