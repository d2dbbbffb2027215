"""Redis servers and clusters for tests, on free loopback ports."""

from __future__ import annotations

import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import redis

PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server")
CLIENT = shutil.which("redis-cli") or shutil.which("valkey-cli")

needs_redis = pytest.mark.skipif(
    PROGRAM is None, reason="neither redis-server nor valkey-server is on this machine"
)
needs_cluster = pytest.mark.skipif(
    PROGRAM is None or CLIENT is None,
    reason="redis-server and redis-cli, or Valkey's, are not on this machine",
)


class RedisServer:
    """One server; ``start`` after ``stop`` or ``kill`` uses the same port and directory
    again.
    """

    def __init__(
        self,
        directory: Path,
        *arguments: str,
        port: int | None = None,
        ping: str | None = None,
        password: str | None = None,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.port = free_port() if port is None else port
        self.url = f"redis://{f':{password}@' if password else ''}127.0.0.1:{self.port}"
        self._arguments = (
            (*arguments, "--requirepass", password) if password else arguments
        )
        self._ping = ping or self.url
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self, *more: str) -> None:
        assert PROGRAM is not None
        command = [
            PROGRAM,
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--dir",
            str(self.directory),
        ]
        command += [
            "--save",
            "",
            "--logfile",
            str(self.directory / "log"),
            *self._arguments,
            *more,
        ]
        self._process = subprocess.Popen(command)
        end = time.monotonic() + 10
        while not self._answers():
            assert self._process.poll() is None, (self.directory / "log").read_text()
            assert time.monotonic() < end, (
                f"redis-server does not answer on port {self.port}"
            )
            time.sleep(0.01)

    def _answers(self) -> bool:
        with (
            suppress(redis.ConnectionError, redis.TimeoutError),
            redis.Redis.from_url(self._ping) as client,
        ):
            return bool(client.ping())
        return False

    def stop(self) -> None:
        """Stops the server as a service manager does: the server saves its data first."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(how)
            self._process.wait(10)
            self._process = None

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self._ping)


@contextmanager
def redis_server(
    directory: Path, *arguments: str, **options: str
) -> Iterator[RedisServer]:
    server = RedisServer(directory, *arguments, **options)  # type: ignore[arg-type]
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def redis_cluster(directory: Path, n_nodes: int = 3) -> Iterator[list[RedisServer]]:
    assert CLIENT is not None
    nodes: list[RedisServer] = []
    try:
        for node in range(n_nodes):
            # The cluster bus listens on a second port. Its default is the first port +
            # 10000, which may be in use.
            bus = (
                "--cluster-enabled",
                "yes",
                "--cluster-port",
                str(free_port()),
                "--cluster-node-timeout",
                "1000",
            )
            nodes.append(
                RedisServer(directory / str(node), *bus, "--appendonly", "yes")
            )
        hosts = [f"127.0.0.1:{node.port}" for node in nodes]
        create = [
            CLIENT,
            "--cluster",
            "create",
            *hosts,
            "--cluster-replicas",
            "0",
            "--cluster-yes",
        ]
        subprocess.run(create, check=True, stdout=subprocess.DEVNULL, timeout=20)
        for node in nodes:
            wait_for_cluster(node)
        yield nodes
    finally:
        for node in nodes:
            node.kill()


def wait_for_cluster(node: RedisServer) -> None:
    end = time.monotonic() + 15
    with node.client() as client:
        while client.execute_command("CLUSTER INFO")["cluster_state"] != "ok":
            if time.monotonic() > end:
                raise TimeoutError(f"the cluster of port {node.port} does not come up")
            time.sleep(0.02)


def free_port() -> int:
    """Returns a free port that no connection of another test takes for its own end
    while a server is started again.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(
            10_000, first if first > 20_000 else 32_768
        )
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
