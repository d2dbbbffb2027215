"""Calls of a server's methods in the process, without gRPC, for fuzzers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc


class _RefusedError(Exception):
    pass


class _Context:
    """The context of a call that does not come from gRPC."""

    code: grpc.StatusCode | None = None
    details = ""

    def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.code, self.details = code, details
        raise _RefusedError

    def is_active(self) -> bool:
        return True

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def set_trailing_metadata(self, metadata: object) -> None:
        pass

    def cancel(self) -> None:
        pass


class Methods:
    """Takes the place of a ``grpc.Server``, and keeps the handlers."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}

    def add_registered_method_handlers(
        self, service: str, handlers: dict[str, Any]
    ) -> None:
        self.handlers.update(handlers)


def called(
    handler: Any, messages: list[bytes]
) -> tuple[grpc.StatusCode, str, list[bytes]]:
    """Makes a call. Returns its status, the message of the error, and the replies."""
    context = _Context()
    raw: Iterator[bytes] = iter(messages)
    try:
        if handler.response_streaming:
            replies = list(handler.stream_stream(raw, context))
        else:
            replies = [handler.stream_unary(raw, context)]
    except _RefusedError:
        assert context.code is not None
        return context.code, context.details, []
    return (
        grpc.StatusCode.OK,
        "",
        [
            each if isinstance(each, bytes) else each.SerializeToString()
            for each in replies
        ],
    )
