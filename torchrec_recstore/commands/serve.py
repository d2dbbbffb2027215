"""``recstore serve``."""

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

ACCESS, BOUNDS = "Access", "Bounds of every table"


def serve(
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address; port 0 takes a free one.")],
    data: Annotated[Path, typer.Option(metavar="DIR", help="Directory of checkpoints; the last is loaded at start.")],
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="PEM", help="Certificate of the server.", rich_help_panel=ACCESS)
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="PEM", help="Its key.", rich_help_panel=ACCESS)] = None,
    client_ca: Annotated[
        Path | None,
        typer.Option(
            metavar="PEM", help="Clients need a certificate that is signed by one of these.", rich_help_panel=ACCESS
        ),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The token that clients must show.", rich_help_panel=ACCESS)
    ] = None,
    metrics: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Metrics for Prometheus.")] = None,
    max_rows: Annotated[
        int | None, typer.Option(help="Rows of each table in this server's memory.", rich_help_panel=BOUNDS)
    ] = None,
    eviction: Annotated[
        Literal["lru", "lfu"] | None,
        typer.Option(help="Which rows leave when there are more; needs --max-rows.", rich_help_panel=BOUNDS),
    ] = None,
    half_life_steps: Annotated[
        int | None, typer.Option(help="Of LFU's frequencies, in updates.", rich_help_panel=BOUNDS)
    ] = None,
    expire_steps: Annotated[
        int | None, typer.Option(help="Rows that no update has met for longer leave.", rich_help_panel=BOUNDS)
    ] = None,
    min_frequency: Annotated[
        int | None, typer.Option(help="Updates that meet an id before it gets its row.", rich_help_panel=BOUNDS)
    ] = None,
    cold_store: Annotated[
        str | None,
        typer.Option(
            help="URL of a Redis server or a path for RocksDB, where evicted rows go.", rich_help_panel=BOUNDS
        ),
    ] = None,
    drop_idle_after: Annotated[
        float | None,
        typer.Option(
            metavar="HOURS",
            help="When a job's own cold rows are dropped that no call has asked for since.",
            rich_help_panel=BOUNDS,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="A line of JSON with the address at the start, and one at the end.")
    ] = False,
) -> None:
    """Serve tables to RecStoreClient over gRPC, until SIGTERM or Ctrl-C; then save them.

    Other machines can only be let in with TLS and a token.

    Example: recstore serve --listen 127.0.0.1:7700 --data tables

    Exit status: 0 after SIGTERM or Ctrl-C, 2 with one line on stderr where it cannot serve or save.
    """
    # Before torch is imported: each thread that serves calls has a team of torch's threads, which would else spin.
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
    """Refuses by its flag what gRPC would only log lines about, and call an address that it cannot listen on.

    Raises:
        OSError, ValueError: a file cannot be read, or does not hold what it should.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for path in (cert, key, client_ca):
        if path is not None:
            path.read_bytes()  # ssl's own error has no name
    try:
        if cert is not None:
            context.load_cert_chain(cert, key, password="")  # gRPC takes no encrypted key: no prompt for its password
    except ssl.SSLError:
        raise ValueError(f"--tls-cert {cert} and --tls-key {key} are no certificate and its key, PEM") from None
    try:
        if client_ca is not None:
            context.load_verify_locations(client_ca)
    except ssl.SSLError:
        raise ValueError(f"--client-ca {client_ca} holds no certificates, PEM") from None
