"""Predictions over HTTP, as JSON documents.

Tests: tests/serving/test_predictor.py.
"""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

from torchrec_recstore_service.server.credentials import Watched, watched_context, watched_token
from torchrec_recstore_service.server.listening import ListenOptions, allowed, host_and_port
from torchrec_recstore_serving.batching import Answer
from torchrec_recstore_serving.request_values import value_of_json
from torchrec_recstore_serving.requests import Value

_LONGEST_BODY = 1 << 26  # bytes


class Answering(Protocol):
    """The functions of a server of predictions that HTTP offers; see :class:`Predictor`."""

    def predict(self, arguments: Mapping[str, Value]) -> Answer:
        """Answers a request."""

    def state(self) -> dict[str, Any]:
        """Returns the state of the server."""

    def is_ready(self) -> bool:
        """Returns whether a full export has been loaded."""


def failure(error: Exception) -> str:
    """Returns the message of a failed call of the model."""
    return f"the model has failed: {(str(error).strip().splitlines() or [type(error).__name__])[-1]}"


class HttpServer:
    """JSON over HTTP: POST /predict, GET /state and GET /health.

    Args:
        address: The address to listen on, ``host:port``.
        access: The certificate and the token, which are those of gRPC.
        predictor: The server's functions.

    Raises:
        OSError: The address cannot be listened on.
    """

    def __init__(self, address: str, access: ListenOptions, predictor: Answering) -> None:
        host, port = host_and_port(address)
        try:
            token = None if access.token_file is None else watched_token(access.token_file)
            self._server = _Server((host, port), partial(_Handler, predictor, token))
            self._server.max_connections = access.max_connections
        except OSError as error:
            raise OSError(f"--http {address}: {error.strerror}") from error
        if access.tls_cert is not None and access.tls_key is not None:
            self._server.certificates = watched_context(access.tls_cert, access.tls_key, access.client_ca)
        self.address = f"{address.rpartition(':')[0]}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="http", daemon=True)
        self._thread.start()

    @property
    def connections(self) -> int:
        """The number of connections."""
        return self._server.connections

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    certificates: Watched[ssl.SSLContext] | None = None
    max_connections = 0
    connections = 0
    _lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        """See socketserver. Closes a connection if there are too many. Each has a thread."""
        with self._lock:
            full = self.connections >= self.max_connections
            self.connections += not full
        if full:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """See socketserver."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self.connections -= 1

    def get_request(self) -> tuple[Any, Any]:
        """See socketserver. The thread of a connection makes the handshake, so that it does not hold up the others."""
        connection, address = super().get_request()
        if self.certificates is None:
            return connection, address
        context = self.certificates.value
        return context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), address


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60

    def __init__(self, predictor: Answering, token: Watched[str] | None, *connection: Any) -> None:
        self._predictor = predictor
        self._token = token
        super().__init__(*connection)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""

    def handle(self) -> None:
        """See socketserver. A client that has gone away is no error."""
        with suppress(ConnectionError):
            super().handle()

    def do_GET(self) -> None:
        """See http.server."""
        if self.path == "/health":
            there = self._predictor.is_ready()
            self._reply(200 if there else 503, {"serving": there})
        elif not self._is_allowed():
            return
        elif self.path == "/state":
            self._reply(200, self._predictor.state())
        else:
            self._reply(404, {"error": "there are GET /state, GET /health and POST /predict"})

    def do_POST(self) -> None:
        """See http.server."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _LONGEST_BODY:
            self.close_connection = True
            self._reply(411 if not length.isdecimal() else 413, {"error": f"the body may have {_LONGEST_BODY} bytes"})
            return
        if not self._is_allowed():
            self.close_connection = True  # the body is not read
            return
        body = self.rfile.read(int(length))
        if self.path != "/predict":
            self._reply(404, {"error": "there are GET /state, GET /health and POST /predict"})
            return
        self._reply(*self._answer(body))

    def _answer(self, body: bytes) -> tuple[int, Mapping[str, Any]]:
        try:
            return 200, self._predicted(body)
        except ValueError as error:
            return 400, {"error": str(error)}
        except ConnectionError as error:
            return 503, {"error": str(error)}
        except Exception as error:
            return 500, {"error": failure(error)}

    def _predicted(self, body: bytes) -> dict[str, Any]:
        document = json.loads(body)
        if not isinstance(document, dict) or not isinstance(document.get("arguments"), dict):
            raise ValueError('the body must be {"arguments": {NAME: VALUE, ...}}')
        answer = self._predictor.predict(
            {name: value_of_json(value, name) for name, value in document["arguments"].items()}
        )
        outputs = {name: each.tolist() for name, each in answer.outputs.items()}
        return {**asdict(answer), "outputs": outputs}

    def _is_allowed(self) -> bool:
        if allowed(self.headers.get("Authorization", ""), self._token):
            return True
        self._reply(401, {"error": "the token is missing or wrong"})
        return False

    def _reply(self, status: int, document: Mapping[str, Any]) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
