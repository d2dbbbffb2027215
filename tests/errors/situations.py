"""What goes wrong for users, by the title that docs/errors.md has for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_Situation = TypeVar("_Situation", bound=Callable[..., object])
SITUATIONS: dict[str, Callable[..., object]] = {}
"""Each raises the error of its title; its parameters are pytest's fixtures."""


def situation(title: str) -> Callable[[_Situation], _Situation]:
    """Registers a function that gets into the situation of that title."""

    def register(function: _Situation) -> _Situation:
        assert title not in SITUATIONS
        SITUATIONS[title] = function
        return function

    return register
