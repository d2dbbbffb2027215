"""Runs the trainer or the generator of an online run.

The supervisor starts it: worker.py trainer FOLDER.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from common.command import leave, prepare_torch

from online.settings import Settings
from torchrec_recstore.commands.output import errors_in_one_line, status_of


def work(role: str, folder: Path) -> None:
    """Runs one process of a run to its end."""
    with errors_in_one_line():
        settings = Settings.read(folder)
        if role == "trainer":
            prepare_torch()
            from online.trainer import train

            train(settings)
        else:
            from online.generator import generate

            generate(settings)


if __name__ == "__main__":
    _, role, folder = sys.argv
    leave(status_of(lambda: work(role, Path(folder))))
