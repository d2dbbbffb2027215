"""A server in a network namespace of its own, like a container, which only mapped ports
reach.

A forwarder in the namespace takes connections at a Unix socket in a folder, which is no
part of a network namespace, and passes them on to a port of the server. A second
forwarder outside passes a port of the host on to the Unix socket. Container engines
without root rights map ports likewise.

    python -m tests.service.container inside FOLDER PORT,PORT serve --listen
    127.0.0.1:PORT ... python -m tests.service.container outside PORT FOLDER/PORT
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

_NAMESPACE = ["unshare", "--user", "--map-root-user", "--net"]
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1
_PR_SET_PDEATHSIG = 1
_PIECE_BYTES = 1 << 18
_START_S = 120.0


def reason_against_namespaces() -> str:
    """Returns why this process cannot make a network namespace.

    Empty if it can make one.
    """
    try:
        made = subprocess.run(
            [*_NAMESPACE, "true"], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return "unshare is not installed"
    return (
        "" if made.returncode == 0 else f"no network namespaces: {made.stderr.strip()}"
    )


class Container:
    """A server in a network namespace of its own.

    Args:
        folder: An empty folder for the data of the server and the Unix sockets.
        ports: For each mapped port of the server, the port of 127.0.0.1 that leads to
            it.
        flags: The flags of ``recstore serve``.
    """

    def __init__(self, folder: Path, ports: dict[int, int], *flags: str) -> None:
        self._stderr = folder / "stderr"
        inner = ",".join(map(str, ports))
        module = [sys.executable, "-m", "tests.service.container"]
        command = [*_NAMESPACE, *module, "inside", str(folder), inner]
        command += ["serve", "--data", str(folder / "data"), *flags]
        with self._stderr.open("w") as stderr:
            pipe = subprocess.PIPE
            self._server = subprocess.Popen(
                command, stdout=pipe, stderr=stderr, text=True
            )
        self._forwarders: list[subprocess.Popen[str]] = []
        for port, outer in ports.items():
            outside = [*module, "outside", str(outer), str(folder / str(port))]
            self._forwarders.append(subprocess.Popen(outside, text=True))
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        assert line.startswith("serving on"), self._stderr.read_text()
        for outer in ports.values():
            _wait_for_port(outer)

    @property
    def pid(self) -> int:
        """The process of the server, for its namespace in /proc."""
        return self._server.pid

    def close(self) -> None:
        """Ends the server without a save, and the forwarders."""
        for process in (self._server, *self._forwarders):
            process.kill()
            process.wait()


def _wait_for_port(port: int) -> None:
    end = time.monotonic() + _START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.05)


async def _pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while content := await source.read(_PIECE_BYTES):
            target.write(content)
            await target.drain()
    target.close()


def _forward(listen: Callable[[Any], Any], connect: Callable[[], Any]) -> None:
    """Passes connections on. ``listen`` gets the function for each connection."""

    async def connected(
        source: asyncio.StreamReader, answers: asyncio.StreamWriter
    ) -> None:
        try:
            replies, target = await connect()
        except OSError:
            answers.close()
            return
        await asyncio.gather(_pass_on(source, target), _pass_on(replies, answers))

    async def run() -> None:
        listener = await listen(connected)
        await listener.serve_forever()

    asyncio.run(run())


def _inside(folder: Path, ports: list[int], serve: list[str]) -> None:
    request = struct.pack("16sh14x", b"lo", _IFF_UP)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, request)
    for port in ports:
        if os.fork() == 0:
            _end_with_parent()
            _forward_inside(folder / str(port), port)
    os.execv(sys.executable, [sys.executable, "-m", "torchrec_recstore.cli", *serve])


def _forward_inside(path: Path, port: int) -> None:
    _forward(
        lambda connected: asyncio.start_unix_server(connected, path),
        lambda: asyncio.open_connection("127.0.0.1", port),
    )


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _outside(port: int, path: Path) -> None:
    _forward(
        lambda connected: asyncio.start_server(connected, "127.0.0.1", port),
        lambda: asyncio.open_unix_connection(path),
    )


if __name__ == "__main__":
    if sys.argv[1] == "inside":
        _inside(Path(sys.argv[2]), list(map(int, sys.argv[3].split(","))), sys.argv[4:])
    else:
        _outside(int(sys.argv[2]), Path(sys.argv[3]))
