"""The writes that a parameter server has carried out, so that a repeated write is not carried out twice."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

_CLIENTS = 10_000


class ServerStoppingError(RuntimeError):
    """The server is stopping and accepts no more writes."""


@dataclass
class _Client:
    done_before: int = 0
    answers: dict[int, Future[int]] = field(default_factory=dict)


class AppliedRequests:
    """The writes that have been carried out or are running. A repeated write is answered without a second execution.

    Clients number their requests. With each request, a client sends the number below which it repeats no request.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
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
            ValueError: ``request`` is below the number below which the client repeats no request.
            ServerStoppingError: :meth:`close` has been called.
        """
        with self._lock:
            self.check_open()
            known = self._clients.setdefault(client, _Client())
            self._clients.move_to_end(client)
            while len(self._clients) > _CLIENTS:
                self._clients.popitem(last=False)
            if done_before > known.done_before:
                known.done_before = done_before
                for number in [number for number in known.answers if number < done_before]:
                    del known.answers[number]
            if request < known.done_before:
                raise ValueError(f"request {request} of client {client!r} has been answered already")
            answer = known.answers.get(request)
            mine = answer is None
            if answer is None:
                answer = known.answers[request] = Future()
        if not mine:
            return answer.result()
        try:
            answer.set_result(action())
        except BaseException as error:
            with self._lock:
                known.answers.pop(request, None)
            answer.set_exception(error)
        return answer.result()

    def check_open(self) -> None:
        """Raises ServerStoppingError if :meth:`close` has been called."""
        if self._closed:
            raise ServerStoppingError("the server stops")

    def close(self) -> None:
        """Refuses new requests and waits for the running requests."""
        with self._lock:
            self._closed = True
            answers = [answer for client in self._clients.values() for answer in client.answers.values()]
        wait(answers)

    def to_json(self) -> dict[str, Any]:
        """Returns the requests that have been carried out, for :meth:`from_json`. Call :meth:`close` before."""
        with self._lock:
            return {
                name: {
                    "done_before": client.done_before,
                    "answers": {str(number): answer.result() for number, answer in client.answers.items()},
                }
                for name, client in self._clients.items()
            }

    def from_json(self, document: dict[str, Any]) -> None:
        """Adds the requests that another server has carried out."""
        for name, entry in document.items():
            client = self._clients[name] = _Client(entry["done_before"])
            for number, deleted in entry["answers"].items():
                client.answers[int(number)] = Future()
                client.answers[int(number)].set_result(deleted)
