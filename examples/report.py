"""Write report.html for the log of a run that was killed or is still training.

python examples/report.py runs/dlrm-20261121-150000
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).parent))

from common.command import prepare_torch, run

from torchrec_recstore.commands.output import errors_in_one_line

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(log_dir: Annotated[Path, typer.Argument(help="Folder with the curves of the run.")]) -> None:
    """Write report.html and its plots from the log of a run. The run need not have ended."""
    prepare_torch()
    from common.page import write_report

    with errors_in_one_line():
        print(write_report(log_dir))


if __name__ == "__main__":
    run(app)
