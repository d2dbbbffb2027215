"""Fused optimizers: what a table's backward does to a row. Plain frozen dataclasses, no torch.

Notation: ``g`` is the sum of an id's gradients in a step, ``w`` its weights, ``D`` the columns of the shard.
Source: the GPU formulas in FBGEMM 1.8.0, ``fbgemm_gpu/codegen/genscript/optimizers.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


def _check(owner: object, **values: float) -> None:
    for field, value in values.items():
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{type(owner).__name__}.{field} must be finite and not negative, got {value}")


@dataclass(frozen=True)
class SGD:
    """``w -= lr * (g + weight_decay * w)``.

    Raises:
        ValueError: a value is negative or not finite.
    """

    lr: float = 0.01
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check(self, lr=self.lr, weight_decay=self.weight_decay)


@dataclass(frozen=True)
class Adagrad:
    """``g += weight_decay * w; m += g**2; w -= lr * g / (sqrt(m) + eps)``; ``m`` is ``(D,)`` a row, from zero.

    Raises:
        ValueError: a value is negative or not finite.
    """

    lr: float = 0.01
    eps: float = 1.0e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check(self, lr=self.lr, eps=self.eps, weight_decay=self.weight_decay)


@dataclass(frozen=True)
class RowWiseAdagrad:
    """``g += weight_decay * w; m += mean(g**2); w -= lr * g / (sqrt(m) + eps)``; ``m`` is one number a row, from zero.

    Raises:
        ValueError: a value is negative or not finite.
    """

    lr: float = 0.01
    eps: float = 1.0e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check(self, lr=self.lr, eps=self.eps, weight_decay=self.weight_decay)


Optimizer = SGD | Adagrad | RowWiseAdagrad


def state_names(optimizer: object) -> dict[str, str]:
    """A temporary stand-in."""
    return {Adagrad: {"momentum1": "element"}, RowWiseAdagrad: {"momentum1": "row"}}.get(type(optimizer), {})
