"""Functions that start and end the command of every example.

They do not import torch, so that ``--help`` is fast.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import NoReturn

from torchrec_recstore import tune_threads
from torchrec_recstore.commands.output import errors_in_one_line, status_of


class DataError(ValueError):
    """The input is invalid. The message names the file or the flag."""


def prepare_torch() -> None:
    """Sets the environment that torch reads at its import, and hides warnings that
    users of an example cannot fix.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    tune_threads()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def run(work: Callable[[], object]) -> NoReturn:
    """Does the work of a command and ends the process.

    An error of the input is one line on stderr, and status 2.
    """

    def in_one_line() -> None:
        with errors_in_one_line():
            work()

    try:
        status = status_of(in_one_line)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    leave(status)


def leave(status: int = 0) -> NoReturn:
    """Ends the process without a normal shutdown, because gloo's threads abort in about
    one of ten normal shutdowns.

    The tables of the command are closed before, which removes their cold rows from the
    disk.
    """
    gc.collect()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
