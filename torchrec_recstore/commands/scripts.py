"""The commands that run scripts of the project: ``train`` and ``bench``.

Tests: tests/commands/test_bench.py, tests/commands/test_train.py.
"""

from __future__ import annotations

import ast
import importlib
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from torchrec_recstore.commands.output import (
    AsJson,
    errors_in_one_line,
    print_json,
    print_line,
    print_table,
)
from torchrec_recstore.commands.progress import steps
from torchrec_recstore.installing import install
from torchrec_recstore.triples import DEFAULT

# The extra in pyproject.toml that installs each package.
_EXTRAS = {
    "rocksdict": "rocksdb",
    "redis": "redis",
    "hiredis": "redis",
    "tornado": "predict",
    "matplotlib": "examples",
    "polars": "examples",
    "rich": "examples",
    "tensorboard": "examples",
    "torchmetrics": "examples",
    "tqdm": "examples",
    "typer": "examples",
    "grpc": "service",
    "grpc_health": "service",
    "grpc_reflection": "service",
    "google": "service",
    "prometheus_client": "service",
}
_OF_TORCHREC = (
    "torchrec",
    "fbgemm_gpu",
    "tensordict",
    "iopath",
    "pyre_extensions",
)
_PACKAGE = Path(__file__).resolve().parents[1]


def _folder_of(name: str) -> Path:
    """Returns the path of the folder ``examples`` or ``benchmarks``."""
    for folder in (_PACKAGE / name, _PACKAGE.parent / name):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"this installation of torchrec_recstore has no {name}: install the wheel"
    )


@contextmanager
def missing_in_one_line() -> Iterator[None]:
    """Turns a failed import into a ``ValueError`` that says what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("torchrec_recstore"):
            raise
        raise ValueError(
            f"{error.name} is missing: {how_to_install(error.name)}"
        ) from None
    except ImportError as error:
        # not that of plugins.missing
        if not (error.name or "").startswith("torchrec-recstore-"):
            raise
        raise ValueError(str(error)) from None


def how_to_install(module: str) -> str:
    """Returns the command that installs a module whose import failed."""
    package = module.partition(".")[0]
    if package in _OF_TORCHREC:
        return (
            f"{DEFAULT.install_on_cpu} (with CUDA: {install('torchrec')}; for another"
            " torch: recstore doctor)"
        )
    extras = _EXTRAS.get(package, "cli,examples,service")
    return install(extras)


def train(context: typer.Context) -> None:
    """Train TorchRec's DLRM with RecStore tables on a Criteo click log or on generated
    data.

    The command runs examples/dlrm/train.py and takes its flags.

    Example: recstore train --data train.txt --dim 64 --checkpoint run

    On several processes: torchrun --nproc-per-node 2 --no-python recstore train
    --sharding row_wise

    Exit status: 0, or 2 with one line on stderr for invalid input.
    """
    with errors_in_one_line(), missing_in_one_line():
        script = _folder_of("examples") / "dlrm" / "train.py"
        # train.py imports the other modules of its folder by their plain names
        sys.path.insert(0, str(script.parent))
        sys.argv[1:] = context.args
        runpy.run_path(
            str(script), init_globals={"COMMAND": "recstore train"}, run_name="__main__"
        )


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME", help="Names of the benchmarks to run.", show_default="all"
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help=(
                "Run small sizes, to test the benchmarks in seconds. Do not quote the"
                " results."
            ),
        ),
    ] = False,
    list_: Annotated[
        bool, typer.Option("--list", help="List the benchmarks and exit.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare the speed of RecStore tables on this machine with FBGEMM tables and with
    the limits of the hardware.

    Each benchmark runs in a separate process and measures both sides of a ratio in the
    same run. Files are written to the working directory or the directory for temporary
    files, and are deleted at the end. The benchmark kernel needs g++. All benchmarks
    together take about an hour.

    Example: recstore bench kernel store

    Exit status: 0, 1 if a benchmark failed, 2 if there is no benchmark of that name.
    """
    with errors_in_one_line():
        folder = _folder_of("benchmarks")
    # the scripts import each other by their plain names
    sys.path.insert(0, str(folder))
    scripts = importlib.import_module("scripts")
    summaries = {name: _summary(folder / f"{name}.py") for name in scripts.SCRIPTS}
    if list_ and as_json:
        print_json(summaries)
        return
    if list_:
        for name, summary in summaries.items():
            print_line(f"{name:<12}{summary}")
        return
    with errors_in_one_line():
        for name in names or ():
            if name not in summaries:
                known_names = ", ".join(summaries)
                raise ValueError(f"there is no benchmark {name!r}: {known_names}")
        with missing_in_one_line():
            measure = importlib.import_module("measure")
    distinct_names = list(dict.fromkeys(names or summaries))
    rows: list[dict[str, Any]] = []
    failed = False
    with steps(len(distinct_names)) as begin:
        for name in distinct_names:
            begin(name)
            lanes = ("shipped",) if quick else scripts.lanes_of(name)
            flags = scripts.QUICK[name] if quick else ()
            script = str(folder / f"{name}.py")
            # messages of libraries on stderr would break the bar
            with tempfile.TemporaryFile("w+") as errors:
                try:
                    rows += measure.run_lanes(script, lanes, flags, errors)
                except subprocess.CalledProcessError as error:
                    failed = True
                    _print_failure(name, error.returncode, errors)
    if as_json:
        print_json(rows)
    elif rows:
        print_figures(rows, quick)
    raise typer.Exit(1 if failed else 0)


def _print_failure(
    name: str,
    status: int,
    errors: IO[str],
) -> None:
    """Prints the last lines of a benchmark's stderr, and its exit status."""
    errors.seek(0)
    for line in errors.read().splitlines()[-20:]:
        print(line, file=sys.stderr)
    print(f"error: the benchmark {name} ended with status {status}", file=sys.stderr)


def print_figures(rows: list[dict[str, Any]], quick: bool) -> None:
    """Prints tables of the measurements, and the conditions of the run.

    The benchmarks must be on the import path.
    """
    figures = importlib.import_module("figures")
    for columns, lines in figures.tables(rows):
        rows_of_cells = []
        for figure in lines:
            rows_of_cells.append([cell.replace("`", "") for cell in figure])
        print_table(columns, rows_of_cells)
    run = rows[0]
    conditions = (
        f"{figures.machine(run['cpu'])}, {run['threads']} threads, torch"
        f" {run['torch']},"
        f" {run['commit']}; medians."
    )
    if quick:
        conditions += " Quick sizes: do not quote these results."
    print_line(conditions)


def _summary(script: Path) -> str:
    """Returns the first paragraph of a script's docstring, in one line."""
    docstring = ast.get_docstring(ast.parse(script.read_text())) or ""
    first_paragraph = docstring.partition("\n\n")[0]
    return " ".join(first_paragraph.replace("``", "").split())
