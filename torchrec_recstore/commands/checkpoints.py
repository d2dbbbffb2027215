"""The commands on checkpoints: ``inspect``, ``diff``, ``sign`` and ``compact``."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from torchrec_recstore.commands.output import (
    AsJson,
    argument,
    errors_in_one_line,
    in_order,
    print_json,
    print_line,
    print_table,
    warnings_in_one_line,
)
from torchrec_recstore.commands.progress import progress
from torchrec_recstore.commands.scripts import missing_in_one_line
from torchrec_recstore.plugins import plugin
from torchrec_recstore.run_directories import Run, removal, run_directories

if TYPE_CHECKING:
    from torchrec_recstore.checkpoint.compare import CheckpointDifference, Difference
    from torchrec_recstore.checkpoint.info import CheckpointInfo, TableInfo


# The import of torch takes seconds. Commands import the modules that use torch
# themselves, so that --help is fast.

Checkpoint = Annotated[Path, argument("DIR", "Directory of a checkpoint.")]
_INSPECTED = (
    "Directory of a checkpoint, of the checkpoints of a run, of cold stores or of"
    " publications, or an exported file."
)


def _verify(checkpoints: Sequence[CheckpointInfo]) -> None:
    from torchrec_recstore.checkpoint.fold import check_files

    total_bytes = sum(info.bytes for info in checkpoints)
    with progress("verifying", total_bytes, "bytes") as advance:
        check_files(checkpoints, advance)


def _rows_of(checkpoints: Sequence[CheckpointInfo]) -> int:
    rows = 0
    for info in checkpoints:
        rows += sum(table.rows for table in info.tables.values())
    return rows


def inspect(
    path: Annotated[Path, argument("PATH", _INSPECTED)],
    verify: Annotated[
        bool, typer.Option(help="Read every file and verify its checksum.")
    ] = True,
    key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=(
                "File with the secret key that must have signed the exported model, the"
                " delta, the package or the publications."
            ),
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the contents of a checkpoint, of an exported model, of an exported delta or
    of the publications of a model, and verify all checksums.

    If a checkpoint is a delta, the checkpoints that it is based on are verified too.
    The checkpoints of a run are listed, and their files are not read. Cold stores on an
    SSD below the directory are listed, with the processes that use them, and with a
    command that removes those of processes that have ended.

    Example: recstore inspect run/step-000001000

    Exit status: 0, or 2 if a file is damaged or missing. One line on stderr then names
    the file.
    """
    is_published = (path / "latest.json").is_file()
    if key is not None and not ((path.is_file() or is_published) and verify):
        with errors_in_one_line():
            raise ValueError(
                "--key needs the file of an exported model, a delta or a package, or the"
                " directory of publications, and no --no-verify"
            )
    if path.is_file():
        _inspect_served_file(path, verify, key, as_json)
        return
    if is_published:
        _inspect_publications(path, verify, key, as_json)
        return
    from torchrec_recstore.checkpoint.compare import nonfinite_rows
    from torchrec_recstore.checkpoint.info import METADATA, read_chain, read_info

    with errors_in_one_line():
        if path.is_dir() and not (path / METADATA).exists():
            checkpoints = [
                read_info(file.parent) for file in path.glob(f"*/{METADATA}")
            ]
            checkpoints.sort(key=lambda info: info.step)
            cold_stores = run_directories(path)
            if checkpoints or cold_stores:
                _print_run(path, checkpoints, cold_stores, as_json)
                return
        chain = read_chain(path)
        nonfinite = {}
        if verify:
            _verify(chain)
            for name in chain[-1].tables:
                nonfinite[name] = nonfinite_rows(chain, name)
    if as_json:
        contents = _as_json(chain)
        contents["verified"] = verify
        contents["nonfinite_rows"] = nonfinite if verify else None
        print_json(contents)
        return
    _print_checkpoint(chain)
    counts = [f"{count:,} of {name}" for name, count in in_order(nonfinite) if count]
    if counts:
        print_line(f"not finite      rows with NaN or infinity: {', '.join(counts)}")
    file_count = sum(len(info.files) for info in chain) + len(chain)
    checksums = f"{file_count} files good" if verify else "not verified"
    print_line(f"checksums       {checksums}")


