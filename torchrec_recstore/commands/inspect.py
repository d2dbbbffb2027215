"""``recstore inspect``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal
from rich.text import Text

from torchrec_recstore.commands.checkpoints import verify_files
from torchrec_recstore.commands.output import AsJson, errors_in_one_line, in_order, print_json, stdout, table_of
from torchrec_recstore.commands.shipped import missing_in_one_line

if TYPE_CHECKING:
    from torchrec_recstore.checkpoint.info import CheckpointInfo, TableInfo


def inspect(
    path: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="A checkpoint's directory, or a served file.", show_default=False),
    ],
    verify: Annotated[bool, typer.Option(help="Read every file and compare its checksum.")] = True,
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint, an exported model or its delta holds, and verify every checksum.

    Of a checkpoint all that it is a delta of is verified too.

    Example: recstore inspect run/step-000001000

    Exit status: 0, or 2 where a file is damaged or missing, with one line on stderr that names the file.
    """
    if path.is_file():
        _inspect_served_file(path, verify, as_json)
        return
    from torchrec_recstore.checkpoint.info import read_chain

    with errors_in_one_line():
        chain = read_chain(path)
        if verify:
            verify_files(chain)
    if as_json:
        print_json({**_as_json(chain), "verified": verify})
        return
    _print_checkpoint(chain)
    files = sum(len(info.files) for info in chain) + len(chain)
    stdout().print(f"checksums       {f'{files} files good' if verify else 'not verified'}", highlight=False)


def _inspect_served_file(path: Path, verify: bool, as_json: bool) -> None:
    with errors_in_one_line(), missing_in_one_line():
        from torchrec_recstore.inference.described import described
        from torchrec_recstore.inference.verification import verify as verify_file

        if verify:
            verify_file(path)
        told = {**described(path), "verified": verify}
    if as_json:
        print_json(told)
        return
    for name, value in told.items():
        if name not in ("tables", "dense", "bytes", "verified"):
            stdout().print(f"{name:<15} {value}", highlight=False, markup=False, soft_wrap=True)
    stdout().print(f"{'dense tensors':<15} {len(told['dense'])}", highlight=False)
    stdout().print(f"{'size':<15} {decimal(told['bytes'])}", highlight=False)
    tables: dict[str, dict[str, int]] = told["tables"]
    shown = table_of(["table", *(next(iter(tables.values()), {}))])
    for name, table in in_order(tables):
        shown.add_row(Text(name), *(decimal(n) if key == "bytes" else f"{n:,}" for key, n in table.items()))
    stdout().print(shown)
    stdout().print(f"{'checksum':<15} {'good' if verify else 'not verified'}", highlight=False)


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
