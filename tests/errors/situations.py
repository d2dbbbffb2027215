"""What goes wrong for users, by the title that docs/errors.md has for it."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import TypeVar

_Situation = TypeVar("_Situation", bound=Callable[..., object])
SITUATIONS: dict[str, Callable[..., object]] = {}
"""Each raises the error of its title; its parameters are pytest's fixtures."""


def raise_from_a_fork(call: Callable[[], object]) -> None:
    """Calls it in a forked process, and raises here what it raises there."""
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
    """Registers a function that gets into the situation of that title."""

    def register(function: _Situation) -> _Situation:
        assert title not in SITUATIONS
        SITUATIONS[title] = function
        return function

    return register
