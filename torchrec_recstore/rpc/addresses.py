from __future__ import annotations

import ipaddress
from collections.abc import Sequence


def host_of(address: str, least_port: int = 1) -> str:
    """The host of ``host:port``.

    Raises:
        ValueError: it is none.
    """
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal() and least_port <= int(port) < 2**16):
        raise ValueError(f"must be HOST:PORT, got {address!r}")
    return host


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def checked_addresses(addresses: Sequence[str]) -> tuple[str, ...]:
    """Addresses of servers, each ``host:port``, after a check.

    Raises:
        TypeError, ValueError: one is none, or is there twice.
    """
    if isinstance(addresses, str) or not all(isinstance(address, str) for address in addresses):
        raise TypeError(f"servers must be a list of 'host:port', got {addresses!r}")
    if not addresses:
        raise ValueError("servers must name at least one 'host:port'")
    for address in addresses:
        try:
            host_of(address)
        except ValueError as error:
            raise ValueError(f"servers {error}") from None
    if len(set(addresses)) != len(addresses):
        raise ValueError(f"servers must differ, got {', '.join(addresses)}")
    return tuple(addresses)
