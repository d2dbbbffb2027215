"""The ``recstore`` command: looks at checkpoints, compares and compacts them, serves tables.

    recstore inspect DIR
    recstore diff A B
    recstore compact CHECKPOINT OUTPUT
    recstore serve --listen 127.0.0.1:7700 --data DIR

Exit status: 0; 1 where ``diff`` found a difference; 2 for input that cannot be used, with one line on stderr.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

try:
    import typer
    from rich.console import Console
    from rich.filesize import decimal
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error.name} is missing: pip install 'torchrec-recstore[cli]'") from None

# torch takes seconds to import, which --help need not wait for: commands import what they need.
if TYPE_CHECKING:
    from torchrec_recstore.checkpoint.compare import CheckpointDifference, Difference
    from torchrec_recstore.checkpoint.info import CheckpointInfo, TableInfo

app = typer.Typer(
    help="Look at checkpoints of RecStore tables, compare them, fold deltas into a full one; serve tables.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Checkpoint = Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint's directory.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("inspect")
def inspect_(
    checkpoint: Checkpoint,
    verify: Annotated[bool, typer.Option(help="Read every file of the chain and compare its checksum.")] = True,
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint holds, and verify the checksums of it and of all that it is a delta of."""
    from torchrec_recstore.checkpoint.info import read_chain

    with _errors_in_one_line():
        chain = read_chain(checkpoint)
        if not as_json:
            _print_checkpoint(chain)
        if verify:
            _verify(chain)
        if as_json:
            print(json.dumps({**_as_json(chain), "verified": verify}, indent=1))
        else:
            files = sum(len(info.files) for info in chain) + len(chain)
            _out().print(f"checksums       {f'{files} files good' if verify else 'not verified'}", highlight=False)


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint's directory.", show_default=False)],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another's.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Compare what loading two checkpoints gives, whatever their ranks, shardings and deltas.

    Exit status: 0 if that is the same, 1 if not, 2 if they cannot be compared.
    """
    from torchrec_recstore.checkpoint.compare import compare_chains
    from torchrec_recstore.checkpoint.info import read_chain

    with _errors_in_one_line():
        first, second = read_chain(a), read_chain(b)
        _verify(list({info.path: info for info in (*first, *second)}.values()))
        with _progress("comparing", _rows([first[-1], second[-1]])) as advance:
            difference = compare_chains(first, second, advance)
    if as_json:
        print(json.dumps(_difference_as_json(difference), indent=1))
    else:
        _print_difference(difference)
    raise typer.Exit(0 if difference.equal else 1)


@app.command()
def compact(
    checkpoint: Checkpoint,
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="A new directory.", show_default=False)],
) -> None:
    """Fold a delta and all that it is a delta of into one full checkpoint, which loads to the same bits."""
    from torchrec_recstore.checkpoint.compact import check_output, compact_chain
    from torchrec_recstore.checkpoint.info import read_chain

    with _errors_in_one_line():
        check_output(output)
        chain = read_chain(checkpoint)
        _verify(chain)
        with _progress("folding", _rows(chain[-1:])) as advance:
            info = compact_chain(chain, output, advance)
    rows = sum(table.rows for table in info.tables.values())
    _out().print(f"{info.path}: {rows:,} rows, {decimal(info.bytes)}", highlight=False)


@app.command()
def serve(
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address; port 0 takes a free one.")],
    data: Annotated[Path, typer.Option(metavar="DIR", help="Directory of checkpoints; the last is loaded at start.")],
    tls_cert: Annotated[Path | None, typer.Option(metavar="PEM", help="Certificate of the server.")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="PEM", help="Its key.")] = None,
    client_ca: Annotated[
        Path | None, typer.Option(metavar="PEM", help="Clients need a certificate that is signed by one of these.")
    ] = None,
    token_file: Annotated[Path | None, typer.Option(metavar="FILE", help="The token that clients must show.")] = None,
    metrics: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Metrics for Prometheus.")] = None,
    max_rows: Annotated[int | None, typer.Option(help="Rows of each table in this server's memory.")] = None,
    eviction: Annotated[
        Literal["lru", "lfu"] | None, typer.Option(help="Which rows leave when there are more; needs --max-rows.")
    ] = None,
    half_life_steps: Annotated[int | None, typer.Option(help="Of LFU's frequencies, in updates.")] = None,
    expire_steps: Annotated[int | None, typer.Option(help="Rows that no update has met for longer leave.")] = None,
    min_frequency: Annotated[int | None, typer.Option(help="Updates that meet an id before it gets its row.")] = None,
    cold_store: Annotated[
        str | None, typer.Option(help="URL of a Redis server or a path for RocksDB, where evicted rows go.")
    ] = None,
    drop_idle_after: Annotated[
        float | None,
        typer.Option(metavar="HOURS", help="When a job's own cold rows are dropped that no call has asked for since."),
    ] = None,
) -> None:
    """Serve tables to RecStoreClient over gRPC, until SIGTERM or Ctrl-C; then save them.

    Other machines can only be let in with TLS and a token.
    """
    # Before torch is imported: each thread that serves calls has a team of torch's threads, which would else spin.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with _errors_in_one_line():
        try:
            from torchrec_recstore.service.serve import ServerOptions
            from torchrec_recstore.service.serve import serve as run
        except ModuleNotFoundError as error:
            raise ValueError(f"{error.name} is missing: pip install 'torchrec-recstore[service]'") from None
        from torchrec_recstore.flags import options_of_flags
        from torchrec_recstore.rpc.protocol import is_token
        from torchrec_recstore.service.limits import limits_of

        token = None if token_file is None else token_file.read_text().strip()
        if token is not None and not is_token(token):
            raise ValueError(f"--token-file {token_file} must hold printable ASCII characters without blanks")
        bounds = options_of_flags(
            max_rows=max_rows,
            eviction=eviction,
            half_life_steps=half_life_steps,
            expire_steps=expire_steps,
            min_frequency=min_frequency,
            cold_store=cold_store,
        )
        options = ServerOptions(
            listen=listen,
            data=data,
            limits=limits_of(bounds),
            tls_cert=tls_cert,
            tls_key=tls_key,
            client_ca=client_ca,
            token=token,
            metrics=metrics,
            idle_s=math.inf if drop_idle_after is None else 3600 * drop_idle_after,
        )
        run(options, lambda address: print(f"serving on {address}", flush=True))


def main() -> None:
    """The command."""
    app(prog_name="recstore")


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.strerror:
            message = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        else:
            message = str(error)
        print(f"error: {message}", file=sys.stderr)
        raise typer.Exit(2) from None


def _out() -> Console:
    # Where it is no terminal, lines are for other programs: not wrapped.
    return Console() if sys.stdout.isatty() else Console(width=1000)


@contextmanager
def _progress(what: str, total: int, in_bytes: bool = False) -> Iterator[Callable[[int], object]]:
    """A bar on stderr, if that is a terminal; gives what advances it."""
    console = Console(stderr=True)
    count = DownloadColumn() if in_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.advance(task, done)


def _verify(checkpoints: Sequence[CheckpointInfo]) -> None:
    from torchrec_recstore.checkpoint.fold import check_files

    with _progress("verifying", sum(info.bytes for info in checkpoints), in_bytes=True) as advance:
        check_files(checkpoints, advance)


def _rows(checkpoints: Sequence[CheckpointInfo]) -> int:
    return sum(table.rows for info in checkpoints for table in info.tables.values())


def _print_checkpoint(chain: Sequence[CheckpointInfo]) -> None:
    info, out = chain[-1], _out()
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
    table = _table(["table", "rows", *here, "dim", "dtype", "optimizer", "bytes", "parts"])
    for name, each in info.tables.items():
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


def _print_difference(difference: CheckpointDifference) -> None:
    out = _out()
    table = _table(["", "in both", "added", "gone", "changed", "weights by", "state by"])
    differences = [*difference.tables.items(), ("dense tensors", difference.dense)]
    for name, each in differences:
        counts = [f"{count:,}" for count in (each.both, each.added, each.gone, each.changed)]
        states = [change for key, change in each.largest.items() if key != "weight"]
        state = max(states, key=lambda change: math.inf if math.isnan(change) else change, default=None)
        table.add_row(Text(name), *counts, *(_change(change) for change in (each.largest.get("weight"), state)))
    out.print(table)
    of_tables: dict[str, list[str]] = defaultdict(list)
    for name, each in differences:
        for fact, (before, after) in each.facts.items():
            of_tables[f"{fact} {before} -> {after}"].append(name)
    for fact, names in of_tables.items():
        which = "all tables" if len(names) == len(difference.tables) else ", ".join(names)
        out.print(f"{fact} ({which})", highlight=False, markup=False, soft_wrap=True)
    if difference.training_state:
        out.print("training state differs", highlight=False)
    out.print("equal" if difference.equal else "different", highlight=False)


def _change(change: float | None) -> str:
    return "" if change is None else f"{change:.3g}"


def _difference_as_json(difference: CheckpointDifference) -> dict[str, Any]:
    def each(between: Difference) -> dict[str, Any]:
        return {
            "both": between.both,
            "added": between.added,
            "gone": between.gone,
            "changed": between.changed,
            # NaN and infinity are no JSON.
            "largest": {key: value if math.isfinite(value) else None for key, value in between.largest.items()},
            "facts": {name: [_plain(value) for value in pair] for name, pair in between.facts.items()},
        }

    return {
        "equal": difference.equal,
        "tables": {name: each(between) for name, between in difference.tables.items()},
        "dense": each(difference.dense),
        "training_state_differs": difference.training_state,
    }


def _plain(value: object) -> object:
    return value if isinstance(value, int | str) else repr(value)


def _table(columns: Sequence[str]) -> Table:
    table = Table()
    for column in columns:
        left = column in ("", "table", "dtype", "optimizer")
        table.add_column(column, justify="left" if left else "right", overflow="fold")
    return table


if __name__ == "__main__":
    main()
