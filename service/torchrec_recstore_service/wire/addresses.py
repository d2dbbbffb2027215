"""Where a server takes calls on rows.

Tests: tests/service/test_ports.py.
"""

from __future__ import annotations

from torchrec_recstore.network import host_of
from torchrec_recstore_service.wire import recstore_pb2 as pb


def rows_addresses(address: str, offer: pb.AttachReply) -> list[str]:
    """Returns the addresses, best first, at which a server may take calls on rows.

    A server behind a mapping of ports advertises an address. Clients on its own network
    may reach only the port that the server listens on.

    Args:
        address: The address by which the client reaches the server, ``host:port``.
        offer: The server's answer to ``Attach``.
    """
    if not offer.rows_port:
        return []
    host = host_of(address)
    addresses = [f"{host}:{offer.rows_port}"]
    if offer.rows_address:
        advertised = offer.rows_address
        if ":" not in advertised:
            advertised = f"{host}:{advertised}"
        if advertised not in addresses:
            addresses.insert(0, advertised)
    return addresses
