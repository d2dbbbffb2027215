"""The writes that a parameter server has carried out, so that a repeated write is not
carried out twice.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_uint64
from typing import Any

from torchrec_recstore_service.server.native import VISIT_WRITE, Native

_CLIENTS = 10_000
_KEPT_S = 300.0  # time for which a client may repeat a write


class AppliedRequests(Native):
    """The writes that have been carried out or are running.

    A repeated write is answered without a second execution.

    Clients number their requests. With each request, a client sends the number below
    which it repeats no request.

    Args:
        most_clients: The largest number of clients that are remembered. Default:
            10,000.
        kept_s: The time in seconds for which a client may repeat a write. Default: 300.
    """

    def __init__(self, most_clients: int = _CLIENTS, kept_s: float = _KEPT_S) -> None:
        super().__init__("applied", most_clients, kept_s)

    def once(
        self,
        client: str,
        request: int,
        done_before: int,
        action: Callable[[], int],
    ) -> int:
        """Calls ``action`` and returns its result, or returns the first result if the
        request is repeated.

        A request that raised an error may be repeated; ``action`` is then called again.

        Args:
            client: The name of the client.
            request: The number of the request.
            done_before: The number below which the client repeats no request.
            action: The function that carries out the request.

        Raises:
            ValueError: ``request`` is below the number below which the client repeats
                no request, the client may repeat too many requests, or its name is too
                long.
            CallRefusedError: Too many clients have written.
            ServerStoppingError: :meth:`close` has been called.
        """
        name = client.encode()
        first_result = c_uint64()
        execution = self.checked(
            "begin",
            name,
            len(name),
            request,
            done_before,
            byref(first_result),
        )
        if execution is None:
            return first_result.value
        result = 0
        has_failed = True
        try:
            result = action()
            has_failed = False
        finally:
            self.invoke(
                "finish",
                name,
                len(name),
                request,
                execution,
                has_failed,
                result,
            )
        return result

    @property
    def clients(self) -> int:
        """The number of clients that may repeat a request."""
        return int(self.invoke("clients"))

    def check_open(self) -> None:
        """Raises ServerStoppingError if :meth:`close` has been called."""
        self.checked("check_open")

    @contextmanager
    def change(self) -> Iterator[None]:
        """Returns a context for a change without a number, for which :meth:`close` waits.

        Raises:
            ServerStoppingError: :meth:`close` has been called.
        """
        self.checked("begin_change")
        try:
            yield
        finally:
            self.invoke("end_change")

    def close(self) -> None:
        """Refuses new requests and waits for the running requests."""
        self.invoke("close")

    def reopen(self) -> None:
        """Accepts requests again after :meth:`close`."""
        self.invoke("reopen")

    def to_json(self) -> dict[str, Any]:
        """Returns the requests that have been carried out, for :meth:`from_json`, while
        no request is carried out.
        """
        document: dict[str, Any] = {}

        def visit(
            client: bytes,
            done_before: int,
            request: int,
            deleted: int,
        ) -> None:
            new_entry = {"done_before": done_before, "answers": {}}
            entry = document.setdefault(client.decode(), new_entry)
            if request >= 0:
                entry["answers"][str(request)] = deleted

        self.invoke("each", VISIT_WRITE(visit))
        return document

    def from_json(self, document: dict[str, Any]) -> None:
        """Replaces the requests by those that another server has carried out.

        Raises:
            ValueError: The document is damaged. Nothing has changed.
        """
        requests: list[tuple[bytes, int, int, int]] = []
        try:
            for name, entry in document.items():
                done_before = operator.index(entry["done_before"])
                requests.append((name.encode(), done_before, -1, 0))
                for number, deleted in entry["answers"].items():
                    requests.append(
                        (
                            name.encode(),
                            done_before,
                            int(number),
                            operator.index(deleted),
                        )
                    )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"the list of the requests that were carried out is damaged: {error}"
            ) from error
        self.invoke("clear")
        for request in requests:
            self.invoke("add", *request)
