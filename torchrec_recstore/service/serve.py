"""Runs a parameter server: loads the last checkpoint, serves, saves and stops. Also checks who may call the server."""

from __future__ import annotations

import hmac
import logging
import math
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from torchrec_recstore.network import host_of, is_loopback
from torchrec_recstore.rpc import recstore_pb2 as pb
from torchrec_recstore.rpc.protocol import (
    MESSAGE_BYTES,
    TOKEN_KEY,
    VERSION,
    VERSION_KEY,
    token_value,
)
from torchrec_recstore.rpc.recstore_pb2_grpc import add_ParameterServerServicer_to_server
from torchrec_recstore.service.checkpoints import DataDirectory
from torchrec_recstore.service.hosted import HostedBackend, Limits
from torchrec_recstore.service.metrics import Metrics, NoObserver
from torchrec_recstore.service.server import ParameterServer

GRACE_S = 30.0
_IDLE_CHECK_S = 60.0
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

_log = logging.getLogger(__name__)


class Guard(grpc.ServerInterceptor):  # type: ignore[misc]
    """An interceptor that refuses calls without the token, and clients with another version of the protocol.

    Health checks need no token.
    """

    def __init__(self, token: str | None) -> None:
        self._token = None if token is None else token_value(token).encode()

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """See grpc.ServerInterceptor."""
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
    """Checks that a server may listen on an address: an address that other machines reach needs TLS and a token.

    Raises:
        ValueError: TLS or the token is missing, or ``address`` is not ``host:port``.
    """
    if not is_loopback(host_of_flag("--listen", address)) and not (tls and token):
        missing = " and ".join(
            flag for flag, given in (("--tls-cert and --tls-key", tls), ("--token-file", token)) if not given
        )
        raise ValueError(f"--listen {address} can be reached from other machines: that needs {missing}")


def host_of_flag(flag: str, address: str) -> str:
    """Returns the host of a flag's ``host:port``. The port may be 0.

    Raises:
        ValueError: ``address`` is not ``host:port``. The message names the flag.
    """
    try:
        return host_of(address, least_port=0)
    except ValueError as error:
        raise ValueError(f"{flag} {error}") from None


def _refusal(code: grpc.StatusCode, details: str) -> Any:
    def abort(requests: Any, context: Any) -> None:
        context.abort(code, details)

    # A handler of streams fits every method. It refuses the call before a request is read, which might never arrive.
    return grpc.stream_stream_rpc_method_handler(abort)


class _Health(health.HealthServicer):  # type: ignore[misc]
    """The health service with separate threads, so that health checks without a token cannot block other calls."""

    def Check(self, request: Any, context: Any) -> Any:
        """See health.proto."""
        return super().Check(request, context)

    # grpcio 1.85.1 reads the thread pool of a method from this attribute.
    Check.experimental_thread_pool = ThreadPoolExecutor(2, "recstore-health")  # type: ignore[attr-defined]


@dataclass(frozen=True)
class ServerOptions:
    """The options of a server.

    Args:
        listen: The address to listen on, as ``host:port``. Port 0 chooses a free port.
        data: The path of the directory for checkpoints.
        limits: The bounds of all tables, which apply where a client sets none.
        tls_cert: The path of a PEM file with the server's certificate.
        tls_key: The path of a PEM file with the private key of ``tls_cert``.
        client_ca: The path of a PEM file with CA certificates. Clients then need a certificate that one of them signs.
        token: The token that clients must send.
        metrics: The address for Prometheus, as ``host:port``.
        idle_s: The time in seconds without a call after which the private cold rows of a job are deleted. A job that
            was killed leaves such rows. Default: infinity.

    Raises:
        ValueError: A value is invalid, or options contradict each other.
    """

    listen: str
    data: Path
    limits: Limits = Limits()  # noqa: RUF009  (frozen)
    tls_cert: Path | None = None
    tls_key: Path | None = None
    client_ca: Path | None = None
    token: str | None = None
    metrics: str | None = None
    idle_s: float = math.inf

    def __post_init__(self) -> None:
        if not self.idle_s > 0:
            raise ValueError(f"--drop-idle-after must be a positive number of hours, got {self.idle_s / 3600:g}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key must be given together")
        if self.client_ca is not None and self.tls_cert is None:
            raise ValueError("--client-ca needs --tls-cert and --tls-key")
        check_listen(self.listen, tls=self.tls_cert is not None, token=self.token is not None)
        if self.metrics is not None:
            host_of_flag("--metrics", self.metrics)


def serve(options: ServerOptions, ready: Callable[[str], object]) -> None:
    """Runs a server until SIGTERM or SIGINT. The server then finishes the running calls and saves all tables.

    This function must be called from the main thread.

    Args:
        options: The options of the server.
        ready: A function that is called with the address when the server takes calls.

    Raises:
        OSError: The address cannot be listened on, the data directory cannot be used, or the last save failed.
        CheckpointError, ValueError: The last checkpoint cannot be loaded.
    """
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()

    directory = DataDirectory(options.data)
    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        _serve(options, directory, ready, stop)
    finally:
        directory.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def _serve(
    options: ServerOptions, directory: DataDirectory, ready: Callable[[str], object], stop: threading.Event
) -> None:
    tables = HostedBackend(options.limits)
    metrics = None
    if options.metrics is not None:
        host, _, metrics_port = options.metrics.rpartition(":")
        try:
            metrics = Metrics(tables, host, int(metrics_port))
        except OSError as error:
            raise OSError(f"--metrics {options.metrics}: {error.strerror}") from error
    service = ParameterServer(tables, directory, metrics or NoObserver())
    server = grpc.server(
        ThreadPoolExecutor(_CALLS, "recstore-call"), interceptors=[Guard(options.token)], options=_OPTIONS
    )
    add_ParameterServerServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    own = pb.DESCRIPTOR.services_by_name["ParameterServer"].full_name
    healthy = _Health()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    reflection.enable_server_reflection((own, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    port = _bind(server, options)
    service.begin()
    server.start()
    for name in ("", own):
        healthy.set(name, health_pb2.HealthCheckResponse.SERVING)
    ready(f"{options.listen.rpartition(':')[0]}:{port}")
    while not stop.wait(min(_IDLE_CHECK_S, options.idle_s)):
        for name in tables.drop_idle(options.idle_s):
            _log.warning("table %r was not used for %g hours: dropped", name, options.idle_s / 3600)
    healthy.enter_graceful_shutdown()
    server.stop(GRACE_S).wait()
    service.stop()
    if metrics is not None:
        metrics.close()


def _bind(server: grpc.Server, options: ServerOptions) -> int:
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
