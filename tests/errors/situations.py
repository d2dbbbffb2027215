"""Functions that cause the errors of docs/errors.md, by the title of the entry."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import TypeVar

_Situation = TypeVar("_Situation", bound=Callable[..., object])
SITUATIONS: dict[str, Callable[..., object]] = {}
"""Each function raises the error of its title. Its parameters are fixtures of pytest."""


def raise_from_a_fork(call: Callable[[], object]) -> None:
    """Runs ``call`` in a forked process, and raises the error of that process in this process."""
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


def situation(title: str) -> Callable[[_Situation], _Situation]:
    """Registers the function that causes the error with this title."""

    def register(function: _Situation) -> _Situation:
        assert title not in SITUATIONS
        SITUATIONS[title] = function
        return function

    return register
