"""What commands print: tables and lines on stdout, an error in one line on stderr."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

_Value = TypeVar("_Value")

# Typer has taken click into itself, where the base of its errors of usage has no public name.
_UsageError: Any = typer.BadParameter.__mro__[1]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]

_LEFT = frozenset({"", "table", "dtype", "optimizer", "figure", "kernel, over FBGEMM's", "option", "over"})


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Ends the command with status 2 and one line on stderr where its body cannot use what it was given."""
    try:
        yield
    except _errors_of_input() as error:
        if isinstance(error, OSError) and error.strerror:
            message = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        else:
            message = str(error) or "out of memory"  # Python's own MemoryError says nothing
        print_error(message)
        raise typer.Exit(2) from None


def status_of(app: Callable[[], object]) -> int:
    """The exit status of a typer app that is called without its own handling of errors.

    Args:
        app: calls it; flags that are wrong give status 2, with one line on stderr, of the first rank alone.
    """
    try:
        status = app()
    except _UsageError as error:
        if os.environ.get("RANK", "0") == "0":
            message = " ".join(error.format_message().split()).rstrip(".")
            print_error(f"{message}: see {error.ctx.command_path if error.ctx else 'recstore'} --help")
        return 2
    except typer.Exit as end:
        return int(end.exit_code)
    except typer.Abort:
        return 130
    return status if isinstance(status, int) else 0


def print_error(message: str) -> None:
    """Prints it to stderr, in one line."""
    print(f"error: {' '.join(message.splitlines())}", file=sys.stderr)


def _errors_of_input() -> tuple[type[Exception], ...]:
    # Ours count as far as something has been imported that raises them: an import of torch takes seconds.
    names = {"torchrec_recstore.store.cold_store": "ColdStoreError", "torchrec_recstore.rpc.protocol": "ServiceError"}
    ours = (getattr(sys.modules[module], name) for module, name in names.items() if module in sys.modules)
    return (OSError, ValueError, MemoryError, *ours)


def stdout() -> Console:
    """The console on stdout. Where that is no terminal, lines are for other programs: not wrapped."""
    return Console() if sys.stdout.isatty() else Console(width=1000)


def print_json(value: Any) -> None:
    """Prints a document of JSON."""
    print(json.dumps(value, indent=1))


def table_of(columns: Sequence[str]) -> Table:
    """A table whose columns of figures are aligned to the right."""
    table = Table()
    for column in columns:
        table.add_column(column, justify="left" if column in _LEFT else "right", overflow="fold")
    return table


def in_order(tables: Mapping[str, _Value]) -> list[tuple[str, _Value]]:
    """Tables as people count them: t_2 before t_10."""

    def key(item: tuple[str, _Value]) -> list[str | int]:
        return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", item[0]))]

    return sorted(tables.items(), key=key)