def _print_run(
    path: Path,
    checkpoints: Sequence[CheckpointInfo],
    cold_stores: Sequence[Run],
    as_json: bool,
) -> None:
    if as_json:
        print_json(
            {
                "path": str(path),
                "checkpoints": [_summary_as_json(info) for info in checkpoints],
                "cold_stores": [
                    {**asdict(run), "path": str(run.path)} for run in cold_stores
                ],
            }
        )
        return
    if checkpoints:
        rows = []
        for info in checkpoints:
            base = "" if info.base is None else info.base.name
            rows.append(
                [
                    info.path.name,
                    f"{info.step:,}",
                    f"{_rows_of([info]):,}",
                    f"{info.world_size:,}",
                    decimal(info.bytes),
                    base,
                ]
            )
        print_table(["checkpoint", "step", "rows", "ranks", "bytes", "delta of"], rows)
    if cold_stores:
        rows = []
        for run in cold_stores:
            directory = str(run.path.relative_to(path))
            rows.append(
                [
                    directory,
                    run.shard,
                    run.owner or "ended",
                    decimal(run.bytes),
                ]
            )
        print_table(["cold store", "shard", "process", "bytes"], rows)
    command = removal(cold_stores)
    if command:
        print_line(f"remove those of processes that have ended: {command}")


def _summary_as_json(info: CheckpointInfo) -> dict[str, Any]:
    return {
        **_facts(info),
        "rows": _rows_of([info]),
        "delta_of": None if info.base is None else str(info.base),
    }


def _inspect_served_file(
    path: Path,
    verify: bool,
    key: Path | None,
    as_json: bool,
) -> None:
    with errors_in_one_line(), missing_in_one_line():
        serving = plugin("serving")
        rows_file = path.with_suffix(".safetensors")
        is_program = serving.is_program(path)
        if verify:
            serving.verify(path, key=key)
            if is_program:
                serving.verify(rows_file, key=key)
        if is_program:
            contents = serving.described_full(path, rows_file)
        else:
            contents = serving.described(path)
        contents["verified"] = verify
    if as_json:
        print_json(contents)
        return
    _print_served(contents, key)


_PRINTED_APART = (
    "tables",
    "dense",
    "bytes",
    "verified",
    "publications",
    "time",
)


def _print_served(contents: dict[str, Any], key: Path | None) -> None:
    """Prints what an exported file, or the newest of several publications, has."""
    for name, value in contents.items():
        if name not in _PRINTED_APART:
            print_line(f"{name:<15} {value}")
    if "dense" in contents:
        print_line(f"dense tensors   {len(contents['dense'])}")
    print_line(f"size            {decimal(contents['bytes'])}")
    if "tables" in contents:
        _print_served_tables(contents["tables"])
    print_line(f"checksum        {'good' if contents['verified'] else 'not verified'}")
    if key is not None:
        print_line(f"signature       good, of {key}")


def _inspect_publications(
    path: Path,
    verify: bool,
    key: Path | None,
    as_json: bool,
) -> None:
    with errors_in_one_line(), missing_in_one_line():
        serving = plugin("serving")
        contents = serving.described_publications(path, verified=verify, key=key)
        contents["verified"] = verify
    if as_json:
        print_json(contents)
        return
    rows = []
    for publication in contents["publications"]:
        time = datetime.fromtimestamp(publication["time"], timezone.utc)
        changes = [publication["changed"], publication["removed"]]
        rows.append(
            [
                str(publication["number"]),
                time.strftime("%Y-%m-%d %H:%M:%S"),
                "yes" if publication["full"] else "",
                *("" if count is None else f"{count:,}" for count in changes),
                decimal(publication["bytes"]),
                publication["version"],
            ]
        )
    columns = [
        "number",
        "time (UTC)",
        "full",
        "changed",
        "removed",
        "bytes",
        "version",
    ]
    print_table(columns, rows)
    _print_served(contents, key)


def _print_served_tables(tables: dict[str, dict[str, int]]) -> None:
    first_table = next(iter(tables.values()), {})
    rows = []
    for name, table in in_order(tables):
        row = [name]
        for key, number in table.items():
            if key == "bytes":
                row.append(decimal(number))
            else:
                row.append(f"{number:,}")
        rows.append(row)
    print_table(["table", *first_table], rows)


