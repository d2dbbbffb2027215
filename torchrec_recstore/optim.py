"""Fused optimizers: the formulas by which a table's backward updates rows.

They are frozen dataclasses without torch.

A new optimizer is a subclass of :class:`Optimizer` here, and its step in ``csrc``.
docs/inside.md lists all places.

Notation:

- ``g``: the sum of an id's gradients in a step.
- ``w``: the weights of the id's row.
- ``D``: the number of columns of the shard.
- ``|x|``: the Euclidean norm of ``x`` over these columns.
- ``t``: the number of the table's update, from 1. Each backward is one update, as in
  FBGEMM's ``iter``.

All states of a new row are zero. :func:`state_names` lists the states of an optimizer.
Each optimizer updates the rows of the batch alone: all other rows keep their weights
and states.

Source, unless an optimizer names another: the GPU formulas in FBGEMM 1.8.0,
``fbgemm_gpu/codegen/genscript/optimizers.py``.

Tests: tests/kernels/test_optimizers.py, tests/kernels/test_row_optimizer.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from torchrec_recstore.utils import aligned

__all__ = [
    "LAMB",
    "LARSSGD",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Ftrl",
    "PartialRowWiseAdam",
    "PartialRowWiseLAMB",
    "RMSprop",
    "RowOptimizer",
    "RowWiseAdagrad",
    "state_names",
]

WeightDecayMode = Literal["l2", "decouple"]
StateKind = Literal["element", "row"]
_NUMBERS = (
    "eps",
    "weight_decay",
    "decouple",
    "momentum",
    "beta1",
    "beta2",
    "eta",
    "alpha",
    "l1",
    "l2",
    "lr_power",
    "beta",
    "max_gradient",
    "max_gradient_norm",
    "max_norm",
)
"""The names of the numbers of OptimizerConfig in csrc/rows/optimizer.h."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Optimizer:
    """The base class of the optimizers.

    A subclass is a frozen dataclass of its arguments, with the formula in its
    docstring. ``csrc/row_loops/row_steps.inl`` has the arithmetic. The arguments of the
    class statement are ``kind``, the value of ``OptimizerKind`` in
    csrc/rows/optimizer.h, and ``states``, the states of each row; see
    :func:`state_names`.

    Raises:
        ValueError: A value is out of range. The message names it.
    """

    kind: ClassVar[int]
    states: ClassVar[Mapping[str, StateKind]]

    max_gradient: float | None = None
    """The largest absolute value of an element of a bag's gradient.

    Larger elements are clipped to it before gradients are summed, as by FBGEMM's
    ``gradient_clipping`` with ``max_gradient``. None: no clipping.
    """

    max_gradient_norm: float | None = None
    """The largest norm of ``g``.

    A longer ``g`` is scaled down to this norm, row by row, before weight decay. FBGEMM
    does not have this option. None: no scaling.
    """

    lr: float = field(default=0.01, kw_only=False)
    """The learning rate. It is the first positional argument of each optimizer."""

    def __init_subclass__(
        cls,
        *,
        kind: int,
        states: Mapping[str, StateKind] | tuple[()],
    ) -> None:
        cls.kind = kind
        cls.states = states  # type: ignore[assignment]

    def __post_init__(self) -> None:
        for number in fields(self):
            argument = f"{type(self).__name__}.{number.name}"
            _check(argument, number.name, getattr(self, number.name))

    def __repr__(self) -> str:
        shown = []
        for number in fields(self):
            value = getattr(self, number.name)
            if number.repr and value is not None:
                shown.append(f"{number.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def numbers(self) -> dict[str, float]:
        """Returns the numbers of ``OptimizerConfig`` in csrc/rows/optimizer.h by name;
        0 for a number that is not used.
        """
        values = dict(vars(self))
        if "rho" in values:  # torch's name of the same number
            values["alpha"] = values.pop("rho")
        values["beta1"], values["beta2"] = values.pop("betas", (0.0, 0.0))
        values["decouple"] = values.pop("weight_decay_mode", "l2") == "decouple"
        assert values.keys() <= {
            "lr",
            *_NUMBERS,
        }, f"{type(self).__name__} has an argument without a number in csrc"
        return {name: float(values.get(name) or 0.0) for name in _NUMBERS}


def _check(name: str, field: str, value: object) -> None:
    if field.startswith("max_"):
        if value is not None and not (_is_finite(name, value) > 0):
            raise ValueError(
                f"{name} must be positive and finite, or None, got {value}"
            )
    elif field == "weight_decay_mode":
        if value not in ("l2", "decouple"):
            raise ValueError(f"{name} must be 'l2' or 'decouple', got {value!r}")
    elif field == "betas":
        if not isinstance(value, tuple) or len(value) != 2:
            raise ValueError(f"{name} must be a tuple of two numbers, got {value!r}")
        for beta in value:
            _check_below_one(name, beta)
    elif field in ("momentum", "alpha", "rho"):
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
class SGD(Optimizer, kind=0, states={"momentum_buffer": "element"}):
    """Stochastic gradient descent: ``g += weight_decay * w; w -= lr * g``.

    With ``momentum``, the formula is that of ``torch.optim.SGD``: ``m = momentum * m +
    g; w -= lr * m``. The state ``m`` has the shape ``(D,)`` per row. FBGEMM's SGD has
    neither momentum nor weight decay.
    """

    weight_decay: float = 0.0
    momentum: float = 0.0


@dataclass(frozen=True, repr=False)
class Adagrad(Optimizer, kind=1, states={"sum": "element"}):
    """Adagrad: ``g += weight_decay * w; m += g**2; w -= lr * g / (sqrt(m) + eps)``.

    The state ``m`` has the shape ``(D,)`` per row. With
    ``weight_decay_mode="decouple"``, weight decay is ``w *= 1 - lr * weight_decay``,
    and is not added to ``g``. FBGEMM's Adagrad has no weight decay; the formula here is
    that of FBGEMM's row-wise Adagrad.
    """

    eps: float = 1.0e-8
    weight_decay: float = 0.0
    weight_decay_mode: WeightDecayMode = "l2"


@dataclass(frozen=True, repr=False)
class RowWiseAdagrad(Adagrad, kind=2, states={"sum": "row"}):
    """Row-wise Adagrad: ``g += weight_decay * w; m += mean(g**2); w -= lr * g /
    (sqrt(m) + eps)``.

    The state ``m`` is one number per row. With ``weight_decay_mode="decouple"``, weight
    decay is ``w *= 1 - lr * weight_decay``, and is not added to ``g``. With
    ``max_norm``, the update is followed by ``w *= max_norm / |w|`` if ``|w| >
    max_norm``.
    """

    max_norm: float | None = None


@dataclass(frozen=True, repr=False)
class Adam(Optimizer, kind=3, states={"exp_avg": "element", "exp_avg_sq": "element"}):
    """Adam with decoupled weight decay, as FBGEMM's ``adam``.

    The update is ``w -= lr * (m' / (sqrt(v') + eps) + weight_decay * w)``, with ``m =
    b1 * m + (1 - b1) * g; v = b2 * v + (1 - b2) * g**2; m' = m / (1 - b1**t); v' = v /
    (1 - b2**t)`` and ``b1, b2 = betas``. The states ``m`` and ``v`` have the shape
    ``(D,)`` per row. ``t`` counts every update of the table, including updates that do
    not contain the row.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1.0e-8
    weight_decay: float = 0.0


@dataclass(frozen=True, repr=False)
class AdamW(Adam, kind=3, states={"exp_avg": "element", "exp_avg_sq": "element"}):
    """Adam with the defaults of ``torch.optim.AdamW``.

    The formula, and so the kind, is that of :class:`Adam`.
    """

    lr: float = 0.001
    weight_decay: float = 0.01


@dataclass(frozen=True, repr=False)
class PartialRowWiseAdam(
    Adam, kind=4, states={"exp_avg": "element", "exp_avg_sq": "row"}
):
    """:class:`Adam` with one ``v`` per row: ``v = b2 * v + (1 - b2) * mean(g**2)``."""


@dataclass(frozen=True, repr=False)
class LAMB(Adam, kind=5, states={"exp_avg": "element", "exp_avg_sq": "element"}):
    """LAMB: ``u = m' / (sqrt(v') + eps) + weight_decay * w; w -= lr * |w| / |u| * u``.

    ``m'`` and ``v'`` are those of :class:`Adam`. If ``|w|`` or ``|u|`` is zero, the
    ratio ``|w| / |u|`` is replaced by 1, as in the code of LAMB's authors. FBGEMM
    computes the ratio in every case, so that a row of zeros never changes and a zero
    update makes a row NaN.
    """


@dataclass(frozen=True, repr=False)
class PartialRowWiseLAMB(
    Adam, kind=6, states={"exp_avg": "element", "exp_avg_sq": "row"}
):
    """:class:`LAMB` with one ``v`` per row: ``v = b2 * v + (1 - b2) * mean(g**2)``."""


@dataclass(frozen=True, repr=False)
class LARSSGD(Optimizer, kind=7, states={"momentum_buffer": "element"}):
    """SGD with layer-wise adaptive rate scaling (LARS), applied row by row.

    The update is ``m = momentum * m + lr * r * (g + weight_decay * w); w -= m``, with
    the ratio ``r = eta * |w| / (|g| + weight_decay * |w|)``. ``eta`` is the trust
    coefficient. The state ``m`` has the shape ``(D,)`` per row. If ``|w|`` or the
    divisor is zero, ``r`` is 1. FBGEMM computes the ratio in every case, so that a row
    of zeros never changes or becomes NaN.
    """

    momentum: float = 0.9
    eta: float = 0.001
    weight_decay: float = 0.0


@dataclass(frozen=True, repr=False)
class RMSprop(Optimizer, kind=8, states={"square_avg": "element"}):
    """RMSprop: ``g += weight_decay * w; v = alpha * v + (1 - alpha) * g**2; w -= lr * g
    / (sqrt(v) + eps)``.

    The formula is that of ``torch.optim.RMSprop``, not centered and without momentum.
    The state ``v`` has the shape ``(D,)`` per row.
    """

    alpha: float = 0.99
    eps: float = 1.0e-8
    weight_decay: float = 0.0


@dataclass(frozen=True, repr=False)
class Ftrl(Optimizer, kind=9, states={"accumulator": "element", "linear": "element"}):
    """FTRL-proximal: algorithm 1 of McMahan et al., "Ad Click Prediction" (KDD 2013).

    ``lr`` is the paper's alpha.

    The update of an element is ``s = ((n + g**2)**-lr_power - n**-lr_power) / lr; n +=
    g**2; z += g - s * w``. Then ``w = 0`` if ``|z| <= l1``, otherwise ``w = (sign(z) *
    l1 - z) / ((beta + n**-lr_power) / lr + l2)``. The states ``z`` (``linear``) and
    ``n`` (``accumulator``) have the shape ``(D,)`` per row. The name ``lr_power`` is
    TensorFlow's; the paper uses the default, -0.5. An element keeps its initial weight
    until its first gradient that is not zero. An update with a learning rate of 0
    changes nothing.
    """

    l1: float = 0.0
    l2: float = 0.0
    beta: float = 0.0
    lr_power: float = -0.5


@dataclass(frozen=True, repr=False)
class Adadelta(
    Optimizer, kind=10, states={"square_avg": "element", "acc_delta": "element"}
):
    """Adadelta: ``w -= lr * d``, with ``d = sqrt(u + eps) / sqrt(v + eps) * g``.

    Before it, ``g += weight_decay * w; v = rho * v + (1 - rho) * g**2``, and after it
    ``u = rho * u + (1 - rho) * d**2``. The formula is that of ``torch.optim.Adadelta``.
    The states ``v`` (``square_avg``) and ``u`` (``acc_delta``) have the shape ``(D,)``
    per row.
    """

    lr: float = 1.0
    rho: float = 0.9
    eps: float = 1.0e-6
    weight_decay: float = 0.0


_CODE = {"saved": False}


@dataclass(frozen=True, repr=False, kw_only=True)
class RowOptimizer(Optimizer, kind=-1, states=()):
    """An optimizer whose formula is C++ code. docs/options.md has examples.

    The same formula gives the same bits as another optimizer. The first table compiles
    the code with ``$CXX`` (default: ``g++``), and later tables load the library from
    ``$XDG_CACHE_HOME/torchrec_recstore`` (default: ``~/.cache``). The code runs with
    all rights of the process. Files do not contain it, and parameter servers refuse it.

    Args:
        name: The name of the formula. The names of the states begin with it in files,
            so that another name is refused.
        step: C++ statements that update one element. They read and write ``w`` and the
            states, and read the gradient ``g``, ``lr``, the hyperparameters, the
            numbers of ``once`` and the variables of ``row``. All are ``float``, and so
            must be constants with a fraction: ``0.5f``.
        states: The kind of each state by its name; at most one is ``"row"``. As
            float16, a row-wise state is stored as its square root, and so is one named
            ``sum``, ``accumulator``, ``square_avg``, ``acc_delta`` or ``..._sq``.
        hyperparameters: Finite numbers by name.
        once: C++ expressions by name, which are computed in ``double`` once in each
            update. They read ``lr``, the number ``t`` of the update, the
            hyperparameters, and the expressions before them.
        row: C++ statements before those of the elements. They read and write the
            row-wise state, and declare variables. ``row_sum(x)`` is the sum of an
            expression of ``w``, ``g`` and element-wise states over the ``columns``.

    Raises:
        ValueError: An argument is invalid. A table raises it if the code does not
            compile.
    """

    name: str = ""
    step: str = field(default="", repr=False, metadata=_CODE)
    states: Mapping[str, StateKind] = ()  # type: ignore[assignment, misc]
    hyperparameters: Mapping[str, float] = ()  # type: ignore[assignment]
    once: Mapping[str, str] = field(default=(), repr=False, metadata=_CODE)  # type: ignore[arg-type]
    row: str = field(default="", repr=False, metadata=_CODE)

    def __post_init__(self) -> None:
        for number in ("lr", "max_gradient", "max_gradient_norm"):
            _check(f"RowOptimizer.{number}", number, getattr(self, number))
        for argument in ("states", "hyperparameters", "once"):
            pairs = list(dict(getattr(self, argument)).items())
            # elements first
            pairs.sort(key=lambda pair: pair[1] == "row")
            object.__setattr__(self, argument, tuple(pairs))  # A tuple can be hashed.
        kinds = list(dict(self.states).values())
        if not {"element", "row"}.issuperset(kinds) or kinds.count("row") > 1:
            raise ValueError(
                "RowOptimizer.states must be 'element', and at most one 'row', got"
                f" {kinds}"
            )
        for name, value in dict(self.hyperparameters).items():
            _is_finite(f"RowOptimizer.hyperparameters[{name!r}]", value)

    def numbers(self) -> dict[str, float]:
        """Returns the numbers of ``OptimizerConfig`` by name."""
        return {name: float(getattr(self, name, None) or 0.0) for name in _NUMBERS}

    def hyperparameter_values(self) -> list[float]:
        """Returns the values of the hyperparameters, in the order of :meth:`code`."""
        return [float(value) for value in dict(self.hyperparameters).values()]

    def code(self) -> dict[str, Any]:
        """Returns the members of ``RowCode`` in csrc/row_loops/row_compiler.h by name."""
        states = dict(self.states)
        once = dict(self.once)
        return {
            "name": self.name,
            "states": list(states),
            "element_states": list(states.values()).count("element"),
            "hyperparameters": list(dict(self.hyperparameters)),
            "once_names": list(once),
            "once_expressions": list(once.values()),
            "row": self.row,
            "step": self.step,
        }


OPTIMIZERS: dict[str, type[Optimizer]] = {
    name: value
    for name, value in globals().items()
    if name in __all__ and isinstance(value, type)
}
"""All optimizers by name, in the order of this module."""


def without_state(optimizer: Optimizer) -> SGD:
    """Returns the optimizer of a frozen table, whose rows have no state, with the
    learning rate of ``optimizer``.
    """
    return SGD(lr=optimizer.lr)


def state_names(optimizer: Optimizer) -> dict[str, StateKind]:
    """Returns the names and kinds of the states that ``optimizer`` stores with each
    row.

    The names are those of torch.optim and of FBGEMM's ``get_optimizer_state``. A state
    of the kind ``"element"`` has the shape ``(D,)`` per row; these states follow the
    row's weights in memory, in the order of the result. A state of the kind ``"row"``
    is one number per row.
    """
    if isinstance(optimizer, RowOptimizer):
        return {
            f"{optimizer.name}.{name}": kind
            for name, kind in dict(optimizer.states).items()
        }
    if isinstance(optimizer, SGD) and not optimizer.momentum:
        return {}
    return dict(optimizer.states)


_SQUARES = ("sum", "square_avg", "acc_delta", "accumulator")


def is_square(state_name: str) -> bool:
    """Returns whether the state is a sum or an average of squares.

    All row-wise states are.
    """
    last_part = state_name.split(".")[-1]
    return last_part.endswith("_sq") or last_part in _SQUARES


def state_bytes(
    optimizer: Optimizer,
    columns: int,
    itemsize: int = 4,
) -> int:
    """Returns the size in bytes of the optimizer state of one row of a shard with
    ``columns`` columns.

    ``itemsize`` is the bytes of one number: 4 for a ``state_dtype`` of float32, 2 for
    float16. Element-wise states are padded to a multiple of 4 bytes.
    """
    kinds = list(state_names(optimizer).values())
    element_bytes = kinds.count("element") * columns * itemsize
    row_wise_bytes = kinds.count("row") * itemsize
    return aligned(element_bytes, 4) + row_wise_bytes
