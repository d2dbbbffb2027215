"""A wire between simulated hosts: a thread that forwards their packets at a given rate,
after a given delay.

The kernel's ``tbf`` limits a rate with bursts, and the kernels of some machines cannot
delay packets. This thread does both in user space: each host has a TUN device, and the
thread reads the packets of all hosts.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from .network_hosts import NETWORK, Host

MTU = 9000  # fewer packets for the thread than with 1,500 bytes
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x1, 0x1000


class Wire(threading.Thread):
    """Forwards packets between hosts.

    Args:
        devices: The file descriptor of each host's TUN device, by the host's IPv4
            address.
        bytes_per_s: The rate of the wire in bytes a second. It is half-duplex: this is
            the rate of all hosts together. Default: None, which means no limit.
        delay_s: The time from the end of a packet's sending to its arrival, in seconds.
            Default: 0.
    """

    def __init__(
        self,
        devices: dict[str, int],
        bytes_per_s: float | None = None,
        delay_s: float = 0.0,
    ) -> None:
        super().__init__(daemon=True)
        self.bytes_per_s, self.delay_s = bytes_per_s, delay_s
        self._devices = {
            bytes(map(int, address.split("."))): fd for address, fd in devices.items()
        }
        self._ends = threading.Event()

    def run(self) -> None:
        """Forwards packets until :meth:`end` is called."""
        # before the ranks, which otherwise keep it from their core for milliseconds
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -10)
        # in the order of sending, which is that of arrival
        queue: deque[tuple[float, int, bytes]] = deque()
        devices = list(self._devices.values())
        free_s = 0.0  # when the last packet has been sent
        while not self._ends.is_set():
            now_s = time.monotonic()
            while queue and queue[0][0] <= now_s:
                _, to, packet = queue.popleft()
                with suppress(OSError):  # the device of a host that is being removed
                    os.write(to, packet)
            wait_s = max(0.0, queue[0][0] - time.monotonic()) if queue else 0.1
            ready, _, _ = select.select(devices, [], [], wait_s)
            now_s = time.monotonic()
            for fd in ready:
                packet = os.read(fd, 65535)
                target = self._devices.get(packet[16:20])
                if packet[0] >> 4 != 4 or target is None:
                    continue  # IPv6, and multicast
                free_s = max(now_s, free_s) + (
                    len(packet) / self.bytes_per_s if self.bytes_per_s else 0.0
                )
                queue.append((free_s + self.delay_s, target, packet))

    def end(self) -> None:
        """Ends the thread."""
        self._ends.set()
        self.join()


@contextmanager
def wired_hosts(count: int) -> Iterator[tuple[list[Host], Wire]]:
    """Returns a context with simulated hosts and the wire between them.

    Its rate and delay may be changed at any time.

    The test is skipped where namespaces or TUN devices are not allowed.
    """
    hosts = [
        Host(
            f"recstore_w{os.getpid()}_{i}",
            f"rsw{os.getpid() % 10**6}n{i}",
            f"{NETWORK}.{i + 1}",
        )
        for i in range(count)
    ]
    devices: dict[str, int] = {}
    wire = None
    try:
        try:
            for host in hosts:
                fd = os.open("/dev/net/tun", os.O_RDWR)
                devices[host.address] = fd
                fcntl.ioctl(
                    fd,
                    _TUNSETIFF,
                    struct.pack("16sH", host.cable.encode(), _IFF_TUN | _IFF_NO_PI),
                )
                _ip("netns", "add", host.name)
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
                _ip(
                    "-n",
                    host.name,
                    "link",
                    "set",
                    host.cable,
                    "up",
                    "mtu",
                    str(MTU),
                    "txqueuelen",
                    "10000",
                )
                _ip("-n", host.name, "link", "set", "lo", "up")
                # Windows that fill the wire, but do not queue for so long in it that
                # TCP sends its segments twice.
                for setting in ("tcp_rmem", "tcp_wmem"):
                    _ip(
                        "netns",
                        "exec",
                        host.name,
                        "sysctl",
                        "-qw",
                        f"net.ipv4.{setting}=4096 131072 524288",
                    )
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(
                "network namespaces or TUN devices are not allowed here:"
                f" {getattr(error, 'stderr', error)}"
            )
        wire = Wire(devices)
        wire.start()
        yield hosts, wire
    finally:
        for host in hosts:
            host.lose()
        if wire is not None:
            wire.end()
        for fd in devices.values():
            os.close(fd)
        for host in hosts:
            subprocess.run(
                ["ip", "netns", "delete", host.name], check=False, capture_output=True
            )


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
