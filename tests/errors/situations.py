"""Functions that cause the errors of the package, each with the class and the message
of its error.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

_Function = TypeVar("_Function", bound=Callable[..., object])


@dataclass(frozen=True)
class Situation:
    """A function that raises an error. Its parameters are fixtures of pytest.

    If its docstring is not empty, docs/errors.md has it: a title, a blank line, and
    "Cause: ... Fix: ...". Errors whose message says what to do need none. The page
    begins with the entries that are ``first``.
    """

    kind: str  # the name of the error's class
    message: str  # "..." stands for any text
    function: Callable[..., object]
    first: bool = False


SITUATIONS: dict[str, Situation] = {}
"""By the name of the function."""


def situation(
    kind: str, message: str, *, first: bool = False
) -> Callable[[_Function], _Function]:
    """Registers the function that causes an error of this class and message."""

    def register(function: _Function) -> _Function:
        assert function.__name__ not in SITUATIONS
        SITUATIONS[function.__name__] = Situation(kind, message, function, first)
        return function

    return register


def raise_from_a_fork(call: Callable[[], object]) -> None:
    """Runs ``call`` in a forked process, and raises the error of that process in this
    process.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            call()
        except Exception as error:
            os.write(write, pickle.dumps(error))
        os._exit(0)
    os.close(write)
    with open(read, "rb") as file:
        error = file.read()
    os.waitpid(child, 0)
    raise pickle.loads(error)
