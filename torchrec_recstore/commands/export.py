"""``recstore export``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.filesize import decimal
from rich.text import Text

from torchrec_recstore.commands.checkpoints import Checkpoint, rows_of
from torchrec_recstore.commands.output import AsJson, errors_in_one_line, print_json, stdout, table_of
from torchrec_recstore.commands.progress import progress
from torchrec_recstore.commands.shipped import missing_in_one_line

if TYPE_CHECKING:
    from torchrec_recstore.inference.checkpoint import ExportInfo

ROWS = "Which rows"


def export(
    checkpoint: Checkpoint,
    output: Annotated[Path, typer.Argument(metavar="OUT.pt", help="The file to write.", show_default=False)],
    dtype: Annotated[
        Literal["int8", "int4", "fp16", "float32"], typer.Option(help="Of the rows: quantised, or as trained.")
    ] = "int8",
    tables: Annotated[
        list[str] | None,
        typer.Option("--table", metavar="NAME", help="Only this table; may be given several times."),
    ] = None,
    min_frequency: Annotated[
        int, typer.Option(min=0, help="Leave out rows that fewer steps have looked up.", rich_help_panel=ROWS)
    ] = 0,
    top_rows: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Only the N most frequent rows of each table.", rich_help_panel=ROWS),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make one scripted collection of a checkpoint's tables, which torch.jit.load runs without torchrec_recstore.

    Ids stay raw: a sorted id tensor maps them to rows, ids without a row read as zeros.

    Example: recstore export run/step-000001000 tables.pt --dtype int8 --top-rows 1000000

    Exit status: 0, or 2 with one line on stderr; then there is nothing new at OUT.pt.
    """
    with errors_in_one_line():
        from torchrec_recstore.checkpoint.info import read_chain

        chain = read_chain(checkpoint)
        with missing_in_one_line():
            import torch

            from torchrec_recstore.inference.checkpoint import export_checkpoint
        types = {"int8": torch.int8, "int4": torch.quint4x2, "fp16": torch.float16, "float32": torch.float32}
        with progress("exporting", rows_of(chain[-1:])) as advance:
            info = export_checkpoint(
                checkpoint,
                output,
                tables=tables,
                dtype=types[dtype],
                min_frequency=min_frequency,
                top_rows=top_rows,
                advance=advance,
            )
    if as_json:
        print_json(_as_json(info))
    else:
        _print(info)


def _as_json(info: ExportInfo) -> dict[str, object]:
    return {
        "path": str(info.path),
        "bytes": info.bytes,
        "tables": {
            name: {
                "rows": table.rows,
                "rows_left_out": table.rows_left_out,
                "dim": table.dim,
                "dtype": str(table.dtype).removeprefix("torch."),
                "bytes": table.bytes,
            }
            for name, table in info.tables.items()
        },
    }


def _print(info: ExportInfo) -> None:
    table = table_of(["table", "rows", "left out", "dim", "dtype", "bytes"])
    for name, each in info.tables.items():
        kind = str(each.dtype).removeprefix("torch.")
        table.add_row(Text(name), f"{each.rows:,}", f"{each.rows_left_out:,}", str(each.dim), kind, decimal(each.bytes))
    stdout().print(table)
    stdout().print(f"{info.path}: {decimal(info.bytes)}", highlight=False, markup=False, soft_wrap=True)
