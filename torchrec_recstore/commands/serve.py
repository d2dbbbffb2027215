"""The command ``recstore serve``."""

from __future__ import annotations

import json
import math
import os
import ssl
import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from torchrec_recstore.commands.output import errors_in_one_line

ACCESS, BOUNDS = "Access", "Limits of each table"


def serve(
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address to listen on. Port 0 chooses a free port.")],
    data: Annotated[
        Path, typer.Option(metavar="DIR", help="Directory of checkpoints. The last one is loaded at start.")
    ],
    tls_cert: Annotated[
        Path | None,
        typer.Option(metavar="PEM", help="File with the certificate of the server.", rich_help_panel=ACCESS),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option(metavar="PEM", help="File with the private key of --tls-cert.", rich_help_panel=ACCESS),
    ] = None,
    client_ca: Annotated[
        Path | None,
        typer.Option(
            metavar="PEM",
            help="File with CA certificates. Clients then need a certificate that is signed by one of them.",
            rich_help_panel=ACCESS,
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with the token that clients must send.", rich_help_panel=ACCESS),
    ] = None,
    metrics: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Address for Prometheus metrics.")] = None,
    max_rows: Annotated[
        int | None,
        typer.Option(help="Maximum number of rows of each table in this server's memory.", rich_help_panel=BOUNDS),
    ] = None,
    eviction: Annotated[
        Literal["lru", "lfu"] | None,
        typer.Option(help="Rows to evict when a table is full. Needs --max-rows.", rich_help_panel=BOUNDS),
    ] = None,
    half_life_steps: Annotated[
        int | None, typer.Option(help="Half-life of the frequencies of lfu, in updates.", rich_help_panel=BOUNDS)
    ] = None,
    expire_steps: Annotated[
        int | None, typer.Option(help="Delete rows that were not updated for this many steps.", rich_help_panel=BOUNDS)
    ] = None,
    min_frequency: Annotated[
        int | None, typer.Option(help="Number of updates with an id before it gets a row.", rich_help_panel=BOUNDS)
    ] = None,
    cold_store: Annotated[
        str | None,
        typer.Option(
            help="Cold store for evicted rows: the URL of a Redis server or a path for RocksDB.",
            rich_help_panel=BOUNDS,
        ),
    ] = None,
    drop_idle_after: Annotated[
        float | None,
        typer.Option(
            metavar="HOURS",
            help="Delete the private cold rows of a job that no call has used for this time.",
            rich_help_panel=BOUNDS,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON with the address at the start, and another at the end.")
    ] = False,
) -> None:
    """Serve tables to RecStoreClient over gRPC until SIGTERM or Ctrl-C, and then save the tables.

    An address that other machines can reach requires TLS and a token.

    Example: recstore serve --listen 127.0.0.1:7700 --data tables

    Exit status: 0 after SIGTERM or Ctrl-C, or 2 with one line on stderr if the server cannot serve or save.
    """
    # Each thread that serves calls has its own team of OpenMP threads, which would spin while they wait. OpenMP reads
    # the variable when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with errors_in_one_line():
        try:
            from torchrec_recstore.service.serve import ServerOptions
            from torchrec_recstore.service.serve import serve as run
        except ModuleNotFoundError as error:
            raise ValueError(f"{error.name} is missing: pip install 'torchrec-recstore[service]'") from None
        from torchrec_recstore.network import check_token
        from torchrec_recstore.options import options_of_flags
        from torchrec_recstore.service.hosted import limits_of

        token = None if token_file is None else token_file.read_text().strip()
        check_token(token, f"--token-file {token_file}: the token")
        bounds = options_of_flags(
            max_rows=max_rows,
            eviction=eviction,
            half_life_steps=half_life_steps,
            expire_steps=expire_steps,
            min_frequency=min_frequency,
            cold_store=cold_store,
        )
        options = ServerOptions(
            listen=listen,
            data=data,
            limits=limits_of(bounds),
            tls_cert=tls_cert,
            tls_key=tls_key,
            client_ca=client_ca,
            token=token,
            metrics=metrics,
            idle_s=math.inf if drop_idle_after is None else 3600 * drop_idle_after,
        )
        _check_pem(tls_cert, tls_key, client_ca)
        begin = time.monotonic()
        addresses: list[str] = []

        def ready(address: str) -> None:
            addresses.append(address)
            said = json.dumps({"event": "serving", "address": address, "pid": os.getpid()})
            print(said if as_json else f"serving on {address}", flush=True)

        run(options, ready)
        if as_json:
            seconds = round(time.monotonic() - begin, 3)
            print(json.dumps({"event": "stopped", "address": addresses[0], "seconds": seconds}), flush=True)


def _check_pem(cert: Path | None, key: Path | None, client_ca: Path | None) -> None:
    """Checks the PEM files, because gRPC reports an invalid file as an address that cannot be listened on.

    Raises:
        OSError, ValueError: A file cannot be read, or does not hold a certificate or key. The message names the flag.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for path in (cert, key, client_ca):
        if path is not None:
            path.read_bytes()  # the error of ssl does not name the file
    try:
        if cert is not None:
            context.load_cert_chain(cert, key, password="")  # gRPC takes no encrypted key; no prompt
    except ssl.SSLError:
        raise ValueError(
            f"--tls-cert {cert} and --tls-key {key} are not a certificate and its private key in PEM format"
        ) from None
    try:
        if client_ca is not None:
            context.load_verify_locations(client_ca)
    except ssl.SSLError:
        raise ValueError(f"--client-ca {client_ca} holds no certificates in PEM format") from None
