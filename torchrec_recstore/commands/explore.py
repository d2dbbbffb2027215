"""The commands on the rows of a checkpoint or of servers: ``recstore top`` and
``recstore neighbours``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchrec_recstore.commands.output import (
    AsJson,
    argument,
    errors_in_one_line,
    print_json,
    print_line,
    print_table,
)
from torchrec_recstore.commands.progress import progress
from torchrec_recstore.commands.scripts import missing_in_one_line
from torchrec_recstore.plugins import plugin

if TYPE_CHECKING:
    from torchrec_recstore.checkpoint.row_search import By, Metric, TopRows
else:  # typer reads the annotations, and the module above imports torch
    from typing import Literal

    By = Literal["frequency", "last_step", "norm", "drift"]
    Metric = Literal["cosine", "dot", "l2"]


def _access_file(metavar: str, help: str) -> Any:
    return typer.Option(metavar=metavar, help=help, rich_help_panel="Access")


TokenFile = Annotated[
    Path | None, _access_file("FILE", "File with the token of the servers.")
]
TlsCa = Annotated[
    Path | None,
    _access_file("PEM", "File with the CA certificates of the servers: use TLS."),
]
TlsCert = Annotated[
    Path | None, _access_file("PEM", "File with the certificate of this client.")
]
TlsKey = Annotated[
    Path | None, _access_file("PEM", "File with the private key of --tls-cert.")
]
Timeout = Annotated[
    float,
    typer.Option(metavar="SECONDS", help="Time after which a server counts as gone."),
]
_ROWS_ARE_IN = (
    "Directory of a checkpoint, or the addresses of all parameter servers of a set."
)
Source = Annotated[str, argument("CHECKPOINT|HOST:PORT,...", _ROWS_ARE_IN)]
OneTable = Annotated[
    str | None,
    typer.Option(
        "--table",
        metavar="NAME",
        help="The table. Default: the only one.",
        show_default=False,
    ),
]
Count = Annotated[
    int, typer.Option("--count", "-n", min=1, help="Number of rows to show.")
]


def top(
    source: Source,
    table: OneTable = None,
    by: Annotated[
        By, typer.Option(help="The value by which the rows are selected.")
    ] = "frequency",
    since: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="An earlier checkpoint: shows growth and drift since then.",
        ),
    ] = None,
    count: Count = 20,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    timeout: Timeout = 60.0,
    as_json: AsJson = False,
) -> None:
    """Show the hottest rows of a table, and how its rows are distributed.

    frequency is the number of steps that looked a row up, last step the last of them,
    and norm the L2 norm of its weights. drift is the L2 norm of the change of its
    weights since an earlier checkpoint (--since), which also shows how many rows were
    added and how many have left. Of parameter servers, no distribution and no drift is
    shown.

    Example: recstore top run/step-000002000 --table t_C3 --by drift --since
    run/step-000001000

    Exit status: 0, or 2 with one line on stderr.
    """
    if _is_servers(source):
        with _looking_at(source, token_file, tls_ca, tls_cert, tls_key, timeout) as (
            connected,
            looks,
        ):
            if by == "drift" or since is not None:
                raise ValueError(
                    "drift and growth are those of checkpoints: pass the directories of"
                    " two saves"
                )
            found = looks.top_rows_of_servers(
                connected, _on_servers(connected, table), by, count
            )
    else:
        with errors_in_one_line():
            from torchrec_recstore.checkpoint.row_search import top_rows

            path = Path(source)
            with progress("reading", _rows(path, table)) as advance:
                found = top_rows(
                    path, table, by=by, count=count, since=since, advance=advance
                )
    if as_json:
        print_json(_as_json(found))
        return
    print_line(f"rows        {found.rows:,}")
    if found.added is not None:
        print_line(f"since       {found.added:,} added, {found.gone:,} gone")
    for name, quantiles in found.quantiles.items():
        shown = ", ".join(
            f"{_name_of(q)} {_number(value)}" for q, value in quantiles.items()
        )
        print_line(f"{name:<11} {shown}")
    columns = [map(_number, values.tolist()) for values in found.columns.values()]
    headings = ["id", *(name.replace("_", " ") for name in found.columns)]
    print_table(headings, zip(map(str, found.ids.tolist()), *columns, strict=True))


def neighbours(
    source: Source,
    id: Annotated[
        int,
        typer.Argument(
            metavar="ID", help="The id, a 64-bit integer. Write -- before one below 0."
        ),
    ],
    table: OneTable = None,
    metric: Annotated[Metric, typer.Option(help="How near two rows are.")] = "cosine",
    count: Count = 10,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    timeout: Timeout = 60.0,
    as_json: AsJson = False,
) -> None:
    """Show the rows of a table that are nearest to the row of an id.

    All rows are compared.

    Example: recstore neighbours run/step-000002000 4711 --table t_item

    Exit status: 0, or 2 with one line on stderr.
    """
    if _is_servers(source):
        with _looking_at(source, token_file, tls_ca, tls_cert, tls_key, timeout) as (
            connected,
            looks,
        ):
            ids, near = looks.neighbours_on_servers(
                connected, id, _on_servers(connected, table), metric, count
            )
    else:
        with errors_in_one_line():
            from torchrec_recstore.checkpoint import row_search

            path = Path(source)
            with progress("reading", 2 * _rows(path, table)) as advance:
                ids, near = row_search.neighbours(
                    path, id, table, metric=metric, count=count, advance=advance
                )
    if as_json:
        print_json({"ids": ids.tolist(), metric: near.tolist()})
        return
    print_table(
        ["id", metric],
        (
            (str(i), _number(value))
            for i, value in zip(ids.tolist(), near.tolist(), strict=True)
        ),
    )


def _is_servers(source: str) -> bool:
    """Returns whether the source is addresses of servers.

    A directory with such a name is a checkpoint.
    """
    return re.search(r":\d+$", source) is not None and not Path(source).exists()


@contextmanager
def _looking_at(source: str, *access: Any) -> Iterator[tuple[Any, Any]]:
    """Connects to servers for the body, and yields the connections and the functions
    that look at their rows.
    """
    with errors_in_one_line(), missing_in_one_line():
        connected_to, looks = plugin("connected_to"), plugin("looks")
    with connected_to(source, *access) as connected:
        yield connected, looks


def _on_servers(connected: Any, table: str | None) -> str:
    """Returns the name of the table, or that of the only one."""
    names: list[str] = sorted(
        {name for state in connected.describe() for name in state.tables}
    )
    if table is None and len(names) == 1:
        return names[0]
    if table is None or table not in names:
        named = (
            "name one of the tables"
            if table is None
            else f"there is no table {table!r}"
        )
        raise ValueError(
            f"{','.join(connected.addresses)}: {named}: {', '.join(names)}"
        )
    return table


def _rows(checkpoint: Path, table: str | None) -> int:
    from torchrec_recstore.checkpoint.info import read_info

    return sum(
        each.rows
        for name, each in read_info(checkpoint).tables.items()
        if table in (None, name)
    )


def _number(value: float) -> str:
    """Returns a number for people: integers with separators, others with four digits,
    and a dash for none.
    """
    if isinstance(value, float) and math.isnan(value):
        return "-"
    return (
        f"{int(value):,}"
        if float(value).is_integer() and abs(value) >= 1
        else f"{value:.4g}"
    )


def _name_of(quantile: float) -> str:
    return {0.5: "median", 1.0: "largest"}.get(quantile, f"p{quantile * 100:g}")


def _as_json(found: TopRows) -> dict[str, Any]:
    # JSON has no NaN.
    columns = {
        name: [None if math.isnan(v) else v for v in values.tolist()]
        for name, values in found.columns.items()
    }
    quantiles = {
        name: {_name_of(q): value for q, value in each.items()}
        for name, each in found.quantiles.items()
    }
    counts = {
        "rows": found.rows,
        "steps": found.steps,
        "added": found.added,
        "gone": found.gone,
    }
    return {
        **counts,
        "quantiles": quantiles,
        "ids": found.ids.tolist(),
        "columns": columns,
    }
