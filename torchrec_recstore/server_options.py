"""The option that places a table on parameter servers. This module imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchrec_recstore.display import set_fields
from torchrec_recstore.network import check_token, checked_addresses


@dataclass(frozen=True)
class Servers:
    """The parameter servers (``recstore serve``) that own the rows of a table, through the package ``grpcio``.

    Args:
        addresses: The address of each server, as ``"host:port"``. All models and clients name all servers of the set,
            in any order.
        staleness: The number of updates that may be in progress while rows are read. With 0, each backward waits for
            its update. Default: 0.
        token: The token that the servers require. Default: None, for servers without a token.
        tls_ca: The path of a PEM file with the certificates of the authority that signed the servers' certificates.
            Connections are then encrypted. Default: None, which means no encryption.
        tls_cert: The path of a PEM file with the client's certificate, if the servers require one. Default: None.
        tls_key: The path of a PEM file with the private key of ``tls_cert``. Default: None.
        timeout_s: The longest time in seconds that a call may take, with all of its repetitions. Default: 30.

    Raises:
        TypeError, ValueError: An argument is invalid. The message names the argument.
    """

    addresses: Sequence[str]
    staleness: int = 0
    token: str | None = field(default=None, repr=False)
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    timeout_s: float = 30.0

    def __repr__(self) -> str:
        return set_fields(self)

    def __post_init__(self) -> None:
        # A tuple, so that the options can be compared and hashed.
        object.__setattr__(self, "addresses", checked_addresses(self.addresses, "Servers.addresses"))
        if isinstance(self.staleness, bool) or not isinstance(self.staleness, int):
            raise TypeError(f"Servers.staleness must be an int, got {type(self.staleness).__name__}")
        if self.staleness < 0:
            raise ValueError(f"Servers.staleness must not be negative, got {self.staleness}")
        check_token(self.token, "Servers.token")
        for name in ("tls_ca", "tls_cert", "tls_key"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise TypeError(f"Servers.{name} must be a str, got {type(value).__name__}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("Servers.tls_cert and Servers.tls_key must be set together")
        if self.tls_cert is not None and self.tls_ca is None:
            raise ValueError("Servers.tls_cert needs tls_ca")
        if isinstance(self.timeout_s, bool) or not isinstance(self.timeout_s, int | float):
            raise TypeError(f"Servers.timeout_s must be a number, got {type(self.timeout_s).__name__}")
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise ValueError(f"Servers.timeout_s must be positive and finite, got {self.timeout_s}")
