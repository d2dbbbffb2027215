"""Every use, by topic in the order of the document.

Importing the topics registers their uses.
"""

from __future__ import annotations

from . import (
    copies,
    distributed_checkpoints,
    files,
    optimizers,
    state_dicts,
    trainers,
    training,
)
from .use import USES, Use

_TOPICS = (
    state_dicts,
    files,
    distributed_checkpoints,
    copies,
    optimizers,
    training,
    trainers,
)


def all_uses() -> list[Use]:
    """Every use."""
    order = [topic.__name__ for topic in _TOPICS]
    return sorted(USES, key=lambda use: order.index(use.function.__module__))
