"""Addresses and tokens of servers, and the pauses between calls that are repeated.

This module imports no torch.

Tests: tests/test_options.py, tests/service/test_access.py and test_connections.py.
"""

from __future__ import annotations

import ipaddress
import random
import re
import time
from collections.abc import Sequence

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_PORT = re.compile(r"[0-9]{1,5}")
_HOST = re.compile(
    r"""
    [\w.-]+                                # a name, or an IPv4 address
    | \[?[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]?    # an IPv6 address
    """,
    re.ASCII | re.VERBOSE,
)


def host_of(address: str, least_port: int = 1) -> str:
    """Returns the host of ``host:port``.

    A host is a name or an IP address. It is never the path of a socket, to which gRPC
    would connect: ``unix:/run/socket:80`` is refused.

    Raises:
        ValueError: The address has another form, or its port is out of range.
    """
    host, _, port = address.rpartition(":")
    has_form = _HOST.fullmatch(host) and _PORT.fullmatch(port)
    if not has_form or not least_port <= int(port) < 2**16:
        raise ValueError(f"must be HOST:PORT, got {address!r}")
    return host


def checked_addresses(
    addresses: Sequence[str],
    argument: str = "servers",
) -> tuple[str, ...]:
    """Returns the addresses of servers: ``host:port`` or ``host:port/host:port``.

    Errors begin with ``argument``.

    Raises TypeError if they are not a sequence of str, and ValueError if there is none,
    or one has another form or occurs twice.
    """
    if isinstance(addresses, str) or not all(
        isinstance(address, str) for address in addresses
    ):
        raise TypeError(f"{argument} must be a list of 'host:port', got {addresses!r}")
    if not addresses:
        raise ValueError(f"{argument} must name at least one 'host:port'")
    for server_or_pair in addresses:
        for address in server_or_pair.split("/"):
            try:
                host_of(address)
            except ValueError as error:
                raise ValueError(f"{argument} {error}") from None
    if len(set(addresses)) != len(addresses):
        raise ValueError(f"{argument} must differ, got {', '.join(addresses)}")
    return tuple(addresses)


def check_token(token: object, argument: str = "token") -> None:
    """Raises ValueError if a token cannot be sent in a header.

    None: the servers require no token.
    """
    if token is None:
        return
    if not isinstance(token, str) or not re.fullmatch("[!-~]+", token):
        raise ValueError(
            f"{argument} must be of printable ASCII characters without blanks"
        )


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach the host."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class Backoff:
    """The pauses between the repetitions of a failing call, until ``timeout_s`` seconds
    are over.

    A pause is up to twice as long as the pause before it, from 50 ms to 1 s. Each is
    shortened at random by up to one half, so that many clients do not repeat their
    calls at the same moment.
    """

    def __init__(self, timeout_s: float) -> None:
        self._end = time.monotonic() + timeout_s
        self._pause = _FIRST_PAUSE_S

    @property
    def left_s(self) -> float:
        """The time in seconds until the end."""
        return self._end - time.monotonic()

    def pause(self) -> None:
        """Sleeps until the next repetition, or until the end if that comes first."""
        time.sleep(max(0.0, min(self.left_s, self._pause * random.uniform(0.5, 1))))
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)
