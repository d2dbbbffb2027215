"""Write report.html for the log of a run that was killed or is still training.

python examples/report.py runs/dlrm-20261121-150000
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import typer

sys.path.insert(0, str(Path(__file__).parent))

from common.command import run
from common.settings import settings_of_flags


@dataclass(frozen=True)
class Settings:
    """Write report.html and its plots from the log of a run.

    The run need not have ended.
    """

    log_dir: Path = field(
        metadata={"flag": typer.Argument(help="Folder with the curves of the run.")}
    )


def main(log_dir: Path) -> None:
    """Writes the report and prints its path."""
    from common.page import write_report  # not above: it imports torch

    print(write_report(log_dir))


if __name__ == "__main__":
    settings = settings_of_flags(Settings)
    run(lambda: main(settings.log_dir))
