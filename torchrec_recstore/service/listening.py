"""Addresses on which servers listen, and who may call the servers: TLS, tokens, health checks."""

from __future__ import annotations

import hmac
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from torchrec_recstore.network import host_of, is_loopback
from torchrec_recstore.rpc.protocol import MESSAGE_BYTES, TOKEN_KEY, VERSION, VERSION_KEY, token_value

GRACE_S = 30.0
_CALLS = 32  # calls that run at the same time; each has a thread
_OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # otherwise a second server on the same port would receive a part of the calls
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
]
_HEALTH = "/grpc.health.v1.Health/"
_OWN = "/torchrec_recstore."


@dataclass(frozen=True)
class ListenOptions:
    """The address of a server, and who may call it.

    Args:
        listen: The address to listen on, as ``host:port``. Port 0 chooses a free port.
        tls_cert: The path of a PEM file with the server's certificate.
        tls_key: The path of a PEM file with the private key of ``tls_cert``.
        client_ca: The path of a PEM file with CA certificates. Clients then need a certificate that one of them signs.
        token: The token that clients must send.
        metrics: The address for Prometheus, as ``host:port``.

    Raises:
        ValueError: A value is invalid, or options contradict each other.
    """

    listen: str
    tls_cert: Path | None = None
    tls_key: Path | None = None
    client_ca: Path | None = None
    token: str | None = None
    metrics: str | None = None

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key must be given together")
        if self.client_ca is not None and self.tls_cert is None:
            raise ValueError("--client-ca needs --tls-cert and --tls-key")
        self.check_address("--listen", self.listen)
        if self.metrics is not None:
            host_of_flag("--metrics", self.metrics)

    def check_address(self, flag: str, address: str) -> None:
        """Checks that a server may listen on an address: one that other machines reach needs TLS and a token.

        Raises:
            ValueError: TLS or the token is missing, or ``address`` is not ``host:port``. The message names the flag.
        """
        given = {"--tls-cert and --tls-key": self.tls_cert is not None, "--token-file": self.token is not None}
        if not is_loopback(host_of_flag(flag, address)) and not all(given.values()):
            missing = " and ".join(flags for flags, there in given.items() if not there)
            raise ValueError(f"{flag} {address} can be reached from other machines: that needs {missing}")


def allowed(given: str | bytes, token: str | None) -> bool:
    """Returns whether the header ``TOKEN_KEY`` of a call has the token that the server requires, if it requires one."""
    if token is None:
        return True
    return hmac.compare_digest(given if isinstance(given, bytes) else given.encode(), token_value(token).encode())


class Guard(grpc.ServerInterceptor):  # type: ignore[misc]
    """An interceptor that refuses calls without the token, and clients with another version of the protocol.

    Health checks need no token.
    """

    def __init__(self, token: str | None) -> None:
        self._token = token

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """See grpc.ServerInterceptor."""
        metadata = dict(details.invocation_metadata)
        given = metadata.get(TOKEN_KEY, "")
        if not details.method.startswith(_HEALTH) and not allowed(given, self._token):
            return _refusal(grpc.StatusCode.UNAUTHENTICATED, "the token is missing or wrong")
        version = metadata.get(VERSION_KEY)
        if details.method.startswith(_OWN) and version != VERSION:
            return _refusal(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the client speaks version {version} of the protocol, the server version {VERSION}",
            )
        return continuation(details)


def host_of_flag(flag: str, address: str) -> str:
    """Returns the host of a flag's ``host:port``. The port may be 0.

    Raises:
        ValueError: ``address`` is not ``host:port``. The message names the flag.
    """
    try:
        return host_of(address, least_port=0)
    except ValueError as error:
        raise ValueError(f"{flag} {error}") from None


def host_and_port(address: str) -> tuple[str, int]:
    """Returns the two parts of ``host:port``, without the brackets of an IPv6 address."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


@contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """Returns a context with an event that SIGTERM and SIGINT set. It must be used in the main thread."""
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _refusal(code: grpc.StatusCode, details: str) -> Any:
    def abort(requests: Any, context: Any) -> None:
        context.abort(code, details)

    # A handler of streams fits every method. It refuses the call before a request is read, which might never arrive.
    return grpc.stream_stream_rpc_method_handler(abort)


class Health(health.HealthServicer):  # type: ignore[misc]
    """The health service with separate threads, so that health checks without a token cannot block other calls."""

    def Check(self, request: Any, context: Any) -> Any:
        """See health.proto."""
        return super().Check(request, context)

    # grpcio 1.85.1 reads the thread pool of a method from this attribute.
    Check.experimental_thread_pool = ThreadPoolExecutor(2, "recstore-health")  # type: ignore[attr-defined]


class GrpcServer:
    """A gRPC server with health checks and reflection. Calls run in threads.

    Args:
        options: The address, and who may call the server.
        service: The full name of the service in the protocol.
        add: A function that adds the service to the server.

    Raises:
        OSError: The address cannot be listened on.
    """

    def __init__(self, options: ListenOptions, service: str, add: Callable[[grpc.Server], object]) -> None:
        self._server = grpc.server(
            ThreadPoolExecutor(_CALLS, "recstore-call"), interceptors=[Guard(options.token)], options=_OPTIONS
        )
        add(self._server)
        self._names = ("", service)
        self._health = Health()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((service, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        self.address = f"{options.listen.rpartition(':')[0]}:{_bind(self._server, options)}"
        """The address, ``host:port``, with the chosen port."""

    def start(self) -> None:
        """Takes calls."""
        self._server.start()

    def set_serving(self, serving: bool) -> None:
        """Sets the answer to health checks."""
        status = health_pb2.HealthCheckResponse
        for name in self._names:
            self._health.set(name, status.SERVING if serving else status.NOT_SERVING)

    def stop(self) -> None:
        """Refuses new calls, and waits for the running ones."""
        self._health.enter_graceful_shutdown()
        self._server.stop(GRACE_S).wait()


def _bind(server: grpc.Server, options: ListenOptions) -> int:
    try:
        if options.tls_cert is None or options.tls_key is None:
            return int(server.add_insecure_port(options.listen))
        clients = None if options.client_ca is None else options.client_ca.read_bytes()
        credentials = grpc.ssl_server_credentials(
            [(options.tls_key.read_bytes(), options.tls_cert.read_bytes())], clients, clients is not None
        )
        return int(server.add_secure_port(options.listen, credentials))
    except RuntimeError as error:
        raise OSError(
            f"cannot listen on {options.listen}: the address is in use or invalid, or the certificate is not a PEM file"
        ) from error
