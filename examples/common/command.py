"""What every example's command does around its work; free of torch, so that ``--help`` answers at once."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn


class DataError(ValueError):
    """The input cannot be used; the message names the file or the flag."""


def prepare_torch() -> None:
    """Sets what torch reads when it is imported; errors still show, but not what no user of an example can act on."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # OpenMP's threads wait by spinning for milliseconds, which on a machine with other work slows training tenfold.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


@contextmanager
def data_errors_in_one_line() -> Iterator[None]:
    """Ends the process with status 2 and one line on stderr where its body raises a :class:`DataError`."""
    try:
        yield
    except DataError as error:
        # Such an error is the same on every rank.
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def run(app: Callable[..., object]) -> NoReturn:
    """Runs a typer app and leaves the process with its status: 2, with one line on stderr, for flags that are wrong."""
    import typer

    status: object = 0
    try:
        status = app(standalone_mode=False) or 0
    except typer.BadParameter.__mro__[1] as error:  # of all errors of usage: it has no public name
        if os.environ.get("RANK", "0") == "0":
            message = " ".join(error.format_message().split()).rstrip(".")
            print(f"error: {message}: see {error.ctx.command_path} --help", file=sys.stderr)
        status = 2
    except typer.Abort:
        status = 130
    except SystemExit as end:
        status = end.code or 0
    leave(status if isinstance(status, int) else 1)


def leave(status: int = 0) -> NoReturn:
    """Ends the process now: gloo's threads abort in about one of ten orderly shutdowns, after all work is done."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
