"""What a run reports at its end."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from common.command import DataError
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table


def check_folder(path: Path | None) -> None:
    """Finds out before the work whether its result can be written.

    Raises:
        DataError: the folder of ``path`` does not exist.
    """
    if path is not None and not path.absolute().parent.is_dir():
        raise DataError(f"{path}: no such folder")


def print_tables(console: Console, rows: dict[str, int], sizes: dict[str, int]) -> None:
    """Prints rows and bytes of every table, and of all."""
    table = Table()
    table.add_column("table")
    table.add_column("rows", justify="right")
    table.add_column("bytes", justify="right")
    for name, count in rows.items():
        table.add_row(name, f"{count:,}", decimal(sizes[name]))
    table.add_section()
    table.add_row("all", f"{sum(rows.values()):,}", decimal(sum(sizes.values())))
    console.print(table)


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    """Writes the result, where a path is given; a number that is not finite is null, since NaN is no JSON."""
    if path is not None:
        clean = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in result.items()
        }
        path.write_text(json.dumps(clean, indent=2, allow_nan=False) + "\n")
