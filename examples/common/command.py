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
def errors_in_one_line() -> Iterator[None]:
    """Ends the process with status 2 and one line on stderr where its body raises what a user can act on.

    That is an error of the input, of a file, of a cold store or server, and of memory.
    """
    try:
        yield
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _of_a_store(error):
            raise
        print(f"error: {_in_words(error)}", file=sys.stderr)
        raise SystemExit(2) from None


def _of_a_store(error: RuntimeError) -> bool:
    # Here and not above: this imports torch.
    from torchrec_recstore import ColdStoreError, ServiceError

    return isinstance(error, (ColdStoreError, ServiceError))


def _in_words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or ("out of memory" if isinstance(error, MemoryError) else type(error).__name__)


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
