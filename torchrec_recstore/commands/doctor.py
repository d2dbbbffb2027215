"""The command ``recstore doctor``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from torchrec_recstore.commands.output import AsJson, print_json, print_line, stdout
from torchrec_recstore.doctor import examine
from torchrec_recstore.doctor.machine import Finding

_STYLES = {
    "ok": "green",
    "warning": "yellow",
    "problem": "bold red",
}
_WIDTH = 28  # of the columns status and name


def doctor(
    data: Annotated[
        Path,
        typer.Option(
            metavar="DIR", help="Directory on the disk for checkpoints and cold rows."
        ),
    ] = Path(),
    cold_store: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR",
            help=(
                "Path of a cold store on an SSD, or a directory above it: list the"
                " directories that killed processes "
                "have left there. May be repeated."
            ),
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check the packages and settings of this machine and suggest fixes.

    The packages are imported in a separate process, to check that their versions fit
    each other. Then the processor, the memory and its limits, overcommit, huge pages,
    threads, open files and the disk are checked, and the cold stores that are named.
    The command changes nothing.

    Example: recstore doctor --data /ssd/checkpoints --cold-store /ssd/cold

    Exit status: 0, or 1 if there is a problem. Warnings do not change the exit status.
    """
    findings: list[tuple[str, Finding]] = []
    for section, finding in examine(data, cold_store or ()):
        if not as_json:
            if not findings or findings[-1][0] != section:
                stdout().print(Text(section, style="bold"))
            _print(finding)
        findings.append((section, finding))
    statuses = [finding.status for _, finding in findings]
    problems = statuses.count("problem")
    warnings = statuses.count("warning")
    if as_json:
        rows = [
            {"section": section, **asdict(finding)} for section, finding in findings
        ]
        print_json(
            {
                "problems": problems,
                "warnings": warnings,
                "findings": rows,
            }
        )
    else:
        print_line(
            f"{_count_of(problems, 'problem')}, {_count_of(warnings, 'warning')}"
        )
    raise typer.Exit(1 if problems else 0)


def _count_of(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _print(finding: Finding) -> None:
    head = Text.assemble(
        "  ",
        (f"{finding.status:<8}", _STYLES[finding.status]),
        f"{finding.name:<18}",
    )
    lines = Text(finding.found)
    if finding.fix:
        lines.append(f"\n{finding.fix}", style="cyan")
    console = stdout()
    indent: Text | str = head
    for line in lines.wrap(console, max(20, console.width - _WIDTH)):
        console.print(Text.assemble(indent, line), soft_wrap=True)
        indent = " " * _WIDTH
