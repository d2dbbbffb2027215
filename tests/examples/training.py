"""The training of DLRM in this process, and on several ranks without torchrun, which
would import everything again.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import train
from common.processes import process_group

from ..distributed.workers import run_on_ranks


def settings_of(**changes: Any) -> train.Settings:
    """Settings of a small run that writes nothing."""
    small = {"num_embeddings": 100, "no_log": True}
    return train.Settings(**small | changes)


def train_here(settings: train.Settings) -> dict[str, Any]:
    """Trains as ``examples/dlrm/train.py`` does, and returns the result."""
    with process_group():
        return train.train(settings)


def train_on_ranks(world_size: int, settings: train.Settings) -> None:
    """Trains as ``examples/dlrm/train.py`` does under torchrun."""
    run_on_ranks(world_size, partial(_train, settings))


def _train(settings: train.Settings, rank: int, world_size: int) -> None:
    train.train(settings)
