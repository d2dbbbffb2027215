"""The command ``recstore``.

    recstore train --data train.txt
    recstore inspect CHECKPOINT
    recstore diff A B
    recstore compact CHECKPOINT OUTPUT
    recstore export CHECKPOINT OUT.pt
    recstore serve --listen 127.0.0.1:7700 --data DIR
    recstore doctor
    recstore bench

Exit status: 0; 1 where ``diff`` found a difference or ``doctor`` a problem; 2 for input that cannot be used, with one
line on stderr.
"""

from __future__ import annotations

import os
import sys

try:
    import typer

    from torchrec_recstore.commands.checkpoints import compact, diff, inspect
    from torchrec_recstore.commands.doctor import doctor
    from torchrec_recstore.commands.export import export
    from torchrec_recstore.commands.output import errors_in_one_line, print_error, status_of
    from torchrec_recstore.commands.scripts import bench, train
    from torchrec_recstore.commands.serve import serve
except ModuleNotFoundError as error:
    if error.name not in ("typer", "rich", "click"):
        raise
    print(f"error: {error.name} is missing: pip install 'torchrec-recstore[cli]'", file=sys.stderr)
    raise SystemExit(2) from None

app = typer.Typer(
    help="Train with RecStore tables, look at their checkpoints, export and serve them. "
    "Each command has an example in its own --help.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # in which a docstring's lines are joined to paragraphs
)

JOBS, CHECKPOINTS, MACHINE = "Training and serving", "Checkpoints", "This machine"
# The script's flags are not known here, nor is its --help.
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

app.command(rich_help_panel=JOBS, context_settings=_PASS_ON)(train)
app.command(rich_help_panel=JOBS)(export)
app.command(rich_help_panel=JOBS)(serve)
app.command(rich_help_panel=CHECKPOINTS)(inspect)
app.command(rich_help_panel=CHECKPOINTS)(diff)
app.command(rich_help_panel=CHECKPOINTS)(compact)
app.command(rich_help_panel=MACHINE)(doctor)
app.command(rich_help_panel=MACHINE)(bench)


def main() -> None:
    """The command."""
    status = status_of(_run)
    try:
        sys.stdout.flush()
    except OSError as error:
        if status != 2:
            print_error(f"stdout: {error.strerror}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python tries once more at its end
        status = 2
    sys.exit(status)


def _run() -> object:
    with errors_in_one_line():
        return app(sys.argv[1:] or ["--help"], prog_name="recstore", standalone_mode=False)


if __name__ == "__main__":
    main()
