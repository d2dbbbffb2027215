"""Predictions over HTTP, as JSON documents, by the server of the library tornado.

Tests: tests/serving/predict/test_http_server.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from tornado.httpserver import HTTPServer
from tornado.ioloop import PeriodicCallback
from tornado.iostream import IOStream, StreamClosedError
from tornado.netutil import bind_sockets
from tornado.web import Application, RequestHandler, stream_request_body

from torchrec_recstore_service.server.credentials import watched_context, watched_token
from torchrec_recstore_service.server.listening import (
    GRACE_S,
    ListenOptions,
    allowed,
    host_and_port,
)
from torchrec_recstore_serving.predict.batching import Answer
from torchrec_recstore_serving.predict.messages import (
    arguments_of_json,
    not_finite,
    place_of_float,
)
from torchrec_recstore_serving.predict.named_models import NamedModels
from torchrec_recstore_serving.predict.requests import FLOAT_IDS, Value
from torchrec_recstore_serving.publish.bad_reads import last_line

_LONGEST_BODY = 1 << 26  # bytes
_LONGEST_HEADERS = 1 << 16  # bytes
# for the TLS handshake and the headers, for the body, and for reading a reply
_SLOWEST_S = 60.0
_LOOK_S = 1.0
# bytes; larger documents would hold up other requests, and are converted in threads of
# their own
_AT_ONCE = 1 << 16
# A change of threads and back takes a large part of this; a longer call would hold up
# other requests.
_SHORT_S = 1e-3
_CONVERTERS = 2  # threads
_DEEP = 100
_MAX_DIGITS = 20  # of Content-Length
# Upper bounds, in bytes, of what the conversion of a document takes at its worst moment
# for each of its parts. A body is held as pieces, as one, and as text, and again as the
# strings in it. A list is held as an object of Python, and its entries as objects, in
# lists of all entries of one depth, and in a tensor.
# tests/serving/predict/test_http_server.py measures them.
_OF_A_BYTE = 4
# Python holds a text with one character that needs it with four bytes for each
# character.
_OF_A_WIDE_BYTE = 20
_OF_A_LIST = 130
_OF_AN_OBJECT = 260
_OF_AN_ENTRY = 56
_OF_A_QUOTE = 40
# a number of an answer: in the tensor, as an object of Python, and as text in two
# copies
_OF_A_RESULT = 100
_DEPTH = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]')
_ROUTES = (
    "there are GET /state, GET /health and POST /predict, for a model with a name also"
    " below /models/NAME"
)
_NO_ROOM = (
    "the requests that are being answered take all of --max-request-memory: try again"
)
_encode = json.JSONEncoder(allow_nan=False).encode
_Result = TypeVar("_Result")


def failure(error: Exception) -> str:
    """Returns the message of a failed call of the model."""
    return f"the model has failed: {last_line(error)}"


class HeldMemory:
    """The memory that a request may take, from its first byte until its work has ended.

    Args:
        server: The server whose ``held_bytes`` count it.
        limit: The largest sum of ``held_bytes``.
    """

    def __init__(self, server: HttpServer, limit: int) -> None:
        self.limit = limit
        self._server = server
        self._bytes = 0

    def grow_to(self, size: int) -> bool:
        """Holds at least ``size`` bytes.

        Returns whether the other requests leave room for them.
        """
        additional = max(0, size - self._bytes)
        if self._server.held_bytes + additional > self.limit:
            return False
        self._server.held_bytes += additional
        self._bytes += additional
        return True

    def release(self) -> None:
        """Gives the memory back."""
        self._server.held_bytes -= self._bytes
        self._bytes = 0


def memory_of(body: Sequence[bytes]) -> int:
    """Returns an upper bound of the memory that reading a document takes, in bytes.

    Args:
        body: The pieces of the document, which are included.
    """
    total = 0
    is_wide = False
    for piece in body:
        total += piece.count(b",") * _OF_AN_ENTRY
        total += piece.count(b"[") * _OF_A_LIST
        total += piece.count(b"{") * _OF_AN_OBJECT
        total += piece.count(b'"') * _OF_A_QUOTE
        # An escape such as \\ud83d can stand for any character.
        is_wide = is_wide or not piece.isascii() or b"\\" in piece
    return total + _size(body) * (_OF_A_WIDE_BYTE if is_wide else _OF_A_BYTE)


def _size(body: Sequence[bytes]) -> int:
    return sum(len(piece) for piece in body)


class HttpServer:
    """JSON over HTTP: POST /predict, GET /state and GET /health.

    One thread serves all connections.

    The routes of the model NAME are the same below /models/NAME.

    Args:
        address: The address to listen on, ``host:port``.
        access: The certificate, the token and the limits, which are those of gRPC.
        models: The models of the server.

    Raises:
        OSError: The address cannot be listened on.
    """

    def __init__(
        self,
        address: str,
        access: ListenOptions,
        models: NamedModels,
    ) -> None:
        host, port = host_and_port(address)
        self.models = models
        self._access = access
        self._loop = asyncio.new_event_loop()
        # Python's lock lets one thread convert at a time. malloc keeps memory that was
        # freed for each thread, so that additional threads would keep additional of it.
        converters = ThreadPoolExecutor(_CONVERTERS, "http-documents")
        self._loop.set_default_executor(converters)
        self._stop = asyncio.Event()
        self.running = 0
        """The number of predictions that are being answered."""
        self.held_bytes = 0
        """The memory of their requests, and of those that are being read; see
        :class:`HeldMemory`.
        """
        self._token = None
        try:
            if access.token_file is not None:
                self._token = watched_token(access.token_file)
            sockets = bind_sockets(port, host)
        except OSError as error:
            raise OSError(f"--http {address}: {error.strerror}") from error
        bound_port = sockets[0].getsockname()[1]
        self.address = f"{address.rpartition(':')[0]}:{bound_port}"
        # A client that makes no handshake, or whose request is malformed, is no matter
        # for the operator.
        logging.getLogger("tornado.general").setLevel(logging.ERROR)
        self._server = _Server(
            self._application(),
            max_header_size=_LONGEST_HEADERS,
            max_body_size=_LONGEST_BODY,
            idle_connection_timeout=_SLOWEST_S,
            body_timeout=_SLOWEST_S,
        )
        self._server.max_connections = access.max_connections
        self._certificates = None
        if access.tls_cert is not None and access.tls_key is not None:
            self._certificates = watched_context(
                access.tls_cert, access.tls_key, access.client_ca
            )
        self._look()
        self._thread = threading.Thread(
            target=lambda: self._loop.run_until_complete(self._serve(sockets)),
            name="http",
            daemon=True,
        )
        self._thread.start()

    def _application(self) -> Application:
        """Returns tornado's application, with a handler for each route."""
        model = r"(?:/models/([^/]+))?"
        arguments = {"server": self}
        return Application(
            [
                (f"{model}/predict", _Predict, arguments),
                (f"{model}/state", _State, arguments),
                (f"{model}/health", _Health, arguments),
            ],
            default_handler_class=_Other,
            default_handler_args=arguments,
            log_function=lambda handler: None,
        )

    @property
    def connections(self) -> int:
        """The number of connections."""
        return self._server.connections

    def close(self) -> None:
        """Stops listening, and waits for the predictions that are being answered."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    def is_allowed(self, header: str) -> bool:
        """Returns whether a request has the token, if one is required."""
        return allowed(header, self._token)

    def health(self, model: str | None) -> tuple[int, bytes]:
        """Returns the answer to GET /health."""
        reason = self.models.not_ready(model)
        status = 200 if reason is None else 503
        return status, _encoded({"serving": reason is None, "reason": reason})

    def state(self, model: str | None) -> tuple[int, bytes]:
        """Returns the answer to GET /state."""
        return 200, _encoded(self.models.state(model))

    def held(self) -> HeldMemory:
        """Returns the memory of a request, of which nothing is held yet."""
        return HeldMemory(self, self._access.max_request_memory)

    async def answer(
        self,
        model: str | None,
        body: list[bytes],
        held: HeldMemory,
    ) -> tuple[int, bytes]:
        """Returns the status and the body of the answer to POST /predict.

        Args:
            model: The name of the model. None: the model without a name.
            body: The pieces of the body of the request. They are removed when they have
                been read.
            held: The memory that is held for the request. It grows by what the
                conversions take.
        """
        document: Mapping[str, Any] = {}
        predictor = self.models.model(model)
        self.running += 1
        try:
            size = _size(body)
            needed = await _converted(size, lambda: memory_of(body))
            if needed > held.limit:
                return 413, _error(
                    f"the document takes up to {needed} bytes of memory while it is"
                    f" read, and --max-request-memory is {held.limit}: send fewer or"
                    " shorter lists in one request, or use gRPC"
                )
            if not held.grow_to(needed):
                return 503, _error(_NO_ROOM)
            document, arguments = await _converted(
                size,
                lambda: _read(b"".join(body), predictor.jagged),
            )
            body.clear()
            caller_s = _SHORT_S if size <= _AT_ONCE else 0.0
            future = predictor.submit(arguments, caller_s=caller_s)
            if future.done():
                answer = future.result()
            else:
                answer = await asyncio.wrap_future(future)
            results = sum(output.numel() for output in answer.outputs.values())
            needed = results * _OF_A_RESULT
            if needed > held.limit:
                return 413, _error(
                    f"the answer has {results} numbers and takes up to {needed} bytes"
                    f" of memory, and --max-request-memory is {held.limit}: send fewer"
                    " examples in one request, or use gRPC"
                )
            if not held.grow_to(needed):
                return 503, _error(_NO_ROOM)
            return await _converted(results * 8, lambda: _written(answer))
        except ValueError as error:
            return 400, _error(_with_places(str(error), document))
        except ConnectionError as error:
            return 503, _error(str(error))
        except Exception as error:
            return 500, _error(failure(error))
        finally:
            self.running -= 1

    def _look(self) -> None:
        """Takes the present certificates for the connections that come."""
        if self._certificates is not None:
            self._server.ssl_options = self._certificates.value

    async def _serve(self, sockets: list[Any]) -> None:
        self._server.add_sockets(sockets)
        look = PeriodicCallback(self._look, 1000 * _LOOK_S)
        look.start()
        await self._stop.wait()
        look.stop()
        self._server.stop()
        end = self._loop.time() + GRACE_S
        while self.running and self._loop.time() < end:
            await asyncio.sleep(0.01)
        await self._server.close_all_connections()
        await self._loop.shutdown_default_executor()


class _Server(HTTPServer):
    """An HTTP server whose number of connections is limited."""

    max_connections = 0
    connections = 0

    def handle_stream(self, stream: IOStream, address: tuple[Any, ...]) -> None:
        """See tornado.

        Closes a connection if there are too many, before its TLS handshake.
        """
        if self.connections >= self.max_connections:
            stream.close()
            return
        self.connections += 1
        super().handle_stream(stream, address)

    def on_close(self, server_conn: object) -> None:
        """See tornado."""
        self.connections -= 1
        super().on_close(server_conn)


class _Handler(RequestHandler):
    needs_token = True

    def initialize(self, server: HttpServer) -> None:
        """See tornado."""
        self._server = server

    def set_default_headers(self) -> None:
        """See tornado."""
        self.clear_header("Server")
        self.set_header("Content-Type", "application/json")

    def prepare(self) -> None:
        """See tornado. A reply before the body has been read closes the connection."""
        header = self.request.headers.get("Authorization", "")
        if self.needs_token and not self._server.is_allowed(header):
            self.reply(401, _error("the token is missing or wrong"))
            return
        if not self.path_args:
            return
        unknown = self._server.models.unknown(self.path_args[0])
        if unknown is not None:
            self.reply(404, _error(unknown))

    def reply(self, status: int, body: bytes) -> asyncio.Future[None]:
        """Begins to send a reply."""
        self.set_status(status)
        return self.finish(body)

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """See tornado."""
        self.finish(_error(_ROUTES if status_code == 405 else self._reason))


class _Health(_Handler):
    needs_token = False

    def get(self, model: str | None) -> None:
        """See tornado."""
        self.reply(*self._server.health(model))


class _State(_Handler):
    def get(self, model: str | None) -> None:
        """See tornado."""
        self.reply(*self._server.state(model))


class _Other(_Handler):
    def prepare(self) -> None:
        """See tornado."""
        super().prepare()
        if not self._finished:
            self.reply(404, _error(_ROUTES))


@stream_request_body
class _Predict(_Handler):
    def initialize(self, server: HttpServer) -> None:
        """See tornado."""
        super().initialize(server)
        self._chunks: list[bytes] = []
        self._held = server.held()
        self._is_working = False

    def prepare(self) -> None:
        """See tornado. Decides from the headers whether the body is read."""
        super().prepare()
        if self._finished or self.request.method != "POST":
            return
        header = self.request.headers.get("Content-Length", "")
        if not header.isdecimal():
            message = (
                f"Content-Length is missing; the body may have {_LONGEST_BODY} bytes"
            )
            self.reply(411, _error(message))
            return
        # int() refuses a number of additional than 4,300 digits.
        length = int(header) if len(header) <= _MAX_DIGITS else 10**_MAX_DIGITS
        if length > _LONGEST_BODY:
            self._refuse_length(length, f"the body may have {_LONGEST_BODY} bytes")
        elif length > self._held.limit:
            message = (
                f"the body has {length} bytes, and --max-request-memory is"
                f" {self._held.limit}"
            )
            self._refuse_length(length, message)
        elif not self._held.grow_to(length):
            self.reply(503, _error(_NO_ROOM))

    def _refuse_length(self, length: int, message: str) -> None:
        # The body is not read: tornado would send an error of its own after this one.
        self.request.connection.set_max_body_size(length)  # type: ignore[union-attr]
        self.reply(413, _error(message))

    def data_received(self, chunk: bytes) -> None:
        """See tornado."""
        self._chunks.append(chunk)

    async def post(self, model: str | None) -> None:
        """See tornado."""
        self._is_working = True
        try:
            status, reply = await self._server.answer(model, self._chunks, self._held)
            with suppress(StreamClosedError):  # The client has gone away.
                sent = self.reply(status, reply)
                try:
                    if not sent.done():
                        await asyncio.wait_for(sent, _SLOWEST_S)
                except asyncio.TimeoutError:
                    self.request.connection.close()  # type: ignore[union-attr]
        finally:
            self._is_working = False
            self._held.release()

    def on_finish(self) -> None:
        """See tornado.

        The memory of a request whose client has gone away is held until its work has
        ended.
        """
        if not self._is_working:
            self._chunks.clear()
            self._held.release()

    def on_connection_close(self) -> None:
        """See tornado."""
        super().on_connection_close()
        self.on_finish()


def _with_places(message: str, document: Mapping[str, Any]) -> str:
    """Adds the places of floats to the message of a model that got floats as ids."""
    if not message.startswith(FLOAT_IDS):
        return message
    places: list[str] = []
    for name, value in document.items():
        place = place_of_float(value)
        if place:
            places.append(name + place)
    if not places:
        return message
    return (
        f"{message} ({', '.join(places)}): send integers, because floats do not hold"
        " every id"
    )


async def _converted(size: int, convert: Callable[[], _Result]) -> _Result:
    """Converts a document of ``size`` bytes."""
    if size <= _AT_ONCE:
        return convert()
    return await asyncio.get_running_loop().run_in_executor(None, convert)


def _read(
    body: bytes,
    jagged: Mapping[str, tuple[str, int]],
) -> tuple[Mapping[str, Any], Mapping[str, Value]]:
    """Returns the arguments of a request as they are in JSON, and as tensors."""
    try:
        document = json.loads(body)
    except RecursionError:
        raise ValueError(_too_deep(body)) from None
    except ValueError as error:
        raise ValueError(f"the body is not JSON: {error}") from None
    arguments = document.get("arguments") if isinstance(document, dict) else None
    if not isinstance(arguments, dict):
        raise ValueError('the body must be {"arguments": {NAME: VALUE, ...}}')
    return arguments, arguments_of_json(arguments, jagged)


def _too_deep(body: bytes) -> str:
    """Returns the message about a document with too many lists within lists."""
    depth = 0
    name = "no argument"
    for match in _DEPTH.finditer(body):
        if match[0] in (b"[", b"{"):
            depth += 1
            if depth > _DEEP:
                return (
                    f"the argument {name} has {_DEEP} lists within lists at byte"
                    f" {match.start()} of the body"
                )
        elif match[0] in (b"]", b"}"):
            depth -= 1
        elif depth == 2:
            name = repr(match[0][1:-1].decode(errors="replace"))
    return "the body has too many lists within lists"


def _written(answer: Answer) -> tuple[int, bytes]:
    """Returns the status and the body for an answer."""
    reply = {
        "outputs": {name: output.tolist() for name, output in answer.outputs.items()},
        "version": answer.version,
        "number": answer.number,
        "seconds_behind": answer.seconds_behind,
    }
    try:
        return 200, _encoded(reply)
    except ValueError as error:
        # JSON has no NaN and no infinity. A search before would take longer than the
        # encoding.
        problem = not_finite(answer.outputs) or str(error)
        return 500, _error(
            f"{problem}: gRPC returns it. Publish a model whose weights are finite"
        )


def _error(message: str) -> bytes:
    return _encoded({"error": message})


def _encoded(document: Mapping[str, Any]) -> bytes:
    return _encode(document).encode()
