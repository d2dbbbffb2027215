"""Parameter servers for tests, on free loopback ports, and a proxy in front of them
that can cut connections.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

from tests.processes import ForkedCommand
from tests.redis_server import RedisServer, free_port
from torchrec_recstore import RecStoreClient


class RecStoreServer:
    """``recstore serve`` in a forked process.

    ``start`` after ``stop`` or ``kill`` uses the same port again.
    """

    def __init__(self, data: Path, *flags: str, listen: str | None = None) -> None:
        self.data = data
        self._flags = flags
        self.address = listen or f"127.0.0.1:{free_port()}"
        self.start()

    def start(self) -> None:
        command = [
            "-m",
            "torchrec_recstore.cli",
            "serve",
            "--listen",
            self.address,
            "--data",
            str(self.data),
        ]
        self._command = ForkedCommand([*command, *self._flags])
        while not (line := self._command.stdout).endswith("\n"):
            if not self._command.process.is_alive():
                raise AssertionError(
                    f"the server has not started: {self._command.stderr}"
                )
            time.sleep(0.01)
        self.address = line.removeprefix("serving on ").strip()

    @property
    def pid(self) -> int:
        return self._command.pid

    @property
    def stderr(self) -> str:
        """What the server has written to stderr so far."""
        return self._command.stderr

    @property
    def is_alive(self) -> bool:
        return self._command.process.is_alive()

    def stop(self) -> str:
        """Stops the server as a service manager does.

        Returns what the server has written to stderr.
        """
        self._command.terminate()
        status = self._command.wait(timeout_s=60)
        assert status == 0, self._command.stderr
        return self._command.stderr

    def kill(self) -> None:
        self._command.kill()

    def pause(self) -> None:
        """Stops all threads with SIGSTOP, and waits until none runs: one of them may
        answer a call meanwhile.
        """
        os.kill(self.pid, signal.SIGSTOP)
        end = time.monotonic() + 30
        while any(
            _state(thread) not in "TZ"
            for thread in Path(f"/proc/{self.pid}/task").iterdir()
        ):
            assert time.monotonic() < end
            time.sleep(0.001)


def _state(thread: Path) -> str:
    with suppress(FileNotFoundError, ProcessLookupError):
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    return "Z"


class ServerPair:
    """Two servers that are one, and the Redis server that says which of them answers."""

    def __init__(
        self,
        folder: Path,
        name: str = "first",
        lease: RedisServer | None = None,
        flags: tuple[str, ...] = (),
        own: tuple[tuple[str, ...], ...] = ((), ()),  # the flags of one server each
    ) -> None:
        self.lease = lease or RedisServer(folder / "redis")
        flags = ("--replicate", name, "--lease", self.lease.url, *flags)
        self.servers = [
            RecStoreServer(folder / f"{name}-{i}", *flags, *own[i]) for i in range(2)
        ]
        self.address = "/".join(server.address for server in self.servers)

    def client(self, **arguments: object) -> RecStoreClient:
        """Returns a client of the pair."""
        return RecStoreClient([self.address], **arguments)  # type: ignore[arg-type]

    def wait_for(self, said: str, server: int, count: int = 1) -> None:
        """Waits until a server has said something so often."""
        end = time.monotonic() + 30
        while self.servers[server].stderr.count(said) < count:
            assert time.monotonic() < end, self.servers[server].stderr
            time.sleep(0.02)

    def primary(self) -> int:
        """Returns which server is the primary, when the other one is its backup."""
        end = time.monotonic() + 30
        while True:
            said = [server.stderr.splitlines()[-1:] for server in self.servers]
            for one, other in ((0, 1), (1, 0)):
                if "is the backup" in "".join(
                    said[one]
                ) and "this server is the backup of" in "".join(said[other]):
                    return one
            assert time.monotonic() < end, said
            time.sleep(0.02)

    def close(self) -> None:
        for server in self.servers:
            with suppress(Exception):
                server.kill()
        self.lease.kill()


class Proxy:
    """Passes bytes on to a server, and cuts or holds connections when a test says so."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self.cut_after: int | None = None
        """A number of bytes from the server, over all connections.

        After them one connection is cut, once.
        """
        self.held = threading.Event()
        """While set, nothing is passed on."""
        self.delay_s = 0.0
        """The time in seconds by which everything from the server is delayed."""
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._closed = False
        self._listeners: dict[int, socket.socket] = {}
        self._targets: dict[int, str] = {}
        self.address = f"127.0.0.1:{self.in_front_of(int(port))}"

    def in_front_of(self, port: int) -> int:
        """Returns the port that stands for another port of the server."""
        with self._lock:
            listener = self._listeners.get(port)
            if listener is None:
                listener = self._listeners[port] = socket.create_server(
                    ("127.0.0.1", 0)
                )
                threading.Thread(
                    target=self._accept, args=(listener, port), daemon=True
                ).start()
        own: int = listener.getsockname()[1]
        return own

    def lead(self, port: int, address: str) -> None:
        """Lets new connections in front of a port of the server lead to another
        address.
        """
        self._targets[port] = address

    def cut(self) -> None:
        """Ends all connections; new ones may be made."""
        with self._lock:
            for each in self._open:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closed = True
        for listener in self._listeners.values():
            listener.close()
        self.cut()

    def _accept(self, listener: socket.socket, port: int) -> None:
        while not self._closed:
            try:
                client, _ = listener.accept()
                host, _, target = self._targets.get(
                    port, f"{self._host}:{port}"
                ).rpartition(":")
                server = socket.create_connection((host, int(target)))
            except OSError:
                continue
            with self._lock:
                self._open += [client, server]
            threading.Thread(
                target=self._pass_on, args=(client, server), daemon=True
            ).start()

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        with client, server, suppress(OSError):
            while True:
                for source in select.select([client, server], [], [])[0]:
                    data = source.recv(1 << 16)
                    while self.held.is_set() and not self._closed:
                        threading.Event().wait(0.01)
                    if not data:
                        return
                    if source is server:
                        time.sleep(self.delay_s)
                    if source is server and self.cut_after is not None:
                        self.cut_after -= len(data)
                        if self.cut_after <= 0:
                            self.cut_after = None
                            return
                    (server if source is client else client).sendall(data)
