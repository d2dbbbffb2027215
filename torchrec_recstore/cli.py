"""The command ``recstore``.

Exit status: 0; 1 if ``diff`` found a difference, ``doctor`` a problem, ``servers
status`` servers that do not agree, or a benchmark failed; 2 for invalid input, with one
line on stderr.

Tests: tests/test_plugins.py and tests/commands/test_order.py.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

from torchrec_recstore import __version__
from torchrec_recstore.installing import install
from torchrec_recstore.plugins import commands, missing

try:
    import typer

    from torchrec_recstore.commands.checkpoints import compact, diff, inspect, sign
    from torchrec_recstore.commands.doctor import doctor
    from torchrec_recstore.commands.explore import neighbours, top
    from torchrec_recstore.commands.output import (
        errors_in_one_line,
        print_error,
        status_of,
    )
    from torchrec_recstore.commands.plan import plan
    from torchrec_recstore.commands.scripts import bench, train
except ModuleNotFoundError as error:
    if error.name not in ("typer", "rich", "click"):
        raise
    print(
        f"error: {error.name} is missing: {install('cli')}",
        file=sys.stderr,
    )
    raise SystemExit(2) from None

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

app = typer.Typer(
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # joins the lines of a docstring to paragraphs
)

JOBS = "Training and serving"
CHECKPOINTS = "Checkpoints"
MACHINE = "This machine"
# The flags of the script, including --help, are passed on to the script.
_PASS_ON = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}


def _print_version(is_given: bool) -> None:
    if is_given:
        print(f"recstore {__version__}")
        raise typer.Exit


@app.callback(
    help=(
        "Train with RecStore tables, inspect their checkpoints, and export and serve"
        " the tables. The --help of each command shows an example."
    )
)
def recstore(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Show the version and exit.",
        ),
    ] = False,
) -> None:
    """The command of torchrec_recstore."""


def _of_others(name: str, entry: EntryPoint | None) -> Any:
    """Returns a command of another distribution, or one that says why it is missing."""
    try:
        if entry is None:
            raise missing(name)
        return entry.load()
    except ImportError as error:
        reason = str(error)
    except AttributeError as error:  # the entry point of another version
        reason = str(error)

    def say_why(context: typer.Context) -> None:
        with errors_in_one_line():
            raise ValueError(reason)

    return say_why


app.command(rich_help_panel=JOBS, context_settings=_PASS_ON)(train)
app.command(rich_help_panel=JOBS)(plan)
for _name, _entry in commands().items():
    _command = _of_others(_name, _entry)
    if isinstance(_command, typer.Typer):
        app.add_typer(_command, name=_name, rich_help_panel=JOBS)
    elif _command.__module__ == __name__:  # it only says why it cannot be used
        app.command(
            _name,
            rich_help_panel=JOBS,
            hidden=True,
            context_settings=_PASS_ON,
        )(_command)
    else:
        app.command(_name, rich_help_panel=JOBS)(_command)
for _checkpoint_command in (inspect, diff, compact, sign, top, neighbours):
    app.command(rich_help_panel=CHECKPOINTS)(_checkpoint_command)
app.command(rich_help_panel=MACHINE)(doctor)
app.command(rich_help_panel=MACHINE)(bench)


def main() -> None:
    """Runs the command ``recstore``."""
    status = status_of(_run)
    try:
        sys.stdout.flush()
    except OSError as error:
        if status != 2:
            print_error(f"stdout: {error.strerror}")
        # Python flushes stdout again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        status = 2
    sys.exit(status)


def _run() -> object:
    arguments = sys.argv[1:] or ["--help"]
    with errors_in_one_line():
        return app(arguments, prog_name="recstore", standalone_mode=False)


if __name__ == "__main__":
    main()
