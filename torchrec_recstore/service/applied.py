from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

_CLIENTS = 10_000


class ServerStoppingError(RuntimeError):
    """Nothing is written any more."""


@dataclass
class _Client:
    done_before: int = 0
    answers: dict[int, Future[int]] = field(default_factory=dict)


class AppliedRequests:
    """Writes that have been carried out, or are being, so that a repeated one is answered and not carried out again.

    Clients number their requests, and say below which number none will come again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clients: OrderedDict[str, _Client] = OrderedDict()
        self._closed = False

    def once(self, client: str, request: int, done_before: int, action: Callable[[], int]) -> int:
        """What ``action`` returns, which is called unless it has been for that request; one that raised may come again.

        Raises:
            ValueError: the request is one of those that were not to come again.
            ServerStoppingError: after :meth:`close`.
        """
        with self._lock:
            self.check_open()
            known = self._clients.setdefault(client, _Client())
            self._clients.move_to_end(client)
            while len(self._clients) > _CLIENTS:
                self._clients.popitem(last=False)
            known.done_before = max(known.done_before, done_before)
            for number in [number for number in known.answers if number < known.done_before]:
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
        """Raises ServerStoppingError after :meth:`close`."""
        if self._closed:
            raise ServerStoppingError("the server stops")

    def close(self) -> None:
        """Lets no request begin any more, and waits for those that have."""
        with self._lock:
            self._closed = True
            answers = [answer for client in self._clients.values() for answer in client.answers.values()]
        wait(answers)

    def to_json(self) -> dict[str, Any]:
        """All that has been carried out, for :meth:`from_json`; after :meth:`close`."""
        with self._lock:
            return {
                name: {
                    "done_before": client.done_before,
                    "answers": {str(number): answer.result() for number, answer in client.answers.items()},
                }
                for name, client in self._clients.items()
            }

    def from_json(self, document: dict[str, Any]) -> None:
        """Takes over what another server has carried out."""
        for name, entry in document.items():
            client = self._clients[name] = _Client(entry["done_before"])
            for number, deleted in entry["answers"].items():
                client.answers[int(number)] = Future()
                client.answers[int(number)].set_result(deleted)
