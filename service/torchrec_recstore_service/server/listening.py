"""The addresses of servers, and who may call them: TLS, tokens, health checks.

Tests: tests/service/test_access.py and tests/service/tables/test_limits.py.
"""

from __future__ import annotations

import hmac
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from torchrec_recstore.network import host_of, is_loopback
from torchrec_recstore_service.server.calls import CallThreads, RequestMemory
from torchrec_recstore_service.server.credentials import (
    Certificates,
    Watched,
    watched_certificates,
    watched_token,
)
from torchrec_recstore_service.server.handlers import Handlers
from torchrec_recstore_service.wire.protocol import (
    FRAME_BYTES,
    MESSAGE_BYTES,
    TOKEN_KEY,
    VERSION,
    VERSION_KEY,
    token_value,
)

GRACE_S = 30.0
_REPLY_S = 1.0
_OPEN_CALLS = 4  # threads of calls that need no token, and of refusals
_OPEN_QUEUE = 256  # calls that need no token, and refusals, that wait for a thread
_LONG_CALLS = 16
_WATCHES = 16  # clients that watch the health; a further one ends the first one
_WATCHES_OF_ONE = 4  # of a connection
_STREAMS = 128  # calls of a connection; further ones wait in the client
_OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.http2.max_frame_size", FRAME_BYTES),
    # otherwise a second server on the same port would receive a part of the calls
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_concurrent_streams", _STREAMS),
    # calls of which Python does not know yet
    ("grpc.server.max_pending_requests", 500),
    ("grpc.server.max_pending_requests_hard_limit", 1000),
    # a connection whose client is stopped or gone is closed
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # its default of 60 s would rule over the timeout above
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.server_handshake_timeout_ms", 10_000),
    # none: a message of 64 KiB could take 64 MiB
    ("grpc.compression_enabled_algorithms_bitset", 1),
]
_HEALTH = "/grpc.health.v1.Health/"
_WATCH = f"{_HEALTH}Watch"
_OWN = "/torchrec_recstore."