def sign(
    package: Annotated[
        Path,
        argument(
            "PACKAGE.pt2", "Package of AOTInductor, or exported program of torch."
        ),
    ],
    key: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="File with the secret key.",
            show_default=False,
        ),
    ],
) -> None:
    """Sign a package, so that those who have the key know who has written it.

    The package is replaced by one with a checksum and a signature, which torch and
    Triton load as before. Exported models are signed by recstore export --key.

    Example: recstore sign model.pt2 --key publish.key

    Exit status: 0, or 2 if the file is no package or cannot be written. One line on
    stderr then says why.
    """
    with errors_in_one_line(), missing_in_one_line():
        plugin("serving").sign_package(package, key=key)
    print_line(f"signed {package} with the key {key}")


def _print_checkpoint(chain: Sequence[CheckpointInfo]) -> None:
    info = chain[-1]
    state = _state_keys(info)
    bases = [str(delta.base) for delta in chain[:0:-1]]
    print_line(f"checkpoint      {info.path}")
    print_line(f"step            {info.step:,}")
    print_line(f"world size      {info.world_size}")
    print_line(f"delta of        {', a delta of '.join(bases) or 'nothing: full'}")
    print_line(f"dense tensors   {len(info.dense)}")
    print_line(
        f"training state  {state if isinstance(state, str) else ', '.join(state)}"
    )
    print_line(f"size            {decimal(info.bytes)} in {len(info.files) + 1} files")
    columns = [
        "table",
        "rows",
        "dim",
        "dtype",
        "optimizer",
        "bytes",
        "parts",
    ]
    rows = []
    for name, table in in_order(info.tables):
        values = _table_as_json(info, table)
        row = [
            name,
            f"{table.rows:,}",
            str(table.dim),
            table.dtype,
            type(table.optimizer).__name__,
            decimal(values["bytes"]),
            str(len(table.parts)),
        ]
        if info.delta_of:
            # A delta holds only a part of the rows of each table.
            row.insert(2, f"{values['rows_here']:,}")
        rows.append(row)
    if info.delta_of:
        columns.insert(2, "here")
    print_table(columns, rows)


def _facts(info: CheckpointInfo) -> dict[str, Any]:
    return {
        "path": str(info.path),
        "step": info.step,
        "world_size": info.world_size,
        "bytes": info.bytes,
    }


def _as_json(chain: Sequence[CheckpointInfo]) -> dict[str, Any]:
    info = chain[-1]
    return {
        **_facts(info),
        "chain": [str(checkpoint.path) for checkpoint in chain],
        "dense": list(info.dense),
        "training_state": _state_keys(info),
        "tables": {
            name: _table_as_json(info, table) for name, table in info.tables.items()
        },
    }


def _state_keys(info: CheckpointInfo) -> list[str] | str:
    """Returns the keys of the training state, or its type if it is no dict."""
    state = info.training_state
    if isinstance(state, dict):
        return [str(key) for key in state]
    return "none" if state is None else type(state).__name__


def _table_as_json(info: CheckpointInfo, table: TableInfo) -> dict[str, Any]:
    # Each row has a part for each range of columns.
    first_columns = [part for part in table.parts if part.columns == table.columns[0]]
    files = [info.files[part.file] for part in (*table.parts, *table.removed)]
    return {
        "rows": table.rows,
        "dim": table.dim,
        "dtype": table.dtype,
        "steps": table.steps,
        "optimizer_steps": table.optimizer_steps,
        "columns": table.columns,
        "optimizer": repr(table.optimizer),
        "options": repr(table.options),
        "parts": len(table.parts),
        "rows_here": sum(part.rows for part in first_columns),
        "bytes": sum(file.bytes for file in files),
    }


