"""``recstore train``: the DLRM example, with its own flags."""

from __future__ import annotations

import importlib
import sys

import typer

from torchrec_recstore.commands.output import errors_in_one_line
from torchrec_recstore.commands.shipped import folder_of, how_to_install


def train(context: typer.Context) -> None:
    """Train TorchRec's DLRM with RecStore tables on a Criteo click log, or on generated rows.

    The flags are those of examples/dlrm/train.py, which recstore train --help lists.

    Example: recstore train --data train.txt --dim 64 --checkpoint run

    On several processes: torchrun --nproc-per-node 2 --no-python recstore train --sharding row_wise

    Exit status: 0, or 2 with one line on stderr for input that cannot be used.
    """
    with errors_in_one_line():
        folder = folder_of("examples") / "dlrm"
        sys.path.insert(0, str(folder))
        try:
            # The folder's own train.py: it stands first on the path.
            script = importlib.import_module("train")
            # Before its work begins, and not after rows have been read; --help needs neither.
            if not {"--help", "--version"} & set(context.args):
                importlib.import_module("common.command").prepare_torch()
                importlib.import_module("trainer")
            run = importlib.import_module("common.command").run
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] == "torchrec_recstore":
                raise
            raise ValueError(f"{error.name} is missing: {how_to_install(error.name)}") from None
    run(lambda: script.app(context.args, prog_name="recstore train"))
