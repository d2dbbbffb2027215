"""The calls of one server of a pair to the other one.

Tests: tests/service/test_pairs.py.
"""

from __future__ import annotations

from typing import Any

from torchrec_recstore_service.wire.access import Access, channel_of
from torchrec_recstore_service.wire.protocol import (
    REPLICA_KEY,
    TOKEN_KEY,
    VERSION,
    VERSION_KEY,
    token_value,
)
from torchrec_recstore_service.wire.recstore_pb2_grpc import ParameterServerStub

CALL_S = 5.0
"""The time in seconds for a short call."""
LONG_CALL_S = 24 * 3600.0
"""The time in seconds for a call that copies tables, or that saves or loads them."""


class Peer:
    """The other server, for calls of Python.

    Args:
        address: The address of the server, ``host:port``.
        access: The credentials and certificates.
        secret: The secret of the calls of a primary to its backup. Default: "", for the
            calls of a server that joins.
    """

    def __init__(
        self,
        address: str,
        access: Access,
        secret: str = "",
    ) -> None:
        self.address = address
        self.server = ""
        """The id of this start of the server."""
        self.row_addresses: list[str] = []
        """The addresses at which it may take calls on rows, best first."""
        self.rows_server = ""
        """The name of the server in connections for rows."""
        self.secret = secret
        self._channel = channel_of(address, access)
        self._stub: Any = ParameterServerStub(self._channel)  # type: ignore[no-untyped-call]
        self._metadata = [(VERSION_KEY, VERSION)]
        if secret:
            self._metadata.append((REPLICA_KEY, secret))
        if access.token is not None:
            self._metadata.append((TOKEN_KEY, token_value(access.token)))

    def call(
        self,
        method: str,
        request: Any,
        timeout_s: float = CALL_S,
    ) -> Any:
        """Calls a method. Raises grpc.RpcError."""
        function = getattr(self._stub, method)
        return function(request, timeout=timeout_s, metadata=self._metadata)

    def close(self) -> None:
        """Closes the connection."""
        self._channel.close()
