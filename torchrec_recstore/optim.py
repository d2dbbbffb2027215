"""Fused optimizers: what a table's backward does to a row. Plain frozen dataclasses, no torch.

Notation: ``g`` is the sum of an id's gradients in a step, ``w`` its weights, ``D`` the columns of the shard, ``|x|``
the Euclidean norm over them, ``t`` the number of this update of the table, from 1 (one a backward, as FBGEMM's
``iter``). States start at zero; :func:`state_names` lists them.

Source, where no other is named: the GPU formulas in FBGEMM 1.8.0, ``fbgemm_gpu/codegen/genscript/optimizers.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

WeightDecayMode = Literal["l2", "decouple"]


@dataclass(frozen=True, kw_only=True, repr=False)
class _Fused:
    """What every optimizer has: its checks, and clipping of the gradient ahead of its formula."""

    max_gradient: float | None = None
    """Clip each element of each bag's gradient to +-this, before gradients are summed; FBGEMM's ``gradient_clipping``
    with ``max_gradient``."""

    max_gradient_norm: float | None = None
    """Scale ``g`` down to this norm where it is longer, row by row, before weight decay; FBGEMM has no such option."""

    def __post_init__(self) -> None:
        for field in fields(self):
            _check(type(self).__name__, field.name, getattr(self, field.name))

    def __repr__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        shown = ", ".join(f"{name}={value!r}" for name, value in values.items() if value is not None)
        return f"{type(self).__name__}({shown})"


def _check(owner: str, field: str, value: object) -> None:
    name = f"{owner}.{field}"
    if field.startswith("max_"):
        if value is not None and not (_is_finite(name, value) > 0):
            raise ValueError(f"{name} must be positive and finite, or None, got {value}")
    elif field == "weight_decay_mode":
        if value not in ("l2", "decouple"):
            raise ValueError(f"{name} must be 'l2' or 'decouple', got {value!r}")
    elif field == "betas":
        if not isinstance(value, tuple) or len(value) != 2:
            raise ValueError(f"{name} must be a tuple of two numbers, got {value!r}")
        for beta in value:
            _check_below_one(name, beta)
    elif field in ("momentum", "alpha"):
        _check_below_one(name, value)
    elif field == "lr_power":
        if _is_finite(name, value) > 0:
            raise ValueError(f"{name} must not be positive, got {value}")
    elif _is_finite(name, value) < 0:
        raise ValueError(f"{name} must be finite and not negative, got {value}")


def _is_finite(name: str, value: object) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return value


def _check_below_one(name: str, value: object) -> None:
    if not 0.0 <= _is_finite(name, value) < 1.0:
        raise ValueError(f"{name} must be at least 0 and below 1, got {value}")


@dataclass(frozen=True, repr=False)
class SGD(_Fused):
    """``g += weight_decay * w; w -= lr * g``.

    With ``momentum`` as in ``torch.optim.SGD``: ``m = momentum * m + g; w -= lr * m``, ``m`` being ``(D,)`` a row. An
    update moves the rows of its batch alone; FBGEMM's SGD has neither momentum nor weight decay.

    Raises:
        ValueError: a value out of range; the message names it.
    """

    lr: float = 0.01
    weight_decay: float = 0.0
    momentum: float = 0.0


@dataclass(frozen=True, repr=False)
class Adagrad(_Fused):
    """``g += weight_decay * w; m += g**2; w -= lr * g / (sqrt(m) + eps)``; ``m`` is ``(D,)`` a row.

    With ``weight_decay_mode="decouple"``: ``w *= 1 - lr * weight_decay`` instead of adding to ``g``. FBGEMM's Adagrad
    has no weight decay; this one is as its row-wise Adagrad's.

    Raises:
        ValueError: a value out of range; the message names it.
    """

    lr: float = 0.01
    eps: float = 1.0e-8
    weight_decay: float = 0.0
    weight_decay_mode: WeightDecayMode = "l2"


@dataclass(frozen=True, repr=False)
class RowWiseAdagrad(_Fused):
    """``g += weight_decay * w; m += mean(g**2); w -= lr * g / (sqrt(m) + eps)``; ``m`` is one number a row.

    With ``weight_decay_mode="decouple"``: ``w *= 1 - lr * weight_decay`` instead of adding to ``g``. With ``max_norm``:
    ``w *= max_norm / |w|`` after the update, where ``|w| > max_norm``.

    Raises:
        ValueError: a value out of range; the message names it.
    """

    lr: float = 0.01
    eps: float = 1.0e-8
    weight_decay: float = 0.0
    weight_decay_mode: WeightDecayMode = "l2"
    max_norm: float | None = None


@dataclass(frozen=True, repr=False)
class Adam(_Fused):
    """``w -= lr * (m' / (sqrt(v') + eps) + weight_decay * w)``: weight decay is decoupled, as in FBGEMM's ``adam``.

    ``m = b1 * m + (1 - b1) * g; v = b2 * v + (1 - b2) * g**2; m' = m / (1 - b1**t); v' = v / (1 - b2**t)`` with
    ``b1, b2 = betas``; ``m`` and ``v`` are ``(D,)`` a row. Rows outside the batch stay as they are, but ``t`` goes on.

    Raises:
        ValueError: a value out of range; the message names it.
    """

    lr: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1.0e-8
    weight_decay: float = 0.0


@dataclass(frozen=True, repr=False)
class AdamW(_Fused):
    """``torch.optim.AdamW``, with its defaults: the same formula as :class:`Adam`, on the rows of the batch.

    Raises:
        ValueError: a value out of range; the message names it.
    """

    lr: float = 0.001
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1.0e-8
    weight_decay: float = 0.01


@dataclass(frozen=True, repr=False)
class PartialRowWiseAdam(_Fused):
    """:class:`Adam` whose ``v`` is one number a row: ``v = b2 * v + (1 - b2) * mean(g**2)``.

    Raises:
        ValueError: a value out of range; the message names it.
    """

    lr: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1.0e-8
    weight_decay: float = 0.0


@dataclass(frozen=True, repr=False)
class LAMB(_Fused):
    """``u = m' / (sqrt(v') + eps) + weight_decay * w; w -= lr * |w| / |u| * u`` with :class:`Adam`'s ``m'`` and ``v'``.

    Where ``|w|`` or ``|u|`` is zero, the ratio is 1, as in the authors' code; FBGEMM divides, so that a row of zeros
    stays one and a zero update makes a row not-a-number.

    Raises:
        ValueError: a value out of range; the message names it.
    """

    lr: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1.0e-8
    weight_decay: float = 0.0


@dataclass(frozen=True, repr=False)
class PartialRowWiseLAMB(_Fused):
    """:class:`LAMB` whose ``v`` is one number a row: ``v = b2 * v + (1 - b2) * mean(g**2)``.

    Raises:
        ValueError: a value out of range; the message names it.
    """

    lr: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1.0e-8
    weight_decay: float = 0.0


@dataclass(frozen=True, repr=False)
class LARSSGD(_Fused):
    """``m = momentum * m + lr * r * (g + weight_decay * w); w -= m``; ``m`` is ``(D,)`` a row.

    ``r = eta * |w| / (|g| + weight_decay * |w|)``, ``eta`` being the trust coefficient. Where ``|w|`` or the divisor is
    zero, ``r`` is 1; FBGEMM divides, so that a row of zeros stays one or becomes not-a-number.

    Raises:
        ValueError: a value out of range; the message names it.
    """

    lr: float = 0.01
    momentum: float = 0.9
    eta: float = 0.001
    weight_decay: float = 0.0


@dataclass(frozen=True, repr=False)
class RMSprop(_Fused):
    """``g += weight_decay * w; v = alpha * v + (1 - alpha) * g**2; w -= lr * g / (sqrt(v) + eps)``.

    ``torch.optim.RMSprop``, neither centered nor with momentum, on the rows of the batch; ``v`` is ``(D,)`` a row.

    Raises:
        ValueError: a value out of range; the message names it.
    """

    lr: float = 0.01
    alpha: float = 0.99
    eps: float = 1.0e-8
    weight_decay: float = 0.0


@dataclass(frozen=True, repr=False)
class Ftrl(_Fused):
    """FTRL-proximal, algorithm 1 of McMahan et al., "Ad Click Prediction" (KDD 2013), ``lr`` being its alpha.

    ``s = ((n + g**2)**-lr_power - n**-lr_power) / lr; n += g**2; z += g - s * w``, then ``w = 0`` where ``|z| <= l1``,
    else ``w = (sign(z) * l1 - z) / ((beta + n**-lr_power) / lr + l2)``. ``z`` and ``n`` are ``(D,)`` a row. The paper's
    ``lr_power``, a name of TensorFlow's, is -0.5. An element keeps its initial weight until its first gradient that is
    not zero; an update with a learning rate of 0 changes nothing.

    Raises:
        ValueError: a value out of range; the message names it.
    """

    lr: float = 0.01
    l1: float = 0.0
    l2: float = 0.0
    beta: float = 0.0
    lr_power: float = -0.5


Optimizer = (
    SGD
    | Adagrad
    | RowWiseAdagrad
    | Adam
    | AdamW
    | PartialRowWiseAdam
    | LAMB
    | PartialRowWiseLAMB
    | LARSSGD
    | RMSprop
    | Ftrl
)

StateKind = Literal["element", "row"]

_STATES: dict[type, dict[str, StateKind]] = {
    Adagrad: {"sum": "element"},
    RowWiseAdagrad: {"sum": "row"},
    Adam: {"exp_avg": "element", "exp_avg_sq": "element"},
    AdamW: {"exp_avg": "element", "exp_avg_sq": "element"},
    PartialRowWiseAdam: {"exp_avg": "element", "exp_avg_sq": "row"},
    LAMB: {"exp_avg": "element", "exp_avg_sq": "element"},
    PartialRowWiseLAMB: {"exp_avg": "element", "exp_avg_sq": "row"},
    LARSSGD: {"momentum_buffer": "element"},
    RMSprop: {"square_avg": "element"},
    Ftrl: {"accumulator": "element", "linear": "element"},
}


def state_names(optimizer: Optimizer) -> dict[str, StateKind]:
    """What ``optimizer`` keeps of each row, by the names that torch.optim and FBGEMM's ``get_optimizer_state`` use.

    ``"element"``: ``(D,)`` a row, in this order behind the row's weights; ``"row"``: one number a row.
    """
    if isinstance(optimizer, SGD):
        return {"momentum_buffer": "element"} if optimizer.momentum else {}
    return dict(_STATES[type(optimizer)])


def state_bytes(optimizer: Optimizer, columns: int) -> int:
    """Bytes of a row's optimizer state, for a shard of so many columns."""
    return sum(4 * columns if kind == "element" else 4 for kind in state_names(optimizer).values())
