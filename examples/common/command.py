"""Functions that start and end the command of every example. They do not import torch, so that ``--help`` is fast."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import NoReturn

from torchrec_recstore.commands.output import status_of


class DataError(ValueError):
    """The input is invalid. The message names the file or the flag."""


def prepare_torch() -> None:
    """Sets the environment that torch reads at its import, and hides warnings that users of an example cannot fix."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Threads of OpenMP spin for milliseconds while they wait. If other programs use the cores, this slows training down
    # by a factor of ten.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def run(app: Callable[..., object]) -> NoReturn:
    """Runs a typer app and exits with its status. For invalid flags it prints one line on stderr and exits with 2."""
    status: object
    try:
        status = status_of(lambda: app(standalone_mode=False))
    except SystemExit as end:
        status = end.code or 0
    leave(status if isinstance(status, int) else 1)


def leave(status: int = 0) -> NoReturn:
    """Ends the process without a normal shutdown, because gloo's threads abort in about one of ten normal shutdowns."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
