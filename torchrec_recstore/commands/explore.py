"""The commands on rows of a checkpoint or of servers: ``top`` and ``neighbours``."""

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
    return typer.Option(
        metavar=metavar,
        help=help,
        rich_help_panel="Access",
    )


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
_SOURCE_HELP = (
    "Directory of a checkpoint, or the addresses of all parameter servers of a set."
)
Source = Annotated[str, argument("CHECKPOINT|HOST:PORT,...", _SOURCE_HELP)]
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
        with _connected(source, token_file, tls_ca, tls_cert, tls_key, timeout) as (
            connections,
            functions,
        ):
            if by == "drift" or since is not None:
                raise ValueError(
                    "drift and growth are those of checkpoints: pass the directories of"
                    " two saves"
                )
            name = _table_on_servers(connections, table)
            result = functions.top_rows_of_servers(connections, name, by, count)
    else:
        with errors_in_one_line():
            from torchrec_recstore.checkpoint.row_search import top_rows

            path = Path(source)
            with progress("reading", _rows(path, table)) as advance:
                result = top_rows(
                    path, table, by=by, count=count, since=since, advance=advance
                )
    if as_json:
        print_json(_as_json(result))
    else:
        _print(result)


def _print(result: TopRows) -> None:
    print_line(f"rows        {result.rows:,}")
    if result.added is not None:
        print_line(f"since       {result.added:,} added, {result.gone:,} gone")
    for name, quantiles in result.quantiles.items():
        texts = []
        for quantile, value in quantiles.items():
            texts.append(f"{_name_of(quantile)} {_number(value)}")
        listed = ", ".join(texts)
        print_line(f"{name:<11} {listed}")

    headings = ["id"]
    columns = [[str(id) for id in result.ids.tolist()]]
    for name, values in result.columns.items():
        headings.append(name.replace("_", " "))
        columns.append([_number(value) for value in values.tolist()])
    print_table(headings, zip(*columns, strict=True))


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
        with _connected(source, token_file, tls_ca, tls_cert, tls_key, timeout) as (
            connections,
            functions,
        ):
            name = _table_on_servers(connections, table)
            ids, values = functions.neighbours_on_servers(
                connections, id, name, metric, count
            )
    else:
        with errors_in_one_line():
            from torchrec_recstore.checkpoint import row_search

            path = Path(source)
            with progress("reading", 2 * _rows(path, table)) as advance:
                ids, values = row_search.neighbours(
                    path, id, table, metric=metric, count=count, advance=advance
                )
    if as_json:
        print_json({"ids": ids.tolist(), metric: values.tolist()})
        return
    rows = []
    for neighbour, value in zip(ids.tolist(), values.tolist(), strict=True):
        rows.append([str(neighbour), _number(value)])
    print_table(["id", metric], rows)


def _is_servers(source: str) -> bool:
    """Returns whether the source is addresses of servers.

    A directory with such a name is a checkpoint.
    """
    return re.search(r":\d+$", source) is not None and not Path(source).exists()


@contextmanager
def _connected(source: str, *access: Any) -> Iterator[tuple[Any, Any]]:
    """Connects to servers, and yields the connections and the functions on their rows."""
    with errors_in_one_line(), missing_in_one_line():
        connected_to = plugin("connected_to")
        functions = plugin("looks")
    with connected_to(source, *access) as connections:
        yield connections, functions


def _table_on_servers(connections: Any, table: str | None) -> str:
    """Returns the name of the table, or that of the only one."""
    name_set: set[str] = set()
    for state in connections.describe():
        name_set.update(state.tables)
    names = sorted(name_set)
    if table is None and len(names) == 1:
        return names[0]
    if table is not None and table in names:
        return table
    problem = "name one of the tables"
    if table is not None:
        problem = f"there is no table {table!r}"
    addresses = ",".join(connections.addresses)
    raise ValueError(f"{addresses}: {problem}: {', '.join(names)}")


def _rows(checkpoint: Path, table: str | None) -> int:
    from torchrec_recstore.checkpoint.info import read_info

    tables = read_info(checkpoint).tables
    if table is None:
        return sum(info.rows for info in tables.values())
    return tables[table].rows if table in tables else 0


def _number(value: float) -> str:
    """Returns a number for people: ``1,234``, ``0.1235``, and a dash for none."""
    if isinstance(value, float) and math.isnan(value):
        return "-"
    if float(value).is_integer() and abs(value) >= 1:
        return f"{int(value):,}"
    return f"{value:.4g}"


def _name_of(quantile: float) -> str:
    return {0.5: "median", 1.0: "largest"}.get(quantile, f"p{quantile * 100:g}")


def _as_json(result: TopRows) -> dict[str, Any]:
    columns = {}
    for name, values in result.columns.items():
        # JSON has no NaN.
        columns[name] = [
            None if math.isnan(value) else value for value in values.tolist()
        ]
    quantiles = {}
    for name, values_by_quantile in result.quantiles.items():
        quantiles[name] = {
            _name_of(quantile): value for quantile, value in values_by_quantile.items()
        }
    return {
        "rows": result.rows,
        "steps": result.steps,
        "added": result.added,
        "gone": result.gone,
        "quantiles": quantiles,
        "ids": result.ids.tolist(),
        "columns": columns,
    }
