"""The HTTP endpoint of metrics, which any number of clients cannot exhaust.

Tests: tests/service/test_floods.py.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

MOST_CLIENTS = 64
"""The largest number of connections. A further one ends the oldest one."""
_LONGEST_REQUEST = 16 * 1024  # bytes
_WAIT_S = 10.0  # for a request, and for a client that reads its reply


@dataclass
class _Client:
    connection: socket.socket
    end: float = field(default_factory=lambda: time.monotonic() + _WAIT_S)
    request: bytes = b""
    reply: bytes = b""


class MetricsEndpoint:
    """Answers each HTTP request with the metrics of a registry of
    ``prometheus_client``.

    One thread serves all connections and waits for no client. A connection is closed
    after its reply, after 10 s, and when 64 newer ones exist.

    Args:
        registry: The registry.
        host: The host to listen on.
        port: The port to listen on. 0 chooses a free port.

    Raises:
        OSError: The address cannot be listened on.
    """

    def __init__(self, registry: Any, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._registry = registry
        self._listener = socket.create_server((host, port), family=family, backlog=128)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        # by file descriptor, the oldest one first
        self._clients: dict[int, _Client] = {}
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for each in (self._listener, self._woken):
            self._selector.register(each, selectors.EVENT_READ)
        self._thread = threading.Thread(
            target=self._run, name="recstore-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stops listening and closes all connections."""
        self._wake.close()
        self._thread.join()

    def _run(self) -> None:
        ready: list[tuple[selectors.SelectorKey, int]] = []
        while not any(key.fileobj is self._woken for key, _ in ready):
            # Requests come before new connections, which may end the connection of a
            # request.
            for key, _ in ready:
                client = self._clients.get(key.fd)
                if client is not None:
                    self._try_to_serve(client)
            if any(key.fileobj is self._listener for key, _ in ready):
                self._accept()
            now = time.monotonic()
            for client in [
                client for client in self._clients.values() if client.end <= now
            ]:
                self._end(client)
            oldest = min(
                (client.end for client in self._clients.values()), default=None
            )
            ready = self._selector.select(
                None if oldest is None else max(0.0, oldest - now)
            )
        for client in list(self._clients.values()):
            self._end(client)
        self._selector.close()
        for each in (self._listener, self._woken):
            each.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (
            OSError
        ):  # the client has gone, or the process has no file descriptor left
            if self._clients:
                self._end(next(iter(self._clients.values())))
            else:
                time.sleep(0.01)
            return
        connection.setblocking(False)
        client = self._clients[connection.fileno()] = _Client(connection)
        self._selector.register(connection, selectors.EVENT_READ)
        if len(self._clients) > MOST_CLIENTS:
            self._end(next(iter(self._clients.values())))
        self._try_to_serve(client)

    def _try_to_serve(self, client: _Client) -> None:
        try:
            self._serve(client)
        except BlockingIOError:
            pass
        except OSError:  # the client has gone
            self._end(client)

    def _serve(self, client: _Client) -> None:
        """Reads a request or writes a reply, as much as can be without waiting."""
        if not client.reply:
            part = client.connection.recv(_LONGEST_REQUEST)
            client.request += part
            if not part or len(client.request) > _LONGEST_REQUEST:
                self._end(client)
                return
            if b"\r\n\r\n" not in client.request:
                return
            client.reply = self._reply(client.request)
            self._selector.modify(client.connection, selectors.EVENT_WRITE)
        client.reply = client.reply[client.connection.send(client.reply) :]
        if not client.reply:
            self._end(client)

    def _reply(self, request: bytes) -> bytes:
        # imported here, because most servers report no metrics
        import prometheus_client as prometheus

        method = request.split(b" ", 1)[0]
        if method not in (b"GET", b"HEAD"):
            return b"HTTP/1.0 405 Method Not Allowed\r\nConnection: close\r\n\r\n"
        body = prometheus.generate_latest(self._registry)
        head = (
            "HTTP/1.0 200 OK\r\nContent-Type:"
            f" {prometheus.CONTENT_TYPE_LATEST}\r\nContent-Length: {len(body)}\r\n"
        )
        return f"{head}Connection: close\r\n\r\n".encode() + (
            body if method == b"GET" else b""
        )

    def _end(self, client: _Client) -> None:
        del self._clients[client.connection.fileno()]
        self._selector.unregister(client.connection)
        # so that a reply arrives although a client has sent more than its request
        with suppress(OSError):
            client.connection.shutdown(socket.SHUT_WR)
        client.connection.close()
