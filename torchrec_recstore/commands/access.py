"""The flags of servers that say on which address a server listens, and who may call it."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from torchrec_recstore.service.listening import ListenOptions

_PANEL = "Access"

Listen = Annotated[str, typer.Option(metavar="HOST:PORT", help="Address to listen on. Port 0 chooses a free port.")]
TlsCert = Annotated[
    Path | None, typer.Option(metavar="PEM", help="File with the certificate of the server.", rich_help_panel=_PANEL)
]
TlsKey = Annotated[
    Path | None, typer.Option(metavar="PEM", help="File with the private key of --tls-cert.", rich_help_panel=_PANEL)
]
ClientCa = Annotated[
    Path | None,
    typer.Option(
        metavar="PEM",
        help="File with CA certificates. Clients then need a certificate that is signed by one of them.",
        rich_help_panel=_PANEL,
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="File with the token that clients must send.", rich_help_panel=_PANEL),
]
LIMITS = "Limits of the server"
MaxCalls = Annotated[
    int, typer.Option(help="Maximum number of calls that run at the same time.", rich_help_panel=LIMITS)
]
MaxConnections = Annotated[int, typer.Option(help="Maximum number of connections.", rich_help_panel=LIMITS)]
MaxRequestMemory = Annotated[
    float,
    typer.Option(
        metavar="GIB", help="Maximum memory of the requests of all running calls, in GiB.", rich_help_panel=LIMITS
    ),
]
MetricsAddress = Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Address for Prometheus metrics.")]


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
        OSError, ValueError: A file cannot be read, a value is invalid, or flags contradict each other.
    """
    try:
        from torchrec_recstore.service.listening import ListenOptions
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is missing: pip install 'torchrec-recstore[service]'") from None
    from torchrec_recstore.network import check_token

    token = None if token_file is None else token_file.read_text().strip()
    check_token(token, f"--token-file {token_file}: the token")
    memory = int(max_request_memory * 2**30)
    options = ListenOptions(listen, tls_cert, tls_key, client_ca, token, metrics, max_calls, max_connections, memory)
    _check_pem(tls_cert, tls_key, client_ca)
    return options


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
