"""Runs a parameter server: loads the last checkpoint, serves, saves and stops."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torchrec_recstore.rpc import recstore_pb2 as pb
from torchrec_recstore.rpc.recstore_pb2_grpc import add_ParameterServerServicer_to_server
from torchrec_recstore.service.data_directory import DataDirectory
from torchrec_recstore.service.hosted import HostedBackend, Limits
from torchrec_recstore.service.listening import GrpcServer, ListenOptions, host_and_port, stopped_by_signals
from torchrec_recstore.service.metrics import Metrics, NoObserver
from torchrec_recstore.service.server import ParameterServer

_IDLE_CHECK_S = 60.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerOptions:
    """The options of a server.

    Args:
        listening: The address, and who may call the server.
        data: The path of the directory for checkpoints.
        limits: The bounds of all tables, which apply where a client sets none.
        idle_s: The time in seconds without a call after which the private cold rows of a job are deleted. A job that
            was killed leaves such rows. Default: infinity.

    Raises:
        ValueError: A value is invalid, or options contradict each other.
    """

    listening: ListenOptions
    data: Path
    limits: Limits = Limits()  # noqa: RUF009  (frozen)
    idle_s: float = math.inf

    def __post_init__(self) -> None:
        if not self.idle_s > 0:
            raise ValueError(f"--drop-idle-after must be a positive number of hours, got {self.idle_s / 3600:g}")


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
    directory = DataDirectory(options.data)
    try:
        with stopped_by_signals() as stop:
            _serve(options, directory, ready, stop)
    finally:
        directory.close()


def _serve(
    options: ServerOptions, directory: DataDirectory, ready: Callable[[str], object], stop: threading.Event
) -> None:
    tables = HostedBackend(options.limits)
    metrics = None
    if options.listening.metrics is not None:
        host, port = host_and_port(options.listening.metrics)
        try:
            metrics = Metrics(tables, host, port)
        except OSError as error:
            raise OSError(f"--metrics {options.listening.metrics}: {error.strerror}") from error
    service = ParameterServer(tables, directory, metrics or NoObserver())
    server = GrpcServer(
        options.listening,
        pb.DESCRIPTOR.services_by_name["ParameterServer"].full_name,
        lambda server: add_ParameterServerServicer_to_server(service, server),  # type: ignore[no-untyped-call]
    )
    if metrics is not None:
        metrics.gauges({**server.gauges(), **service.gauges()})
    service.begin()
    server.start()
    server.set_serving(True)
    ready(server.address)
    while not stop.wait(min(_IDLE_CHECK_S, options.idle_s)):
        for name in tables.drop_idle(options.idle_s):
            _log.warning("table %r was not used for %g hours: dropped", name, options.idle_s / 3600)
    server.stop()
    service.stop()
    if metrics is not None:
        metrics.close()
