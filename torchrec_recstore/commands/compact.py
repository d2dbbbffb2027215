"""``recstore compact``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from torchrec_recstore.commands.checkpoints import Checkpoint, rows_of, verify_files
from torchrec_recstore.commands.output import AsJson, errors_in_one_line, print_json, stdout
from torchrec_recstore.commands.progress import progress

if TYPE_CHECKING:
    from torchrec_recstore.checkpoint.info import CheckpointInfo


def compact(
    checkpoint: Checkpoint,
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="A new directory.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Fold a delta and all that it is a delta of into one full checkpoint, which loads to the same bits.

    Example: recstore compact run/step-000002000 full

    Exit status: 0, or 2 with one line on stderr; then there is nothing at OUTPUT.
    """
    from torchrec_recstore.checkpoint.compact import compact_chain, folding

    with errors_in_one_line(), folding(checkpoint, output) as (chain, destination):
        verify_files(chain)
        with progress("folding", rows_of(chain[-1:])) as advance:
            info = compact_chain(chain, destination, advance)
    rows = rows_of([info])
    if as_json:
        print_json({"path": str(info.path), "rows": rows, "bytes": info.bytes, "tables": _rows_by_table(info)})
        return
    stdout().print(f"{info.path}: {rows:,} rows, {decimal(info.bytes)}", highlight=False)


def _rows_by_table(info: CheckpointInfo) -> dict[str, int]:
    return {name: table.rows for name, table in info.tables.items()}
