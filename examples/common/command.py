"""What every example's command does around its work; free of torch, so that ``--help`` answers at once."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import NoReturn

from torchrec_recstore.commands.output import status_of


class DataError(ValueError):
    """The input cannot be used; the message names the file or the flag."""


def prepare_torch() -> None:
    """Sets what torch reads when it is imported; errors still show, but not what no user of an example can act on."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # OpenMP's threads wait by spinning for milliseconds, which on a machine with other work slows training tenfold.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def run(app: Callable[..., object]) -> NoReturn:
    """Runs a typer app and leaves the process with its status: 2, with one line on stderr, for flags that are wrong."""
    status: object
    try:
        status = status_of(lambda: app(standalone_mode=False))
    except SystemExit as end:
        status = end.code or 0
    leave(status if isinstance(status, int) else 1)


def leave(status: int = 0) -> NoReturn:
    """Ends the process now: gloo's threads abort in about one of ten orderly shutdowns, after all work is done."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
