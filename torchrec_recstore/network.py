"""Addresses and tokens of servers. This module imports no torch.

Tests: tests/test_options.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

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
    addresses: Sequence[str], argument: str = "servers"
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
    for address in (one for each in addresses for one in each.split("/")):
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
    if token is not None and not (
        isinstance(token, str) and re.fullmatch("[!-~]+", token)
    ):
        raise ValueError(
            f"{argument} must be of printable ASCII characters without blanks"
        )
