"""The flags of what a run writes down, for every example; free of torch, so that ``--help`` answers at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

LOG = "Curves and report"

LogDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="TensorBoard curves while it trains, report.html at the end.",
        show_default="runs/<example>-<date>-<time>, or the folder log in that of --checkpoint",
        rich_help_panel=LOG,
    ),
]
NoLog = Annotated[bool, typer.Option("--no-log", help="Neither curves nor report.", rich_help_panel=LOG)]
LogEvery = Annotated[
    int, typer.Option(min=1, metavar="N", help="Steps from one point of a curve to the next.", rich_help_panel=LOG)
]
JsonOut = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="OUT",
        help="Write the result as JSON; to stdout for -, and the tables to stderr.",
        allow_dash=True,
        rich_help_panel=LOG,
    ),
]
