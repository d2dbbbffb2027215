"""``recstore inspect``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal
from rich.text import Text

from torchrec_recstore.commands.checkpoints import Checkpoint, verify_files
from torchrec_recstore.commands.output import AsJson, errors_in_one_line, in_order, print_json, stdout, table_of

if TYPE_CHECKING:
    from torchrec_recstore.checkpoint.info import CheckpointInfo, TableInfo


def inspect(
    checkpoint: Checkpoint,
    verify: Annotated[bool, typer.Option(help="Read every file of the chain and compare its checksum.")] = True,
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint holds, and verify the checksums of it and of all that it is a delta of.

    Example: recstore inspect run/step-000001000

    Exit status: 0, or 2 where the checkpoint is damaged or there is none, with one line on stderr that names the file.
    """
    from torchrec_recstore.checkpoint.info import read_chain

    with errors_in_one_line():
        chain = read_chain(checkpoint)
        if verify:
            verify_files(chain)
    if as_json:
        print_json({**_as_json(chain), "verified": verify})
        return
    _print_checkpoint(chain)
    files = sum(len(info.files) for info in chain) + len(chain)
    stdout().print(f"checksums       {f'{files} files good' if verify else 'not verified'}", highlight=False)


def _print_checkpoint(chain: Sequence[CheckpointInfo]) -> None:
    info, out = chain[-1], stdout()
    state = _state_keys(info)
    for label, value in [
        ("checkpoint", str(info.path)),
        ("step", f"{info.step:,}"),
        ("world size", str(info.world_size)),
        ("delta of", ", a delta of ".join(str(each.base) for each in chain[:0:-1]) or "nothing: full"),
        ("dense tensors", str(len(info.dense))),
        ("training state", state if isinstance(state, str) else ", ".join(state)),
        ("size", f"{decimal(info.bytes)} in {len(info.files) + 1} files"),
    ]:
        out.print(f"{label:<15} {value}", highlight=False, markup=False, soft_wrap=True)
    # A delta holds some rows of each table only.
    here = ["here"] if info.delta_of else []
    table = table_of(["table", "rows", *here, "dim", "dtype", "optimizer", "bytes", "parts"])
    for name, each in in_order(info.tables):
        values = _table_as_json(info, each)
        counts = [f"{each.rows:,}", *(f"{values['rows_here']:,}" for _ in here), str(each.dim)]
        optimizer, size = type(each.optimizer).__name__, decimal(values["bytes"])
        table.add_row(Text(name), *counts, each.dtype, optimizer, size, str(len(each.parts)))
    out.print(table)


def _as_json(chain: Sequence[CheckpointInfo]) -> dict[str, Any]:
    info = chain[-1]
    return {
        "path": str(info.path),
        "step": info.step,
        "world_size": info.world_size,
        "bytes": info.bytes,
        "chain": [str(each.path) for each in chain],
        "dense": list(info.dense),
        "training_state": _state_keys(info),
        "tables": {name: _table_as_json(info, table) for name, table in info.tables.items()},
    }


def _state_keys(info: CheckpointInfo) -> list[str] | str:
    """The keys of the training state, or what it is instead of a dict."""
    state = info.training_state
    if state is None:
        return "none"
    return [str(key) for key in state] if isinstance(state, dict) else type(state).__name__


def _table_as_json(info: CheckpointInfo, table: TableInfo) -> dict[str, Any]:
    return {
        "rows": table.rows,
        "rows_here": sum(part.rows for part in table.parts if part.columns == table.columns[0]),
        "dim": table.dim,
        "dtype": table.dtype,
        "optimizer": repr(table.optimizer),
        "options": repr(table.options),
        "steps": table.steps,
        "optimizer_steps": table.optimizer_steps,
        "columns": table.columns,
        "bytes": sum(info.files[part.file].bytes for part in (*table.parts, *table.removed)),
        "parts": len(table.parts),
    }
