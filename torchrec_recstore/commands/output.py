"""The output of commands: tables and lines on stdout, errors as one line on stderr."""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchrec_recstore.utils import RecStoreWarning, StorageError

_Value = TypeVar("_Value")

# Typer contains a copy of click, whose base class of usage errors has no public name in
# typer.
_UsageError: Any = typer.BadParameter.__mro__[1]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def argument(metavar: str, help: str) -> Any:
    """Describes a positional argument that must be given."""
    return typer.Argument(metavar=metavar, help=help, show_default=False)


# The columns that hold text, and are aligned to the left.
_TEXTS = re.compile(
    "|table|checkpoint|cold store|shard|process|delta of|server|set|state|saves?|dtype"
    "|optimizer|figure|kernel, over FBGEMM's|option|over|sharding type|limit"
)


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Ends the command with status 2 and one line on stderr if the input is wrong."""
    try:
        yield
    except (OSError, ValueError, MemoryError, StorageError) as error:
        # a MemoryError of Python has no message
        message = str(error) or "out of memory"
        if isinstance(error, OSError) and error.strerror:
            message = error.strerror
            if error.filename:
                message = f"{error.filename}: {message}"
        print_error(message)
        raise typer.Exit(2) from None


@contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """Prints each warning of this package as one line on stderr, and no other one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        if issubclass(warning.category, RecStoreWarning):
            print(f"warning: {warning.message}", file=sys.stderr)


def status_of(app: Callable[[], object]) -> int:
    """Calls a typer app, and returns its exit status: 2 for invalid flags, with one
    line on the first rank's stderr.
    """
    try:
        status = app()
    except _UsageError as error:
        if os.environ.get("RANK", "0") == "0":
            words = error.format_message().split()
            message = " ".join(words).rstrip(".")
            command = error.ctx.command_path if error.ctx else "recstore"
            print_error(f"{message}: see {command} --help")
        return 2
    except typer.Exit as end:
        return int(end.exit_code)
    except typer.Abort:
        return 130
    return status if isinstance(status, int) else 0


def print_error(message: str) -> None:
    """Prints an error message to stderr as one line."""
    line = " ".join(message.splitlines())
    print(f"error: {line}", file=sys.stderr)


def stdout() -> Console:
    """Returns a console on stdout.

    Lines are wrapped only on a terminal, so that other programs can read them.
    """
    if sys.stdout.isatty():
        return Console()
    return Console(width=1000)


def print_json(value: Any) -> None:
    """Prints a value as JSON."""
    print(json.dumps(value, indent=1))


def table_of(columns: Sequence[str]) -> Table:
    """Returns an empty table. Columns of numbers are aligned to the right."""
    table = Table()
    for column in columns:
        is_text = _TEXTS.fullmatch(column)
        table.add_column(
            column,
            justify="left" if is_text else "right",
            overflow="fold",
        )
    return table


def print_table(columns: Sequence[str], rows: Iterable[Iterable[str]]) -> None:
    """Prints a table on stdout, with the cells as they are."""
    table = table_of(columns)
    for row in rows:
        cells = [Text(cell) for cell in row]
        table.add_row(*cells)
    stdout().print(table)


def print_line(text: str) -> None:
    """Prints a line on stdout as it is."""
    stdout().print(text, highlight=False, markup=False, soft_wrap=True)


def in_order(tables: Mapping[str, _Value]) -> list[tuple[str, _Value]]:
    """Returns the items of ``tables`` sorted by name, ``t_2`` before ``t_10``."""

    def key(item: tuple[str, _Value]) -> list[str | int]:
        name, _ = item
        # Each second part is a number.
        parts: list[str | int] = list(re.split(r"(\d+)", name))
        parts[1::2] = [int(part) for part in parts[1::2]]
        return parts

    return sorted(tables.items(), key=key)
