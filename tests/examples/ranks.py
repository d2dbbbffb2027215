"""The training of DLRM on several ranks without torchrun, because each process of torchrun imports everything first."""

from __future__ import annotations

from functools import partial

import trainer
from common.report import write_json
from settings import Settings

from ..distributed.workers import run_on_ranks


def train_on_ranks(world_size: int, settings: Settings) -> None:
    """Trains as ``examples/dlrm/train.py`` does under torchrun. Writes the result as JSON."""
    run_on_ranks(world_size, partial(_train, settings))


def _train(settings: Settings, rank: int, world_size: int) -> None:
    result = trainer.train_in_group(settings)
    if rank == 0:
        write_json(settings.json_out, result)
