"""Sets of ids as tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def among(ids: Tensor, ascending: Tensor) -> Tensor:
    """Which of ``ids``, (N,), are in ``ascending``, (M,): (N,) bool. A few times faster than ``torch.isin``."""
    if not len(ascending):
        return torch.zeros_like(ids, dtype=torch.bool)
    return ascending[torch.searchsorted(ascending, ids).clamp_(max=len(ascending) - 1)] == ids
