"""The credentials with which servers are called, and the channels of gRPC to them.

Tests: tests/service/test_connections.py and test_access.py.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from torchrec_recstore.network import check_token
from torchrec_recstore_service.wire.protocol import FRAME_BYTES, MESSAGE_BYTES

_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.http2.max_frame_size", FRAME_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


@dataclass(frozen=True)
class Access:
    """The credentials, certificates and timeout with which servers are called.

    Args:
        token: The token that the servers require. Default: None, for servers without a
            token.
        tls_ca: The path of a PEM file with the certificates of the authority that
            signed the servers' certificates. Connections are then encrypted. Default:
            None, which means no encryption.
        tls_cert: The path of a PEM file with the client's certificate, if the servers
            require one. Default: None.
        tls_key: The path of a PEM file with the key of the client's certificate.
            Default: None.
        timeout_s: The longest time in seconds that a call may take, with all of its
            repetitions. Default: 30.
        shared_memory: Whether rows travel by shared memory to servers on the same host
            that run as the same user. Default: True.

    Raises:
        ValueError: A field has an invalid value. The message names the field.
    """

    token: str | None = field(default=None, repr=False)
    tls_ca: str | Path | None = None
    tls_cert: str | Path | None = None
    tls_key: str | Path | None = None
    timeout_s: float = 30.0
    shared_memory: bool = True

    def __post_init__(self) -> None:
        if not isinstance(
            self.timeout_s,
            int | float,
        ) or not 0 < self.timeout_s < float("inf"):
            raise ValueError(
                "timeout_s must be a positive number of seconds, got"
                f" {self.timeout_s!r}"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key must be set together")
        if self.tls_cert is not None and self.tls_ca is None:
            raise ValueError("tls_cert needs tls_ca")
        check_token(self.token)


def channel_of(address: str, access: Access) -> Any:
    """Returns a channel of gRPC to a server.

    Raises OSError if a file of ``access`` cannot be read.
    """
    # Without a scheme, gRPC takes the host of "unix:80" for one, and connects to the
    # socket "80" in the working directory. Servers name addresses to each other, so an
    # address is a host and a port only.
    target = f"dns:///{address}"
    if access.tls_ca is None:
        return grpc.insecure_channel(target, _CHANNEL_OPTIONS)

    def content(file: str | Path | None) -> bytes | None:
        return None if file is None else Path(file).read_bytes()

    credentials = grpc.ssl_channel_credentials(
        content(access.tls_ca),
        content(access.tls_key),
        content(access.tls_cert),
    )
    return grpc.secure_channel(target, credentials, _CHANNEL_OPTIONS)


def tls_context(access: Access) -> ssl.SSLContext:
    """Returns the context of TLS for connections that are not made by gRPC."""
    context = ssl.create_default_context(cafile=access.tls_ca)
    if access.tls_cert is not None and access.tls_key is not None:
        context.load_cert_chain(access.tls_cert, access.tls_key)
    return context
