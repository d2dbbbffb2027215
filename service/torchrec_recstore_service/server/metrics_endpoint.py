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

    def __init__(
        self,
        registry: Any,
        host: str,
        port: int,
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._registry = registry
        self._listener = socket.create_server((host, port), family=family, backlog=128)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        # by file descriptor, the oldest one first
        self._clients: dict[int, _Client] = {}
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(
            target=self._run,
            name="recstore-metrics",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """Stops listening and closes all connections."""
        self._wake.close()
        self._thread.join()

    def _run(self) -> None:
        ready: set[Any] = set()
        while self._woken not in ready:
            # Requests come before new connections, which may end the connection of a
            # request.
            for client in list(self._clients.values()):
                if client.connection in ready:
                    self._try_to_serve(client)
            if self._listener in ready:
                self._accept()
            ready = self._wait()
        for client in list(self._clients.values()):
            self._end(client)
        self._selector.close()
        self._listener.close()
        self._woken.close()

    def _wait(self) -> set[Any]:
        """Ends the clients whose time is over, and returns the sockets that are ready."""
        time_s = time.monotonic()
        for client in list(self._clients.values()):
            if client.end <= time_s:
                self._end(client)
        timeout_s = None
        if self._clients:
            first_end = min(client.end for client in self._clients.values())
            timeout_s = max(0.0, first_end - time_s)
        return {key.fileobj for key, _ in self._selector.select(timeout_s)}

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            # The client has gone, or the process has no file descriptor left.
            if self._clients:
                self._end(next(iter(self._clients.values())))
            else:
                time.sleep(0.01)
            return
        connection.setblocking(False)
        client = _Client(connection)
        self._clients[connection.fileno()] = client
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
        sent = client.connection.send(client.reply)
        client.reply = client.reply[sent:]
        if not client.reply:
            self._end(client)

    def _reply(self, request: bytes) -> bytes:
        # imported here, because most servers report no metrics
        import prometheus_client as prometheus

        method = request.split(b" ", 1)[0]
        if method not in (b"GET", b"HEAD"):
            return b"HTTP/1.0 405 Method Not Allowed\r\nConnection: close\r\n\r\n"
        body = prometheus.generate_latest(self._registry)
        lines = [
            "HTTP/1.0 200 OK",
            f"Content-Type: {prometheus.CONTENT_TYPE_LATEST}",
            f"Content-Length: {len(body)}",
            "Connection: close",
        ]
        head = "".join(f"{line}\r\n" for line in lines) + "\r\n"
        return head.encode() + (body if method == b"GET" else b"")

    def _end(self, client: _Client) -> None:
        del self._clients[client.connection.fileno()]
        self._selector.unregister(client.connection)
        # so that a reply arrives although a client has sent more than its request
        with suppress(OSError):
            client.connection.shutdown(socket.SHUT_WR)
        client.connection.close()
