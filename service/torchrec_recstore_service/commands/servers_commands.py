"""The commands on a set of parameter servers: ``recstore servers status``, ``restore``
and ``reset``.

Tests: tests/service/test_agreement.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchrec_recstore.commands.explore import (
    Timeout,
    TlsCa,
    TlsCert,
    TlsKey,
    TokenFile,
)
from torchrec_recstore.commands.output import (
    AsJson,
    errors_in_one_line,
    print_json,
    stdout,
    table_of,
)
from torchrec_recstore.commands.scripts import missing_in_one_line

if TYPE_CHECKING:
    from torchrec_recstore_service.client.server_set import ServerSet
    from torchrec_recstore_service.wire import recstore_pb2 as pb
    from torchrec_recstore_service.wire.agreement import Begin

servers = typer.Typer(
    help=(
        "Show the state of a set of parameter servers, and bring all of them to one"
        " save."
    )
)

Addresses = Annotated[
    str,
    typer.Argument(
        metavar="HOST:PORT,...",
        help="Addresses of all servers of the set, HOST:PORT/HOST:PORT for a pair.",
        show_default=False,
    ),
]


@servers.command()
def status(
    addresses: Addresses,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    timeout: Timeout = 5.0,
    as_json: AsJson = False,
) -> None:
    """Show which set, epoch and save each server is at, and whether all servers agree.

    Example: recstore servers status 127.0.0.1:7700,127.0.0.1:7701

    Exit status: 0, 1 if the servers do not agree or a server cannot be reached, or 2
    for invalid input.
    """
    with connected_to(
        addresses,
        token_file,
        tls_ca,
        tls_cert,
        tls_key,
        timeout,
    ) as connected:
        from torchrec_recstore_service.wire.agreement import complete_saves, to_resume
        from torchrec_recstore_service.wire.protocol import ServiceError

        states = connected.describe_reachable()
        reached = [state for state in states if not isinstance(state, Exception)]
        failures = [str(state) for state in states if isinstance(state, Exception)]
        saves = [] if failures else complete_saves(reached)
        error = failures[0] if failures else ""
        summary = ""
        if not error:
            try:
                summary = _summary(to_resume(connected.addresses, reached))
            except ServiceError as difference:
                error = str(difference)
    if as_json:
        document = {
            "agree": not error,
            "summary": summary or error,
            "complete_saves": [
                {"name": saved.name, "number": saved.number} for saved in saves
            ],
            "servers": list(map(_as_json, connected.addresses, states)),
        }
        print_json(document)
    else:
        _print(connected.addresses, states)
        names = ", ".join(saved.name for saved in saves) or "none"
        stdout().print(f"complete saves  {names}", highlight=False)
        stdout().print(summary or error, highlight=False, markup=False)
    if error:
        raise typer.Exit(1)


@servers.command()
def restore(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Name of the save.", show_default=False),
    ],
    addresses: Addresses,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT,...",
            help=(
                "Addresses of other servers, also of another number, over which the"
                " rows of the save are distributed. "
                "They are empty, or belong to the set that has the save."
            ),
        ),
    ] = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Bring all servers of a set to one save.

    The rows that were written after it are lost.

    With --to, other servers begin with the save, and the servers that have it do not
    change unless they are among them.

    Example: recstore servers restore monday 127.0.0.1:7700,127.0.0.1:7701

    Exit status: 0, or 2 if a server cannot be reached or cannot load the save. Nothing
    has changed then, unless the error says so.
    """
    with connected_to(
        addresses,
        token_file,
        tls_ca,
        tls_cert,
        tls_key,
        timeout,
    ) as connected:
        if to is None:
            connected.load(name, exact=True)
            _print_begun(connected, name, as_json)
            return
        with connected_to(to, token_file, tls_ca, tls_cert, tls_key, timeout) as others:
            others.load_from(connected, name)
            _print_begun(others, name, as_json)


