"""Who may call: the token, the protocol's version, and which addresses a server may listen on."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any

import grpc

from torchrec_recstore.rpc.addresses import host_of, is_loopback
from torchrec_recstore.rpc.protocol import TOKEN_KEY, VERSION, VERSION_KEY, token_value

_HEALTH = "/grpc.health.v1.Health/"
_OWN = "/torchrec_recstore."


class Guard(grpc.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without the token, but for health checks, and clients of another version of the protocol."""

    def __init__(self, token: str | None) -> None:
        self._token = None if token is None else token_value(token).encode()

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """As grpc.ServerInterceptor."""
        metadata = dict(details.invocation_metadata)
        given = metadata.get(TOKEN_KEY, "")
        given = given if isinstance(given, bytes) else given.encode()
        wanted = None if details.method.startswith(_HEALTH) else self._token
        if wanted is not None and not hmac.compare_digest(given, wanted):
            return _refusal(grpc.StatusCode.UNAUTHENTICATED, "the token is missing or wrong")
        version = metadata.get(VERSION_KEY)
        if details.method.startswith(_OWN) and version != VERSION:
            return _refusal(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the client speaks version {version} of the protocol, the server version {VERSION}",
            )
        return continuation(details)


def check_listen(address: str, *, tls: bool, token: bool) -> None:
    """Whether a server may listen there: other machines may call only with TLS and a token.

    Raises:
        ValueError: it may not, or it is no ``host:port``.
    """
    if not is_loopback(host_of_flag("--listen", address)) and not (tls and token):
        missing = " and ".join(
            flag for flag, given in (("--tls-cert and --tls-key", tls), ("--token-file", token)) if not given
        )
        raise ValueError(f"--listen {address} can be reached from other machines: that needs {missing}")


def host_of_flag(flag: str, address: str) -> str:
    """The host of a flag's ``host:port``, of which the port may be 0.

    Raises:
        ValueError: it is none; the message names the flag.
    """
    try:
        return host_of(address, least_port=0)
    except ValueError as error:
        raise ValueError(f"{flag} {error}") from None


def _refusal(code: grpc.StatusCode, details: str) -> Any:
    def abort(requests: Any, context: Any) -> None:
        context.abort(code, details)

    # Of streams, whatever the method is: it is refused before anything is read, which may never come.
    return grpc.stream_stream_rpc_method_handler(abort)
