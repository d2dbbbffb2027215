"""The command ``recstore export``.

Tests: tests/commands/test_export.py.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.filesize import decimal
from rich.text import Text

from torchrec_recstore.commands.checkpoints import Checkpoint
from torchrec_recstore.commands.config_file import ConfigFile
from torchrec_recstore.commands.output import (
    AsJson,
    errors_in_one_line,
    in_order,
    print_json,
    stdout,
    table_of,
    warnings_in_one_line,
)
from torchrec_recstore.commands.progress import progress
from torchrec_recstore.commands.scripts import missing_in_one_line

if TYPE_CHECKING:
    from torchrec_recstore_serving.export.delta import DeltaInfo
    from torchrec_recstore_serving.export.from_checkpoint import ExportInfo

ROWS = "Selection of rows"


def export(
    checkpoint: Checkpoint,
    output: Annotated[
        Path, typer.Argument(metavar="OUT", help="File to write.", show_default=False)
    ],
    dtype: Annotated[
        Literal["int8", "int4", "fp16", "float32"] | None,
        typer.Option(help="Data type of the exported rows.", show_default="int8"),
    ] = None,
    index: Annotated[
        Literal["sorted", "hash"] | None,
        typer.Option(
            help=(
                "How the model finds ids; hash needs a library of"
                " torchrec-recstore-serving."
            ),
            show_default="sorted",
        ),
    ] = None,
    rows: Annotated[
        Literal["memory", "mapped"] | None,
        typer.Option(
            help="Where a process that serves has the rows; mapped needs --index hash.",
            show_default="memory",
        ),
    ] = None,
    tables: Annotated[
        list[str] | None,
        typer.Option(
            "--table",
            metavar="NAME",
            help="Export only this table. May be given several times.",
        ),
    ] = None,
    delta_of: Annotated[
        Path | None,
        typer.Option(
            metavar="EXPORT.pt",
            help=(
                "Write a delta with the changes since this export. The export loads it"
                " with apply_delta."
            ),
        ),
    ] = None,
    min_frequency: Annotated[
        int,
        typer.Option(
            min=0,
            help="Omit rows that were looked up in fewer steps.",
            rich_help_panel=ROWS,
        ),
    ] = 0,
    top_rows: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Export only the N most frequent rows of each table.",
            rich_help_panel=ROWS,
        ),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with the secret key that signs OUT, and has signed --delta-of.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT if it exists.")
    ] = False,
    as_json: AsJson = False,
    config: ConfigFile = None,
) -> None:
    """Export the tables of a checkpoint as a TorchScript file that torch.jit.load runs
    without torchrec_recstore.

    A process that loads the file needs the line "import fbgemm_gpu" before
    torch.jit.load, unless the rows are float32. With --index hash, it calls
    torchrec_recstore.inference.load_library instead.

    The exported model takes raw ids, and ids without a row read as zeros. With --index
    hash --rows mapped, all processes of a host share the rows, which lie in the file,
    and the tables may be larger than the memory.

    With --delta-of, OUT is a safetensors file. A running server applies the file to the
    loaded export. The delta has the tables and the data type of the export.
    --min-frequency and --top-rows must have the same values as for the export.

    Example: recstore export run/step-000001000 tables.pt --dtype int8 --top-rows
    1000000

    Exit status: 0, or 2 with one line on stderr. In that case OUT is not changed.
    """
    with errors_in_one_line():
        if os.path.lexists(output) and not overwrite:
            raise ValueError(
                f"{output} exists already: name a path that does not, or pass"
                " --overwrite"
            )
        if delta_of is not None and (tables or dtype or index or rows):
            raise ValueError(
                "--delta-of takes these from the export: leave out --table, --dtype,"
                " --index and --rows"
            )
        for name in tables or ():
            if (tables or []).count(name) > 1:
                raise ValueError(f"--table {name} is named twice")
        form = _Form(
            tables=tables,
            dtype=dtype or "int8",
            index=index or "sorted",
            rows=rows or "memory",
        )
        info = _export(checkpoint, output, form, delta_of, min_frequency, top_rows, key)
    if as_json:
        print_json(_as_json(info))
        return
    _print(info)
    if delta_of is None:
        stdout().print(
            _how_to_load(info.path, form),
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


@dataclass(frozen=True)
class _Form:
    """The form of an export, which a delta takes from the export before it."""

    tables: list[str] | None
    dtype: str
    index: str
    rows: str


def _export(
    checkpoint: Path,
    output: Path,
    form: _Form,
    delta_of: Path | None,
    min_frequency: int,
    top_rows: int | None,
    key: Path | None,
) -> ExportInfo | DeltaInfo:
    from torchrec_recstore.checkpoint.info import read_info

    infos = read_info(checkpoint).tables
    with missing_in_one_line(), warnings_in_one_line():
        from torchrec_recstore_serving.export.from_checkpoint import (
            export_checkpoint,
            export_checkpoint_delta,
        )
        from torchrec_recstore_serving.export.row_formats import DTYPES

        read_rows = 0
        for name, table in infos.items():
            if not form.tables or name in form.tables:
                read_rows += table.rows
        if min_frequency or top_rows:
            read_rows *= 2  # once to select them and once to export them
        with progress("exporting", read_rows) as advance:
            info: ExportInfo | DeltaInfo
            if delta_of is None:
                info = export_checkpoint(
                    checkpoint,
                    output,
                    tables=form.tables,
                    dtype=DTYPES[form.dtype],
                    index=form.index,
                    rows=form.rows,
                    min_frequency=min_frequency,
                    top_rows=top_rows,
                    key=key,
                    advance=advance,
                )
            else:
                info = export_checkpoint_delta(
                    checkpoint,
                    output,
                    base=delta_of,
                    min_frequency=min_frequency,
                    top_rows=top_rows,
                    key=key,
                    advance=advance,
                )
    return info


def _as_json(info: ExportInfo | DeltaInfo) -> dict[str, Any]:
    fields = asdict(info)
    fields["path"] = str(info.path)
    for table in fields["tables"].values():
        if "dtype" in table:
            table["dtype"] = str(table["dtype"]).removeprefix("torch.")
    return fields


def _print(info: ExportInfo | DeltaInfo) -> None:
    tables = _as_json(info)["tables"]
    first_table = next(iter(tables.values()))
    columns = list(first_table)
    titles = [column.replace("_", " ") for column in columns]
    printed = table_of(["table", *titles])
    for name, table in in_order(tables):
        cells = [_cell(column, table[column]) for column in columns]
        printed.add_row(Text(name), *cells)
    stdout().print(printed)
    stdout().print(
        f"{info.path}: {decimal(info.bytes)}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _how_to_load(path: Path, form: _Form) -> str:
    """Returns the lines of Python that load an exported file, and what they need."""
    load = f"torch.jit.load({str(path)!r})"
    if form.index == "hash":
        line = "from torchrec_recstore.inference import load_library; load_library()"
        return f"to load it: import torch; {line}; {load}"
    if form.dtype == "float32":
        return f"to load it: import torch; {load}"
    return f"to load it: import torch, fbgemm_gpu; {load}"


def _cell(column: str, value: int | str) -> str:
    if isinstance(value, str):
        return value
    return decimal(value) if column == "bytes" else f"{value:,}"
