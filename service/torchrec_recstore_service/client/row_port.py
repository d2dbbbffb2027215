"""The port of a server for rows, as clients reach it or report that they cannot.

Tests: tests/service/test_ports.py.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable

import grpc

from torchrec_recstore_service.client.tcp_rows import RefusedError, TcpConnection
from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire.addresses import rows_addresses

_ATTACH_S = 5.0
_OPEN_PORT = (
    "start the server with --rows-port, let this port through as well, and name it by "
    "--advertise-rows if it has another number outside"
)
_UPGRADE = "install the release of the client on the server as well"

_log = logging.getLogger(__name__)


class RowPort:
    """Makes the connections of a client to the port for rows of one server.

    Args:
        address: The address by which the client reaches the server, ``host:port``.
        token: The token that the server requires, or None.
        context: The context of TLS, or None for connections without encryption.
        attach: The function that asks the server for its offer, with the time left in
            seconds.
    """

    def __init__(
        self,
        address: str,
        token: str | None,
        context: ssl.SSLContext | None,
        attach: Callable[[float], pb.AttachReply],
    ) -> None:
        self._address = address
        self._token = token
        self._context = context
        self._attach = attach
        self._has_warned = False

    def connect(self, offer: pb.AttachReply) -> TcpConnection | None:
        """Makes a connection to the server of an offer, and to no other server.

        The first failure is logged as a warning, because all later calls on rows are
        slow.

        Returns:
            The connection. None if the server takes no calls on rows by TCP.

        Raises:
            OSError: The server cannot be reached, or has refused the connection.
        """
        addresses = rows_addresses(self._address, offer)
        if not addresses:
            return None
        if not offer.server:
            reason = "it does not name itself, so that a wrong server could answer"
            self._warn(offer, reason, _UPGRADE)
            raise OSError(reason)
        failures: list[str] = []
        for place in addresses:
            try:
                return self._connected(place, offer)
            except (OSError, ValueError) as error:  # UnicodeError: the host is no name
                failures.append(f"{place}: {error}")
        reason = "; ".join(failures)
        self._warn(offer, reason, _OPEN_PORT)
        raise OSError(reason)

    def address(self, offer: pb.AttachReply) -> str | None:
        """Returns the address at which other programs reach the port of an offer.

        This is the one that the server advertises. If it advertises a port without a
        host, and is not reached by this port on the host of the client's own address,
        because this client does not go through the mapping, it is the port that the
        server listens on.

        Returns:
            The address. None if the server takes no calls on rows by TCP.
        """
        addresses = rows_addresses(self._address, offer)
        if not addresses:
            return None
        if ":" in offer.rows_address or len(addresses) == 1:
            return addresses[0]
        for address in addresses:
            if self._reaches(address, offer):
                return address
        return addresses[0]

    def _connected(self, place: str, offer: pb.AttachReply) -> TcpConnection:
        host, _, port = place.rpartition(":")
        return TcpConnection(
            host.strip("[]"),
            int(port),
            token=self._token,
            context=self._context,
            server=offer.server,
        )

    def _reaches(self, place: str, offer: pb.AttachReply) -> bool:
        try:
            self._connected(place, offer).close()
            return True
        except RefusedError as error:
            return error.is_from_it
        except (OSError, ValueError):
            return False

    def _warn(
        self,
        offer: pb.AttachReply,
        reason: str,
        remedy: str,
    ) -> None:
        """Logs once that the port cannot be used, unless the server itself has gone."""
        if self._has_warned:
            return
        try:
            is_same = self._attach(_ATTACH_S).server == offer.server
        except grpc.RpcError:
            is_same = False
        if not is_same:
            return
        self._has_warned = True
        _log.warning(
            "calls on rows of server %s go by gRPC, which is slower, because its port"
            " for rows cannot be used (%s): %s",
            self._address,
            reason,
            remedy,
        )
