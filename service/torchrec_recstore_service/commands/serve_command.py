"""The command ``recstore serve``.

Tests: tests/service/test_server.py.
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from torchrec_recstore.commands.config_file import ConfigFile
from torchrec_recstore.commands.output import errors_in_one_line
from torchrec_recstore.commands.scripts import missing_in_one_line
from torchrec_recstore_service.commands.access_flags import (
    LIMITS,
    ClientCa,
    Listen,
    MaxCalls,
    MaxConnections,
    MaxRequestMemory,
    MetricsAddress,
    TlsCert,
    TlsKey,
    TokenFile,
    listen_options,
)

BOUNDS = "Limits of each table"
SAVES = "Saves on a schedule"
PAIRS = "Replication"


def serve(
    listen: Listen,
    data: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="Directory of checkpoints. The last one is loaded at start.",
        ),
    ],
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    client_ca: ClientCa = None,
    token_file: TokenFile = None,
    metrics: MetricsAddress = None,
    max_calls: MaxCalls = 32,
    max_connections: MaxConnections = 1024,
    max_request_memory: MaxRequestMemory = 4.0,
    rows_port: Annotated[
        int,
        typer.Option(
            help=(
                "Port for rows by TCP, on the host of --listen. Port 0 chooses a free"
                " port."
            )
        ),
    ] = 0,
    advertise_rows: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT",
            help=(
                "Where clients reach --rows-port, if a mapping of ports gives it"
                " another number."
            ),
        ),
    ] = None,
    max_write: Annotated[
        int,
        typer.Option(
            metavar="MIB",
            help=(
                "Maximum size of a write, in MiB. Other calls on the table wait while"
                " it is carried out."
            ),
            rich_help_panel=LIMITS,
        ),
    ] = 128,
    max_tables: Annotated[
        int, typer.Option(help="Maximum number of tables.", rich_help_panel=LIMITS)
    ] = 1024,
    max_counter_memory: Annotated[
        float,
        typer.Option(
            metavar="GIB",
            help=(
                "Maximum memory in which all tables together count how often ids were"
                " seen, in GiB."
            ),
            rich_help_panel=LIMITS,
        ),
    ] = 8.0,
    max_rows: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of rows of each table in this server's memory.",
            rich_help_panel=BOUNDS,
        ),
    ] = None,
    eviction: Annotated[
        Literal["lru", "lfu"] | None,
        typer.Option(
            help="Rows to evict when a table is full. Needs --max-rows.",
            rich_help_panel=BOUNDS,
        ),
    ] = None,
    half_life_steps: Annotated[
        int | None,
        typer.Option(
            help="Half-life of the frequencies of lfu, in updates.",
            rich_help_panel=BOUNDS,
        ),
    ] = None,
    expire_steps: Annotated[
        int | None,
        typer.Option(
            help="Delete rows that were not updated for this many steps.",
            rich_help_panel=BOUNDS,
        ),
    ] = None,
    expire_seconds: Annotated[
        float | None,
        typer.Option(
            help="Delete rows that were not updated for this many seconds.",
            rich_help_panel=BOUNDS,
        ),
    ] = None,
    min_frequency: Annotated[
        int | None,
        typer.Option(
            help="Number of updates with an id before it gets a row.",
            rich_help_panel=BOUNDS,
        ),
    ] = None,
    cold_store: Annotated[
        str | None,
        typer.Option(
            help=(
                "Cold store for evicted rows: a folder on an SSD, rocksdb://FOLDER, or"
                " redis://..."
            ),
            rich_help_panel=BOUNDS,
        ),
    ] = None,
    drop_idle_after: Annotated[
        float | None,
        typer.Option(
            metavar="HOURS",
            help=(
                "Delete the private cold rows of a job that no call has used for this"
                " time."
            ),
            rich_help_panel=BOUNDS,
        ),
    ] = None,
    save_every: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help=(
                "Save all servers of the set after each time of this length. The first"
                " server of the set does it."
            ),
            rich_help_panel=SAVES,
        ),
    ] = None,
    keep: Annotated[
        int,
        typer.Option(
            help="Number of saves by --save-every that are kept.", rich_help_panel=SAVES
        ),
    ] = 3,
    servers: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT,...",
            help=(
                "Addresses of all servers of the set, for --save-every. Default: this"
                " server alone."
            ),
            rich_help_panel=SAVES,
        ),
    ] = None,
    tls_ca: Annotated[
        str | None,
        typer.Option(
            metavar="PEM",
            help=(
                "File with the CA certificates of the servers, for --save-every and"
                " --replicate."
            ),
            rich_help_panel=SAVES,
        ),
    ] = None,
    replicate: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=(
                "Keep all rows on a second server, which has the same NAME: each write"
                " is on both."
            ),
            rich_help_panel=PAIRS,
        ),
    ] = None,
    lease: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help=(
                "Redis server that says which of the two answers, such as"
                " redis://host:6379/0."
            ),
            rich_help_panel=PAIRS,
        ),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Address of this server for the other one. Default: that of --listen.",
            rich_help_panel=PAIRS,
        ),
    ] = None,
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over",
            help=(
                "Begin with the last save of this server, because the server with newer"
                " rows is lost for good."
            ),
            rich_help_panel=PAIRS,
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help=(
                "Print a line of JSON with the address at the start, and another at the"
                " end."
            ),
        ),
    ] = False,
    config: ConfigFile = None,
) -> None:
    """Serve tables to RecStoreClient over gRPC until SIGTERM or Ctrl-C, and then save
    the tables.

    An address that other machines can reach requires TLS and a token.

    Example: recstore serve --listen 127.0.0.1:7700 --data tables

    A server that cannot save serves on, and says on stderr what to free.

    Exit status: 0 after SIGTERM or Ctrl-C, or 2 with one line on stderr if the server
    cannot serve.
    """
    # Each thread that serves calls has its own team of OpenMP threads, which would spin
    # while they wait. OpenMP reads the variable when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with errors_in_one_line(), missing_in_one_line():
        from torchrec_recstore.option_flags import options_of_flags
        from torchrec_recstore_service.commands.scheduled_saves import Schedule
        from torchrec_recstore_service.commands.server_process import ServerOptions
        from torchrec_recstore_service.commands.server_process import serve as run
        from torchrec_recstore_service.server.pair import PairOptions
        from torchrec_recstore_service.tables.limits import limits_of

        listening = listen_options(
            listen,
            tls_cert=tls_cert,
            tls_key=tls_key,
            client_ca=client_ca,
            token_file=token_file,
            metrics=metrics,
            max_calls=max_calls,
            max_connections=max_connections,
            max_request_memory=max_request_memory,
        )
        listening = replace(
            listening,
            rows_port=rows_port,
            advertise_rows=advertise_rows,
        )
        bounds = options_of_flags(
            max_rows=max_rows,
            eviction=eviction,
            half_life_steps=half_life_steps,
            expire_steps=expire_steps,
            expire_seconds=expire_seconds,
            min_frequency=min_frequency,
            cold_store=cold_store,
        )
        limits = replace(
            limits_of(bounds),
            max_tables=max_tables,
            max_counter_bytes=int(max_counter_memory * 2**30),
        )
        idle_s = math.inf if drop_idle_after is None else 3600 * drop_idle_after
        if save_every is None and servers is not None:
            raise ValueError("--servers needs --save-every")
        if save_every is None and replicate is None and tls_ca is not None:
            raise ValueError("--tls-ca needs --save-every or --replicate")
        pair = None
        some_of_pair = (
            replicate is not None
            or lease is not None
            or advertise is not None
            or take_over
        )
        if replicate is not None and lease is not None:
            pair = PairOptions(
                name=replicate,
                lease=lease,
                address=advertise or listen,
                tls_ca=tls_ca,
                take_over=take_over,
            )
        elif some_of_pair:
            raise ValueError(
                "--replicate and --lease must be given together, and --advertise and"
                " --take-over need them"
            )
        schedule = None
        if save_every is not None:
            addresses_of_set = [] if servers is None else servers.split(",")
            schedule = Schedule(
                save_every,
                keep=keep,
                servers=addresses_of_set,
                tls_ca=tls_ca,
            )
        options = ServerOptions(
            listening,
            data,
            limits=limits,
            idle_s=idle_s,
            schedule=schedule,
            max_write_bytes=max_write * 2**20,
            pair=pair,
        )
        begin = time.monotonic()
        addresses: list[str] = []

        def ready(address: str) -> None:
            addresses.append(address)
            line = f"serving on {address}"
            if as_json:
                event = {"event": "serving", "address": address, "pid": os.getpid()}
                line = json.dumps(event)
            print(line, flush=True)

        run(options, ready)
        if as_json:
            seconds = round(time.monotonic() - begin, 3)
            event = {"event": "stopped", "address": addresses[0], "seconds": seconds}
            print(json.dumps(event), flush=True)
