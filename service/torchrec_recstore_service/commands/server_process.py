"""Runs a parameter server: loads the last checkpoint, serves, saves and stops.

Tests: tests/service/test_faults.py.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrec_recstore_service.commands.scheduled_saves import Schedule, ScheduledSaves
from torchrec_recstore_service.server.data_directory import DataDirectory
from torchrec_recstore_service.server.listening import (
    GrpcServer,
    ListenOptions,
    StopSignals,
    host_and_port,
    stopped_by_signals,
)
from torchrec_recstore_service.server.metrics import Metrics
from torchrec_recstore_service.server.native import CallCounts
from torchrec_recstore_service.server.pair import PairOptions
from torchrec_recstore_service.server.server import ParameterServer
from torchrec_recstore_service.tables.hosted import HostedTables
from torchrec_recstore_service.tables.limits import Limits
from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire.protocol import WRITE_BYTES
from torchrec_recstore_service.wire.recstore_pb2_grpc import (
    add_ParameterServerServicer_to_server,
)

_IDLE_CHECK_S = 60.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerOptions:
    """The options of a server.

    Args:
        listening: The address, and who may call the server.
        data: The path of the directory for checkpoints.
        limits: The bounds of all tables, which apply where a client sets none.
        idle_s: The time in seconds without a call after which the private cold rows of
            a job are deleted. A job that was killed leaves such rows. Default:
            infinity.
        schedule: When all tables are saved. Default: None, when a client says so, and
            when the server stops.
        max_write_bytes: The largest size in bytes of the arrays of a write. Default:
            128 MiB.
        pair: How the server is replicated. Default: None, it is not.

    Raises:
        ValueError: A value is invalid, or options contradict each other.
    """

    listening: ListenOptions
    data: Path
    limits: Limits = Limits()  # noqa: RUF009  (frozen)
    idle_s: float = math.inf
    schedule: Schedule | None = None
    max_write_bytes: int = WRITE_BYTES
    pair: PairOptions | None = None

    def __post_init__(self) -> None:
        if self.max_write_bytes < 2**20:
            raise ValueError(
                "--max-write must be at least 1 MiB, got"
                f" {self.max_write_bytes / 2**20:g}"
            )
        if self.schedule is not None:
            self.schedule.check_fits(self.listening)
        if self.pair is not None:
            self.pair.check_fits(self.listening)
            if self.limits.cold_store is not None:
                raise ValueError(
                    "--replicate and --cold-store exclude each other: a backup has all"
                    " rows in memory"
                )
        if not self.idle_s > 0:
            raise ValueError(
                "--drop-idle-after must be a positive number of hours, got"
                f" {self.idle_s / 3600:g}"
            )


def serve(options: ServerOptions, ready: Callable[[str], object]) -> None:
    """Runs a server until SIGTERM or SIGINT.

    The server then finishes the running calls and saves all tables.

    A server that cannot save its tables serves on, and says why on stderr. The next
    signal makes it try again.

    This function must be called from the main thread.

    Args:
        options: The options of the server.
        ready: A function that is called with the address when the server takes calls.

    Raises:
        OSError: The address cannot be listened on, or the data directory cannot be
            used.
        CheckpointError, ValueError: The last checkpoint cannot be loaded.
    """
    directory = DataDirectory(options.data)
    try:
        with stopped_by_signals() as stop:
            _serve(options, directory, ready, stop)
    finally:
        directory.close()


def _unsaved(
    error: Exception,
    tables: HostedTables,
    data: Path,
) -> str:
    """Returns the message for a server that was to stop, and could not save its tables."""
    mib = tables.used_bytes() / 2**20
    free = shutil.disk_usage(data).free / 2**20
    return (
        f"the server does not stop, because it cannot save its tables: {error}. It"
        f" serves on. Make room in {data}: {free:.0f} MiB are free there, and the"
        f" tables have {mib:.0f} MiB in memory. Checkpoints that are not needed can be"
        " deleted. Then send SIGTERM again. SIGKILL ends the server without the rows"
        " since the last save"
    )


def _serve_until_saved(
    options: ServerOptions,
    tables: HostedTables,
    service: ParameterServer,
    server: GrpcServer,
    stop: StopSignals,
) -> None:
    """Serves until a signal arrives and the tables could be saved."""
    while True:
        while not stop.wait(min(_IDLE_CHECK_S, options.idle_s)):
            for name in tables.drop_idle(options.idle_s):
                hours = options.idle_s / 3600
                _log.warning("table %r was not used for %g hours: dropped", name, hours)
        server.set_serving(False)
        try:
            service.save_to_stop()
            return
        except Exception as error:
            _log.error("%s", _unsaved(error, tables, options.data))
        server.set_serving(True)


def _metrics(
    address: str | None,
    tables: HostedTables,
    counts: CallCounts,
) -> Metrics | None:
    """Begins to listen on the address of --metrics, if there is one."""
    if address is None:
        return None
    host, port = host_and_port(address)
    try:
        return Metrics(tables, counts, host, port)
    except OSError as error:
        raise OSError(f"--metrics {address}: {error.strerror}") from error


def _serve(
    options: ServerOptions,
    directory: DataDirectory,
    ready: Callable[[str], object],
    stop: StopSignals,
) -> None:
    tables = HostedTables(options.limits)
    counts = CallCounts()
    metrics = _metrics(options.listening.metrics, tables, counts)
    service = ParameterServer(
        tables,
        directory,
        observer=counts,
        max_write_bytes=options.max_write_bytes,
    )

    def add(server: Any) -> None:
        add_ParameterServerServicer_to_server(service, server)  # type: ignore[no-untyped-call]

    server = GrpcServer(
        options.listening,
        service=pb.DESCRIPTOR.services_by_name["ParameterServer"].full_name,
        add=add,
        long=("Save", "Load", "Look", "Replicate"),
    )
    if metrics is not None:
        metrics.gauges({**server.gauges(), **service.gauges()})
    service.begin(options.listening, server, options.pair)
    server.start()
    service.start(server.set_serving)
    ready(server.address)
    schedule = None
    if options.schedule is not None:
        schedule = ScheduledSaves(
            options.schedule,
            options.listening,
            address=server.address,
            is_first=service.is_first,
        )
        schedule.start()
    _serve_until_saved(options, tables, service, server, stop)
    if schedule is not None:
        schedule.stop()
    server.stop()
    service.close()
    if metrics is not None:
        metrics.close()
