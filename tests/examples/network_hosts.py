"""Simulated hosts: network namespaces on one bridge, in each of which a program has an
address of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from tests.packages import PYTHON_PATH

NETWORK = "10.213.77"


class Host:
    """A network namespace.

    A program in it sees other hosts' addresses, and not those of this machine.

    Args:
        name: The name of the namespace.
        cable: The name of its interface.
        address: Its address.
    """

    def __init__(self, name: str, cable: str, address: str) -> None:
        self.name, self.cable, self.address = name, cable, address
        self._running: list[subprocess.Popen[str]] = []

    def torchrun(self, arguments: list[str], log: Path) -> subprocess.Popen[str]:
        """Starts torchrun on the host. Its output is appended to a file."""
        with log.open("a") as out:
            started = subprocess.Popen(
                [
                    "ip",
                    "netns",
                    "exec",
                    self.name,
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    *arguments,
                ],
                # gloo would use the address of the machine's name, which does not exist
                # in the namespace.
                env=os.environ
                | {
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": PYTHON_PATH,
                    "GLOO_SOCKET_IFNAME": self.cable,
                },
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self._running.append(started)
        return started

    def wait(self, timeout_s: float) -> int:
        """Waits for the program that was started last, and returns its exit status."""
        return self._running[-1].wait(timeout_s)

    def set_rate(self, rate: str | None) -> None:
        """Limits what the host sends, for example to ``"60mbit"`` a second.

        None: no limit.
        """
        words = ("-n", self.name, "qdisc", "replace", "dev", self.cable, "root")
        limit = (
            ("noqueue",)
            if rate is None
            else ("tbf", "rate", rate, "burst", "256kb", "latency", "200ms")
        )
        _command("tc", *words, *limit)

    def lose(self) -> None:
        """Kills all programs of the host at once, as a loss of the machine does."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.name],
            check=False,
            capture_output=True,
            text=True,
        )
        for pid in found.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        for each in self._running:
            each.wait()


def _command(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


_ip = partial(_command, "ip")


@contextmanager
def network_hosts(count: int, rate: str | None = None) -> Iterator[list[Host]]:
    """Returns a context with simulated hosts, each of which sends at most ``rate``; see
    :meth:`Host.set_rate`.

    The test is skipped where namespaces are not allowed.
    """
    bridge = f"rsb{os.getpid() % 10**6}"
    hosts = [
        Host(
            f"recstore_{os.getpid()}_{i}",
            f"rs{os.getpid() % 10**6}n{i}",
            f"{NETWORK}.{i + 1}",
        )
        for i in range(count)
    ]
    try:
        try:
            _ip("link", "add", bridge, "type", "bridge")
            _ip("link", "set", bridge, "up")
            for host in hosts:
                _ip("netns", "add", host.name)
                _ip(
                    "link",
                    "add",
                    host.cable,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    f"{host.cable}b",
                )
                _ip("link", "set", f"{host.cable}b", "master", bridge, "up")
                _ip("link", "set", host.cable, "netns", host.name)
                _ip(
                    "-n",
                    host.name,
                    "addr",
                    "add",
                    f"{host.address}/24",
                    "dev",
                    host.cable,
                )
                _ip("-n", host.name, "link", "set", host.cable, "up")
                _ip("-n", host.name, "link", "set", "lo", "up")
                if rate is not None:
                    host.set_rate(rate)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(
                "network namespaces are not allowed here:"
                f" {getattr(error, 'stderr', error)}"
            )
        yield hosts
    finally:
        for host in hosts:
            host.lose()
            subprocess.run(
                ["ip", "netns", "delete", host.name], check=False, capture_output=True
            )
        subprocess.run(
            ["ip", "link", "delete", bridge], check=False, capture_output=True
        )
