"""``recstore train``: the DLRM example, with its own flags."""

from __future__ import annotations

import importlib
import sys

import typer

from torchrec_recstore.commands.output import errors_in_one_line
from torchrec_recstore.commands.shipped import folder_of, missing_in_one_line


def train(context: typer.Context) -> None:
    """Train TorchRec's DLRM with RecStore tables on a Criteo click log, or on generated rows.

    The flags are those of examples/dlrm/train.py, which recstore train --help lists.

    Example: recstore train --data train.txt --dim 64 --checkpoint run

    On several processes: torchrun --nproc-per-node 2 --no-python recstore train --sharding row_wise

    Exit status: 0, or 2 with one line on stderr for input that cannot be used.
    """
    with errors_in_one_line():
        # The folder's own modules: train.py imports the others so.
        sys.path.insert(0, str(folder_of("examples") / "dlrm"))
        with missing_in_one_line():
            script = importlib.import_module("train")
            leave = importlib.import_module("common.command").run

    def run(**how: bool) -> object:
        with errors_in_one_line(), missing_in_one_line():
            return script.app(context.args, prog_name="recstore train", **how)

    leave(run)