@servers.command()
def reset(
    addresses: Addresses,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Delete the tables of all servers of a set. Their saves remain.

    Example: recstore servers reset 127.0.0.1:7700,127.0.0.1:7701

    Exit status: 0, or 2 if a server cannot be reached.
    """
    with connected_to(
        addresses,
        token_file,
        tls_ca,
        tls_cert,
        tls_key,
        timeout,
    ) as connected:
        connected.load(None, exact=True)
        _print_begun(connected, None, as_json)


def _summary(begin: Begin) -> str:
    """Says how servers that agree get into one epoch."""
    if begin.pending:
        name = begin.save.name
        rows = f"from the save {name!r}" if name else "without rows"
        return f"the next client begins epoch {begin.epoch} {rows}"
    summary = f"all servers are in epoch {begin.epoch}"
    if begin.waiting:
        summary += ", and the next client lets those go on that were stopped"
    return summary


@contextmanager
def connected_to(
    addresses: str,
    token_file: Path | None,
    tls_ca: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    timeout_s: float,
) -> Iterator[ServerSet]:
    """Connects to servers for the body.

    Errors of the body end the command with one line.

    The arguments are the flags of the same names. A server counts as gone after
    ``timeout_s`` seconds.
    """
    with errors_in_one_line(), missing_in_one_line():
        from torchrec_recstore_service.client.server_set import ServerSet
        from torchrec_recstore_service.wire.access import Access

        token = None if token_file is None else token_file.read_text().strip()
        access = Access(
            token=token,
            tls_ca=tls_ca,
            tls_cert=tls_cert,
            tls_key=tls_key,
            timeout_s=timeout_s,
        )
        connected = ServerSet(addresses.split(","), access)
        try:
            yield connected
        finally:
            connected.close()


def _as_json(address: str, state: pb.DescribeReply | Exception) -> dict[str, Any]:
    if isinstance(state, Exception):
        return {
            "address": address,
            "reachable": False,
            "error": str(state),
        }
    return {
        "address": address,
        "reachable": True,
        "set": state.set or None,
        "number": state.member if state.set else None,
        "servers": state.members if state.set else None,
        "epoch": state.epoch,
        "token": state.token or None,
        "in_epoch": state.live,
        "waits": state.waits,
        "replicated": state.replicated,
        "backup": state.backup or None,
        "save": state.at.name or None,
        "saves": [saved.name for saved in state.saves],
        "prepared": [saved.name for saved in state.prepared],
        "tables": sorted(state.tables),
    }


def _print(
    addresses: Sequence[str],
    states: Sequence[pb.DescribeReply | Exception],
) -> None:
    from torchrec_recstore_service.wire.agreement import state_of

    reached = [state for state in states if not isinstance(state, Exception)]
    table = table_of(
        ("server", "set", "number", "epoch", "state", "save", "saves", "tables")
    )
    for address, state in zip(addresses, states, strict=True):
        if isinstance(state, Exception):
            table.add_row(address, "", "", "", "cannot be reached", "", "", "")
            continue
        number = f"{state.member + 1} of {state.members}" if state.set else ""
        epoch = str(state.epoch) if state.set else ""
        saves = ", ".join(saved.name for saved in state.saves)
        text = state_of(state, reached)
        if state.replicated:
            backup = f"with the backup {state.backup}" if state.backup else ""
            text += f", {backup or 'without a backup'}"
        table.add_row(
            address,
            state.set[:8],
            number,
            epoch,
            text,
            state.at.name,
            saves,
            str(len(state.tables)),
        )
    stdout().print(table)


def _print_begun(
    connected: ServerSet,
    name: str | None,
    as_json: bool,
) -> None:
    from torchrec_recstore_service.wire.agreement import number_of

    epoch = number_of(connected.epoch())
    if as_json:
        print_json(
            {
                "servers": list(connected.addresses),
                "save": name,
                "epoch": epoch,
            }
        )
    else:
        rows = "without rows" if name is None else f"with the save {name!r}"
        count = len(connected.addresses)
        begin = "1 server begins" if count == 1 else f"{count} servers begin"
        stdout().print(f"{begin} epoch {epoch} {rows}", highlight=False)
