"""A process that floods a server's port: ``python -m tests.service.flood KIND HOST:PORT
SECONDS``.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.settings import SettingCodes
from hyperframe.frame import ContinuationFrame, HeadersFrame

HEADERS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/torchrec_recstore.ParameterServer/Describe"),
    (":authority", "flood"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
]


class Http2:
    """A connection that sends frames as fast as it can, reads all answers, and is made
    anew when it is closed.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self.reconnections = 0
        self.connect()

    def connect(self) -> None:
        self.socket = socket.create_connection(self._address)
        self.frames = H2Connection(
            H2Configuration(client_side=True, validate_outbound_headers=False)
        )
        self.frames.initiate_connection()
        self.stream = 1

    def reconnect(self) -> None:
        self.socket.close()
        self.reconnections += 1
        time.sleep(0.001)
        with suppress(OSError):
            self.connect()

    def send(self) -> None:
        try:
            self.socket.settimeout(1)
            self.socket.sendall(self.frames.data_to_send())
            self.socket.setblocking(False)
            with suppress(BlockingIOError):
                while part := self.socket.recv(1 << 16):
                    self.frames.receive_data(part)
                raise ConnectionResetError
        except (
            Exception
        ):  # the server has closed the connection, or h2 says that it will
            self.reconnect()


def resets(connection: Http2) -> None:
    """Begins streams and resets them at once ("rapid reset")."""
    for _ in range(50):
        connection.frames.send_headers(connection.stream, HEADERS)
        connection.frames.reset_stream(connection.stream)
        connection.stream += 2


def pings(connection: Http2) -> None:
    for _ in range(200):
        connection.frames.ping(b"12345678")


def settings(connection: Http2) -> None:
    for size in range(100):
        connection.frames.update_settings(
            {SettingCodes.INITIAL_WINDOW_SIZE: 65_535 + size}
        )


def headers(connection: Http2) -> None:
    """Begins streams with 30 KB of headers each, none of which the compression
    shortens, and leaves them open.
    """
    more = [
        (f"x-{connection.stream}-{number}", f"{connection.stream + number}" * 400)
        for number in range(16)
    ]
    connection.frames.send_headers(
        connection.stream, [*HEADERS, *((name, value[:1900]) for name, value in more)]
    )
    connection.stream += 2


def continuations(connection: Http2) -> None:
    """Begins a block of headers that never ends, in CONTINUATION frames of 16 KB."""
    if connection.stream == 1:
        begin = HeadersFrame(1)
        begin.data = connection.frames.encoder.encode(HEADERS)
        connection.socket.sendall(connection.frames.data_to_send() + begin.serialize())
        connection.stream = 3
    more = ContinuationFrame(1)
    more.data = b"\x00\x01x\xff\x81\x7f" + b"y" * 16_000
    connection.socket.sendall(more.serialize())


FLOODS: dict[str, Callable[[Http2], None]] = {
    "resets": resets,
    "pings": pings,
    "settings": settings,
    "headers": headers,
    "continuations": continuations,
}
SILENT = {
    "half_requests": b"GET /metrics HTTP/1.1\r\nHost: a\r\n",
    "half_prefaces": b"PRI * HTTP/2.0\r\n\r\nS",
    "silent": b"",
}
"""What connections send that then say nothing more."""


def flood(kind: str, address: tuple[str, int], seconds: float) -> None:
    end = time.monotonic() + seconds
    if kind in SILENT:
        kept = []
        while len(kept) < 2000 and time.monotonic() < end:
            with suppress(OSError):
                kept.append(socket.create_connection(address, timeout=1))
                kept[-1].sendall(SILENT[kind])
        print(f"{len(kept)} connections", flush=True)
        time.sleep(max(0.0, end - time.monotonic()))
        return
    connections = [Http2(address) for _ in range(8)]
    rounds = 0
    while time.monotonic() < end:
        for connection in connections:
            try:
                FLOODS[kind](connection)
            except Exception:  # h2 or the socket knows that the connection is closed
                connection.reconnect()
            connection.send()
        rounds += 1
    print(
        f"{rounds} rounds, {sum(each.reconnections for each in connections)} new"
        " connections",
        flush=True,
    )


if __name__ == "__main__":
    print("begins", flush=True)
    host, port = sys.argv[2].split(":")
    flood(sys.argv[1], (host, int(port)), float(sys.argv[3]))
