"""Copies of models in which other modules stand in the place of some."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import DistributedModelParallel


def copied_with(model: nn.Module, replaced: dict[int, Any]) -> nn.Module:
    """A copy of a model, without the wrappers that make it parallel.

    Args:
        model: left as it is.
        replaced: what stands for each module or tensor, by its ``id``; ``copy.deepcopy``'s memory afterwards.
    """
    for module in reversed(list(model.modules())):  # inner ones first
        if isinstance(module, DistributedModelParallel | DistributedDataParallel) and id(module) not in replaced:
            replaced[id(module)] = copy.deepcopy(module.module, replaced)
    copied: nn.Module = copy.deepcopy(model, replaced)
    return copied