def diff(
    a: Annotated[Path, argument("A", "Directory of the first checkpoint.")],
    b: Annotated[Path, argument("B", "Directory of the second checkpoint.")],
    as_json: AsJson = False,
) -> None:
    """Compare the contents of two checkpoints.

    The checkpoints may have different numbers of ranks and different sharding, and may
    be deltas.

    Example: recstore diff run/step-000001000 run/step-000002000

    Exit status: 0 if the contents are equal, 1 if they differ, 2 if the checkpoints
    cannot be compared.
    """
    from torchrec_recstore.checkpoint.compare import compare_chains
    from torchrec_recstore.checkpoint.info import read_chain

    with errors_in_one_line():
        first = read_chain(a)
        second = read_chain(b)
        distinct = {info.path: info for info in (*first, *second)}
        _verify(list(distinct.values()))
        with progress("comparing", _rows_of([first[-1], second[-1]])) as advance:
            difference = compare_chains(first, second, advance)
    if as_json:
        print_json(_difference_as_json(difference))
    else:
        _print_difference(difference)
    raise typer.Exit(0 if difference.equal else 1)


def _print_difference(difference: CheckpointDifference) -> None:
    differences = [*in_order(difference.tables), ("dense tensors", difference.dense)]
    rows = []
    tables_of_facts: dict[str, list[str]] = defaultdict(list)
    for name, table in differences:
        rows.append(
            [
                name,
                f"{table.both:,}",
                f"{table.added:,}",
                f"{table.gone:,}",
                f"{table.changed:,}",
                _change_text(table.largest.get("weight")),
                _change_text(_largest_change_of_states(table)),
            ]
        )
        for fact, (before, after) in table.facts.items():
            tables_of_facts[f"{fact} {before} -> {after}"].append(name)
    print_table(
        [
            "",
            "in both",
            "added",
            "gone",
            "changed",
            "weights by",
            "state by",
        ],
        rows,
    )
    for fact, names in tables_of_facts.items():
        has_all_tables = len(names) == len(difference.tables)
        print_line(f"{fact} ({'all tables' if has_all_tables else ', '.join(names)})")
    if difference.training_state:
        print_line("training state differs")
    print_line("equal" if difference.equal else "different")


def _change_text(change: float | None) -> str:
    return "" if change is None else f"{change:.3g}"


def _largest_change_of_states(table: Difference) -> float | None:
    """Returns the largest change of an optimizer state; NaN is larger than any number."""
    changes = [change for key, change in table.largest.items() if key != "weight"]
    if not changes:
        return None
    return max(changes, key=lambda change: math.inf if math.isnan(change) else change)


def _difference_as_json(difference: CheckpointDifference) -> dict[str, Any]:
    def as_json(table: Difference) -> dict[str, Any]:
        facts = {}
        for name, values in table.facts.items():
            facts[name] = [
                value if isinstance(value, int | str) else repr(value)
                for value in values
            ]
        # JSON has neither NaN nor infinity.
        largest = {
            key: change if math.isfinite(change) else None
            for key, change in table.largest.items()
        }
        return {
            **asdict(table),
            "largest": largest,
            "facts": facts,
        }

    return {
        "equal": difference.equal,
        "tables": {name: as_json(table) for name, table in difference.tables.items()},
        "dense": as_json(difference.dense),
        "training_state_differs": difference.training_state,
    }


def compact(
    checkpoint: Checkpoint,
    output: Annotated[Path, argument("OUTPUT", "Directory to create.")],
    as_json: AsJson = False,
) -> None:
    """Fold a delta and the checkpoints that it is based on into one full checkpoint
    with the same contents.

    Example: recstore compact run/step-000002000 full

    Exit status: 0, or 2 with one line on stderr. In that case nothing is created at
    OUTPUT.
    """
    from torchrec_recstore.checkpoint.fold import compact_chain, folding

    with errors_in_one_line(), folding(checkpoint, output) as (chain, destination):
        _verify(chain)
        with (
            warnings_in_one_line(),
            progress("folding", _rows_of(chain[-1:])) as advance,
        ):
            info = compact_chain(chain, destination, advance)
    rows = _rows_of([info])
    if as_json:
        tables = {name: table.rows for name, table in info.tables.items()}
        print_json(
            {
                "path": str(info.path),
                "rows": rows,
                "bytes": info.bytes,
                "tables": tables,
            }
        )
        return
    print_line(f"{info.path}: {rows:,} rows, {decimal(info.bytes)}")
