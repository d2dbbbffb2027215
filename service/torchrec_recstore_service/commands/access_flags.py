"""The flags of servers that say on which address a server listens, and who may call it.

Tests: tests/service/test_access.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from torchrec_recstore_service.server.listening import ListenOptions

_PANEL = "Access"

Listen = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT", help="Address to listen on. Port 0 chooses a free port."
    ),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(
        metavar="PEM",
        help="File with the certificate of the server.",
        rich_help_panel=_PANEL,
    ),
]
TlsKey = Annotated[
    Path | None,
    typer.Option(
        metavar="PEM",
        help="File with the private key of --tls-cert.",
        rich_help_panel=_PANEL,
    ),
]
ClientCa = Annotated[
    Path | None,
    typer.Option(
        metavar="PEM",
        help=(
            "File with CA certificates. Clients then need a certificate that is signed"
            " by one of them."
        ),
        rich_help_panel=_PANEL,
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="File with the token that clients must send.",
        rich_help_panel=_PANEL,
    ),
]
LIMITS = "Limits of the server"
MaxCalls = Annotated[
    int,
    typer.Option(
        help="Maximum number of calls that run at the same time.",
        rich_help_panel=LIMITS,
    ),
]
MaxConnections = Annotated[
    int, typer.Option(help="Maximum number of connections.", rich_help_panel=LIMITS)
]
MaxRequestMemory = Annotated[
    float,
    typer.Option(
        metavar="GIB",
        help="Maximum memory of the requests of all running calls, in GiB.",
        rich_help_panel=LIMITS,
    ),
]
MetricsAddress = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Address for Prometheus metrics."),
]


def listen_options(
    listen: str,
    tls_cert: Path | None,
    tls_key: Path | None,
    client_ca: Path | None,
    token_file: Path | None,
    metrics: str | None,
    max_calls: int,
    max_connections: int,
    max_request_memory: float,
) -> ListenOptions:
    """Returns the options of the flags.

    Raises:
        OSError, ValueError: A file cannot be read, a value is invalid, or flags
            contradict each other.
    """
    from torchrec_recstore_service.server.credentials import (
        watched_certificates,
        watched_token,
    )
    from torchrec_recstore_service.server.listening import ListenOptions

    memory = int(max_request_memory * 2**30)
    options = ListenOptions(
        listen,
        tls_cert=tls_cert,
        tls_key=tls_key,
        client_ca=client_ca,
        token_file=token_file,
        metrics=metrics,
        max_calls=max_calls,
        max_connections=max_connections,
        max_request_memory=memory,
    )
    if token_file is not None:
        watched_token(token_file)
    if tls_cert is not None and tls_key is not None:
        watched_certificates(tls_cert, tls_key, client_ca)
    return options