@dataclass(frozen=True)
class ListenOptions:
    """The address of a server, and who may call it.

    Args:
        listen: The address to listen on, as ``host:port``. Port 0 chooses a free port.
        tls_cert: The path of a PEM file with the server's certificate.
        tls_key: The path of a PEM file with the private key of ``tls_cert``.
        client_ca: The path of a PEM file with CA certificates. Clients then need a
            certificate that one of them signs.
        token_file: The path of a file with the token that clients must send.
        metrics: The address for Prometheus, as ``host:port``.
        max_calls: The largest number of calls that run at the same time. Default: 32.
        max_connections: The largest number of connections. Default: 1024.
        max_request_memory: The largest size in bytes of the requests of all running
            calls together. Default: 4 GiB.
        rows_port: The port for calls on rows by TCP, on the host of ``listen``.
            Default: 0, a free port.
        advertise_rows: Where clients reach ``rows_port`` if a mapping of ports changes
            its number: ``port``, on the host by which a client reaches the server, or
            ``host:port``. Default: None, the number is the same.

    Raises:
        ValueError: A value is invalid, or options contradict each other.
    """

    listen: str
    tls_cert: Path | None = None
    tls_key: Path | None = None
    client_ca: Path | None = None
    token_file: Path | None = None
    metrics: str | None = None
    max_calls: int = 32
    max_connections: int = 1024
    max_request_memory: int = 1 << 32
    rows_port: int = 0
    advertise_rows: str | None = None

    def __post_init__(self) -> None:
        for flag, number in (
            ("--max-calls", self.max_calls),
            ("--max-connections", self.max_connections),
        ):
            if number < 1:
                raise ValueError(f"{flag} must be at least 1, got {number}")
        if not 0 <= self.rows_port < 1 << 16:
            raise ValueError(
                f"--rows-port must be from 0 to 65535, got {self.rows_port}"
            )
        if self.advertise_rows is not None:
            check_advertised_rows(self.advertise_rows)
            if not self.rows_port:
                raise ValueError(
                    "--advertise-rows needs --rows-port: a free port is another one at"
                    " each start"
                )
        if self.max_request_memory < MESSAGE_BYTES:
            least = MESSAGE_BYTES / 2**30
            raise ValueError(
                f"--max-request-memory must be at least {least:.3f} GiB, the size of"
                " one message"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key must be given together")
        if self.client_ca is not None and self.tls_cert is None:
            raise ValueError("--client-ca needs --tls-cert and --tls-key")
        self.check_address("--listen", self.listen)
        if self.metrics is not None:
            host_of_flag("--metrics", self.metrics)

    def check_address(self, flag: str, address: str) -> None:
        """Checks that a server may listen on an address: one that other machines reach
        needs TLS and a token.

        Raises:
            ValueError: TLS or the token is missing, or ``address`` is not
                ``host:port``. The message names the flag.
        """
        if is_loopback(host_of_flag(flag, address)):
            return
        missing = []
        if self.tls_cert is None:
            missing.append("--tls-cert and --tls-key")
        if self.token_file is None:
            missing.append("--token-file")
        if missing:
            raise ValueError(
                f"{flag} {address} can be reached from other machines: that needs"
                f" {' and '.join(missing)}"
            )


def allowed(header: str | bytes, token: Watched[str] | None) -> bool:
    """Returns whether the header ``TOKEN_KEY`` of a call has the token that the server
    requires, if it requires one.
    """
    if token is None:
        return True
    if isinstance(header, str):
        header = header.encode()
    return hmac.compare_digest(header, token_value(token.value).encode())


class Guard(grpc.ServerInterceptor):  # type: ignore[misc]
    """An interceptor that refuses calls without the token, and clients with another
    version of the protocol.

    Health checks need no token.

    Args:
        token: The token.
        threads: The threads that send refusals.
    """

    def __init__(self, token: Watched[str] | None, threads: CallThreads) -> None:
        self._token = token
        self._threads = threads

    def intercept_service(
        self,
        continuation: Callable[[Any], Any],
        details: Any,
    ) -> Any:
        """See grpc.ServerInterceptor."""
        metadata = dict(details.invocation_metadata)
        needs_token = not details.method.startswith(_HEALTH)
        if needs_token and not allowed(metadata.get(TOKEN_KEY, ""), self._token):
            return self._refusal(
                grpc.StatusCode.UNAUTHENTICATED,
                "the token is missing or wrong",
            )
        version = metadata.get(VERSION_KEY)
        if details.method.startswith(_OWN) and version != VERSION:
            return self._refusal(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the client speaks version {version} of the protocol, the server"
                f" version {VERSION}",
            )
        return continuation(details)

    def _refusal(self, code: grpc.StatusCode, details: str) -> Any:
        def abort(requests: Any, context: Any) -> None:
            context.abort(code, details)

        abort.experimental_thread_pool = self._threads  # type: ignore[attr-defined]
        # A handler of streams fits every method. It refuses a call before it reads a
        # request, which may never arrive.
        return grpc.stream_stream_rpc_method_handler(abort)


def host_of_flag(flag: str, address: str) -> str:
    """Returns the host of a flag's ``host:port``. The port may be 0.

    Raises:
        ValueError: ``address`` is not ``host:port``. The message names the flag.
    """
    try:
        return host_of(address, least_port=0)
    except ValueError as error:
        raise ValueError(f"{flag} {error}") from None


def check_advertised_rows(text: str) -> None:
    """Checks the value of ``--advertise-rows``: ``port`` or ``host:port``.

    Raises:
        ValueError: It is neither, or clients cannot call the address. The message names
            the flag.
    """
    address = text if ":" in text else f"host:{text}"
    try:
        host = host_of(address)
    except ValueError:
        raise ValueError(
            f"--advertise-rows must be PORT or HOST:PORT, got {text!r}"
        ) from None
    if host.strip("[]") in ("0.0.0.0", "::"):
        raise ValueError(
            f"--advertise-rows {text} is not an address that clients can call"
        )


def host_and_port(address: str) -> tuple[str, int]:
    """Returns the two parts of ``host:port``, without the brackets of an IPv6 address.

    Raises:
        ValueError: ``address`` is not ``host:port``. The port may be 0.
    """
    host = host_of(address, least_port=0)
    return host.strip("[]"), int(address.rpartition(":")[2])


class StopSignals:
    """Waits for SIGTERM and SIGINT in the main thread.

    A handler that sets an event is not enough. If a signal arrives just before the main
    thread waits for the lock of the event, the wait does not end, and the handler runs
    only after its timeout. The interpreter therefore writes the number of each signal
    to a socket, for which the main thread waits.

    Args:
        arrived: The end of the socket from which the numbers of the signals are read.
    """

    def __init__(self, arrived: socket.socket) -> None:
        self._arrived = arrived

    def wait(self, timeout_s: float) -> bool:
        """Waits until a signal arrives, or for ``timeout_s`` seconds.

        Returns:
            Whether SIGTERM or SIGINT has arrived since the last call. Other signals
            with a handler end the wait, too.
        """
        self._arrived.settimeout(timeout_s)
        with suppress(TimeoutError):
            numbers = self._arrived.recv(512)
            return signal.SIGTERM in numbers or signal.SIGINT in numbers
        return False


@contextmanager
def stopped_by_signals() -> Iterator[StopSignals]:
    """Returns a context in which SIGTERM and SIGINT do not end the process, but
    :meth:`StopSignals.wait`.

    It must be used in the main thread.
    """
    arrived, written = socket.socketpair()
    written.setblocking(False)
    with arrived, written:
        descriptor = signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
        # Without a handler, the signals would end the process.
        handlers = {
            number: signal.signal(number, lambda number, frame: None)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            yield StopSignals(arrived)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(descriptor)


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The health service.

    Unlike grpcio-health-checking's, it keeps nothing for a client that watches but a
    thread.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.statuses: dict[str, int] = {}
        """The status of each service."""

    def set(self, service: str, status: int) -> None:
        """Sets the status of a service."""
        with self._changed:
            self.statuses[service] = status
            self._changed.notify_all()

    def Check(self, request: Any, context: Any) -> Any:
        """See health.proto."""
        status = self.statuses.get(request.service)
        if status is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "the server has no such service")
        return health_pb2.HealthCheckResponse(status=status)

    def Watch(self, request: Any, context: Any) -> Iterator[Any]:
        """See health.proto."""
        context.add_callback(self._wake)
        sent = None
        while True:
            with self._changed:
                status = self._status(request.service)
                while context.is_active() and status == sent:
                    self._changed.wait()
                    status = self._status(request.service)
            if not context.is_active():
                return
            yield health_pb2.HealthCheckResponse(status=status)
            sent = status

    def _status(self, service: str) -> int:
        unknown: int = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        return self.statuses.get(service, unknown)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


class _Threads:
    """The threads of a server.

    Calls that need no token have threads of their own, so that they cannot block the
    others.
    """

    def __init__(self, max_calls: int) -> None:
        self.calls = CallThreads(max_calls, "recstore-call")
        self.long_calls = CallThreads(_LONG_CALLS, "recstore-long")
        self.open_calls = CallThreads(
            _OPEN_CALLS,
            "recstore-health",
            queued=_OPEN_QUEUE,
        )
        self.watches = CallThreads(
            _WATCHES,
            "recstore-watch",
            queued=_WATCHES,
            of_one=_WATCHES_OF_ONE,
        )

    def __iter__(self) -> Iterator[CallThreads]:
        yield self.calls
        yield self.open_calls
        yield self.watches
        yield self.long_calls

    def by_method(self, service: str, long: Sequence[str]) -> dict[str, CallThreads]:
        """Returns the threads of each method; "" is for all other methods.

        ``long`` are the names of the methods of the service that may take minutes.
        """
        threads = {
            "": self.calls,
            f"{_HEALTH}Check": self.open_calls,
            _WATCH: self.watches,
        }
        for method in long:
            threads[f"/{service}/{method}"] = self.long_calls
        return threads


class GrpcServer:
    """A gRPC server with health checks and reflection.

    Calls run in threads. See :class:`CallThreads`.

    Args:
        options: The address, who may call the server, and how much at a time.
        service: The full name of the service in the protocol.
        add: A function that adds the service to the server.
        long: The names of the methods whose calls may take minutes. They have threads
            of their own. Default: none.

    Raises:
        OSError: The address cannot be listened on, or a file cannot be read.
        ValueError: The token or the certificates cannot be used.
    """

    def __init__(
        self,
        options: ListenOptions,
        service: str,
        add: Callable[[Any], object],
        long: Sequence[str] = (),
    ) -> None:
        self.token = None
        """The token that clients must send. None: they need none."""
        if options.token_file is not None:
            self.token = watched_token(options.token_file)
        self._threads = _Threads(options.max_calls)
        self.memory = RequestMemory(options.max_request_memory)
        """The memory of the requests of all running calls."""
        max_connections = (
            "grpc.max_allowed_incoming_connections",
            options.max_connections,
        )
        self._server = grpc.server(
            self._threads.calls,
            interceptors=[Guard(self.token, self._threads.open_calls)],
            options=[*_OPTIONS, max_connections],
        )
        self._health = Health()
        self._names = ("", service)
        handlers = Handlers(
            self._server,
            threads=self._threads.by_method(service, long),
            memory=self.memory,
            idle=frozenset([_WATCH]),
        )
        add(handlers)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, handlers)
        services = (service, _HEALTH.strip("/"), reflection.SERVICE_NAME)
        reflection.enable_server_reflection(services, handlers)
        self.certificates = None
        """The certificates of the server. None: connections are not encrypted."""
        if options.tls_cert is not None and options.tls_key is not None:
            self.certificates = watched_certificates(
                options.tls_cert,
                options.tls_key,
                options.client_ca,
            )
        host = options.listen.rpartition(":")[0]
        port = _bind(self._server, options.listen, self.certificates)
        self.address = f"{host}:{port}"
        """The address, ``host:port``, with the chosen port."""

    def start(self) -> None:
        """Takes calls."""
        self._server.start()

    def end_late(self) -> None:
        """Ends the calls whose clients keep memory that other calls need."""
        for threads in self._threads:
            threads.end_late()

    def set_serving(self, serving: bool, *services: str) -> None:
        """Sets the answer to health checks of services.

        Default: of the server and its service.
        """
        statuses = health_pb2.HealthCheckResponse
        status = statuses.SERVING if serving else statuses.NOT_SERVING
        for name in services or self._names:
            self._health.set(name, status)

    def gauges(self) -> dict[str, tuple[str, Callable[[], float]]]:
        """Returns a description and a function of each number for the metrics."""
        calls = self._threads.calls
        watches = self._threads.watches
        port = int(self.address.rpartition(":")[2])
        connections = "The number of connections. Linux only."
        return {
            "connections": (connections, lambda: _established(port)),
            "calls_running": ("The number of calls that run.", lambda: calls.running),
            "calls_queued": (
                "The number of calls that wait for a thread.",
                lambda: calls.queued,
            ),
            "calls_ended": (
                "The number of calls that were ended because their client was slow.",
                lambda: calls.ended,
            ),
            "calls_refused": (
                (
                    "The number of calls that were cancelled because too many calls run"
                    " or wait."
                ),
                lambda: sum(threads.refused for threads in self._threads),
            ),
            "health_watches": (
                "The number of clients that watch the health.",
                lambda: watches.running,
            ),
            "request_bytes": (
                "The size of the requests of all running calls.",
                lambda: self.memory.held,
            ),
        }

    def stop(self) -> None:
        """Refuses new calls, and waits for the running ones, but not for clients that
        keep them waiting.
        """
        self.set_serving(False, *self._health.statuses)
        stopped = self._server.stop(GRACE_S)
        for threads in self._threads:
            threads.stop()
        end = time.monotonic() + GRACE_S
        while time.monotonic() < end and self._is_busy():
            stopped.wait(0.02)
        # Clients that answer have their replies and close their connections. gRPC would
        # wait for the others, too.
        if not stopped.wait(_REPLY_S):
            self._server.stop(None).wait()
        for threads in self._threads:
            threads.shutdown()

    def _is_busy(self) -> bool:
        return any(threads.is_busy for threads in self._threads)


