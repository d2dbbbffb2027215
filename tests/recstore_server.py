"""Parameter servers of a test's own, on free loopback ports, and a road to them that can be cut."""

from __future__ import annotations

import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path


class RecStoreServer:
    """``recstore serve`` in a process; ``start`` after ``stop`` or ``kill`` comes back on the same port."""

    def __init__(self, data: Path, *flags: str, listen: str = "127.0.0.1:0") -> None:
        self.data = data
        self._flags = flags
        self.address = listen
        self._process: subprocess.Popen[str] | None = None
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "torchrec_recstore.cli", "serve"]
        command += ["--listen", self.address, "--data", str(self.data), *self._flags]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise AssertionError(f"the server has not started: {self._process.communicate()[1]}")
        self.address = line.removeprefix("serving on ").strip()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def stop(self) -> str:
        """As a service manager does; returns what it has written to stderr."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        errors = self._process.communicate(timeout=60)[1]
        assert self._process.returncode == 0, errors
        return errors

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.communicate()


class Proxy:
    """Passes bytes on to a server, until it is told to cut, hold or damage them."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.cut_after: int | None = None
        """Bytes from the server, over all connections, after which all connections are cut, once."""
        self.held = threading.Event()
        """While set, nothing is passed on."""
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Ends all connections; new ones may be made."""
        with self._lock:
            for each in self._open:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closed = True
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
            except OSError:
                continue
            with self._lock:
                self._open += [client, server]
            threading.Thread(target=self._pass_on, args=(client, server), daemon=True).start()

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        with client, server, suppress(OSError):
            while True:
                for source in select.select([client, server], [], [])[0]:
                    data = source.recv(1 << 16)
                    while self.held.is_set() and not self._closed:
                        threading.Event().wait(0.01)
                    if not data:
                        return
                    if source is server and self.cut_after is not None:
                        self.cut_after -= len(data)
                        if self.cut_after <= 0:
                            self.cut_after = None
                            return
                    (server if source is client else client).sendall(data)
