"""The handlers of gRPC calls, which parse requests in the call's own thread and note
when it waits for a client.

Tests: tests/service/tables/test_limits.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError

from torchrec_recstore_service.server.calls import Call, CallThreads, RequestMemory
from torchrec_recstore_service.server.native import CallRefusedError
from torchrec_recstore_service.wire.protocol import ERROR_KEY

_OF_BYTES = "_of_bytes"
_Method = TypeVar("_Method", bound=Callable[..., Any])


def of_bytes(method: _Method) -> _Method:
    """Marks a method of a service that takes and returns messages as bytes."""
    setattr(method, _OF_BYTES, True)
    return method


class Handlers:
    """Takes the place of a ``grpc.Server`` for generated code that adds a service, and
    adds bounded handlers to it.

    grpcio's own handlers parse a request in the thread that serves all connections, and
    leak 19 KB for each request that they cannot parse. These handlers take bytes
    instead.

    Args:
        server: The server.
        threads: The threads of the calls.
        memory: The memory of the requests of all calls.
        idle: The methods whose calls wait for events, so that their threads are free
            for other calls at any time.
    """

    def __init__(
        self,
        server: grpc.Server,
        threads: Mapping[str, CallThreads],
        memory: RequestMemory,
        idle: frozenset[str],
    ) -> None:
        self._server = server
        self._threads = threads
        self._memory = memory
        self._idle = idle

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Adds nothing, because generated code also adds registered handlers."""

    def add_registered_method_handlers(
        self,
        service: str,
        handlers: Mapping[str, Any],
    ) -> None:
        """Adds the handlers of a service. See grpc.Server."""
        bounded = {
            name: self._bounded(f"/{service}/{name}", handler)
            for name, handler in handlers.items()
        }
        self._server.add_registered_method_handlers(service, bounded)

    def _bounded(self, method: str, handler: Any) -> Any:
        """Returns a handler that reads requests in the thread of the call."""
        threads = self._threads.get(method, self._threads[""])
        behavior = (
            handler.unary_unary
            or handler.unary_stream
            or handler.stream_unary
            or handler.stream_stream
        )
        is_idle = method in self._idle
        takes_bytes = getattr(behavior, _OF_BYTES, False)
        parse = bytes if takes_bytes else handler.request_deserializer
        serialize = None if takes_bytes else handler.response_serializer

        def begin(raw: Iterator[bytes], context: Any) -> tuple[Call, Any]:
            call = Call(context.cancel, self._memory)
            keep = handler.request_streaming and not handler.response_streaming
            requests = _Requests(
                raw,
                parse=parse,
                call=call,
                keep=keep,
                threads=threads,
            )
            return call, requests

        def argument(requests: _Requests) -> Any:
            return requests if handler.request_streaming else requests.only()

        def reply_once(raw: Iterator[bytes], context: Any) -> Any:
            call, requests = begin(raw, context)
            with threads.place(call):
                try:
                    return behavior(argument(requests), context)
                except CallRefusedError as error:
                    _refuse(context, error)
                finally:
                    self._memory.give_back(call)

        def reply_often(raw: Iterator[bytes], context: Any) -> Iterator[Any]:
            call, requests = begin(raw, context)
            with threads.place(call):
                try:
                    for reply in behavior(argument(requests), context):
                        call.wait()
                        yield reply
                        if not is_idle:
                            size = len(reply) if takes_bytes else reply.ByteSize()
                            call.go_on(size)
                except CallRefusedError as error:
                    _refuse(context, error)
                finally:
                    self._memory.give_back(call)

        if handler.response_streaming:
            reply_often.experimental_thread_pool = threads  # type: ignore[attr-defined]
            return grpc.stream_stream_rpc_method_handler(reply_often, None, serialize)
        reply_once.experimental_thread_pool = threads  # type: ignore[attr-defined]
        return grpc.stream_unary_rpc_method_handler(reply_once, None, serialize)


def _refuse(context: Any, error: CallRefusedError) -> NoReturn:
    if error.kind:
        context.set_trailing_metadata(((ERROR_KEY, error.kind),))
    context.abort(error.code, str(error))
    raise AssertionError("abort raises")


class _Requests:
    """The requests of a call. An iterator.

    Args:
        raw: The bytes of each request.
        parse: The function that returns the message of the bytes.
        call: The call.
        keep: Whether the call keeps all of its requests in memory, not only the last
            one.
        threads: The threads of all calls.
    """

    def __init__(
        self,
        raw: Iterator[bytes],
        parse: Callable[[bytes], Any],
        call: Call,
        keep: bool,
        threads: CallThreads,
    ) -> None:
        self._raw = raw
        self._parse = parse
        self._call = call
        self._keep = keep
        self._threads = threads

    def __iter__(self) -> _Requests:
        return self

    def __next__(self) -> Any:
        call = self._call
        if not self._keep:
            call.memory.give_back(call)
        size = 0
        call.wait()
        try:
            request = next(self._raw)
            size = len(request)
        finally:
            call.go_on(size)
        if call.held + size > call.memory.limit:
            raise CallRefusedError(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"a request may have at most {call.memory.limit} bytes"
                " (--max-request-memory): split it",
                ValueError.__name__,
            )
        if not call.memory.take(call, size):
            self._threads.end_late()
            raise CallRefusedError(
                grpc.StatusCode.UNAVAILABLE,
                "the running requests of all clients take --max-request-memory: repeat"
                " the call",
            )
        try:
            return self._parse(request)
        except DecodeError:
            raise CallRefusedError(
                grpc.StatusCode.INVALID_ARGUMENT,
                "the request is not a message of the protocol",
            ) from None

    def only(self) -> Any:
        """Returns the request of a call with one request."""
        try:
            return next(self)
        except StopIteration:
            raise CallRefusedError(
                grpc.StatusCode.INVALID_ARGUMENT,
                "the call has no request",
            ) from None