def _established(port: int) -> int:
    """Returns the number of TCP connections to a port of this host. gRPC does not
    report the number.
    """
    count = 0
    for path in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with suppress(OSError), open(path) as file:
            next(file, None)  # the names of the columns
            for line in file:
                _, local, _, state, *_ = line.split()
                if state == "01" and int(local[-4:], 16) == port:
                    count += 1
    return count


def _bind(
    server: grpc.Server,
    listen: str,
    certificates: Watched[Certificates] | None,
) -> int:
    try:
        if certificates is None:
            return int(server.add_insecure_port(listen))
        return int(server.add_secure_port(listen, _credentials(certificates)))
    except RuntimeError as error:
        raise OSError(
            f"cannot listen on {listen}: the address is in use or invalid"
        ) from error


def _credentials(certificates: Watched[Certificates]) -> grpc.ServerCredentials:
    """Returns credentials that have the present certificates for each new connection."""
    current = certificates.value

    def configuration() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(current.key, current.cert)],
            current.client_ca,
        )

    def new_configuration() -> grpc.ServerCertificateConfiguration | None:
        nonlocal current
        if certificates.value is current:
            return None
        current = certificates.value
        return configuration()

    needs_client_certificate = current.client_ca is not None
    return grpc.dynamic_ssl_server_credentials(
        configuration(),
        new_configuration,
        needs_client_certificate,
    )
