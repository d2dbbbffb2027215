"""Every fused optimizer with and without its options, its published formula, and tables
to test it on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchrec_recstore.optim import (
    LAMB,
    LARSSGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    AdamW,
    Ftrl,
    Optimizer,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RMSprop,
    RowOptimizer,
    RowWiseAdagrad,
)
from torchrec_recstore.options import NormalInit, TableOptions
from torchrec_recstore.store import Table

ROWS = 8
MOMENTS: dict[str, Any] = {
    "states": {"exp_avg": "element", "exp_avg_sq": "element"},
    "hyperparameters": {"beta1": 0.8, "beta2": 0.95, "eps": 1e-3, "decay": 0.1},
}
REST = {
    "rest1": "1 - beta1",
    "rest2": "1 - beta2",
    "bias1": "1 / (1 - pow(beta1, t))",
    "bias2": "1 / (1 - pow(beta2, t))",
}
NADAM = RowOptimizer(
    0.1,
    name="nadam",
    states=MOMENTS["states"],
    hyperparameters={"beta1": 0.9, "beta2": 0.999, "eps": 1e-8},
    once={
        **REST,
        "mu": "beta1 / 2",
        "rate": "lr * mu / (1 - pow(mu, t + 1))",
        "rate_of_g": "lr * (1 - mu) / (1 - pow(mu, t))",
    },
    step="""
        exp_avg = beta1 * exp_avg + rest1 * g;
        exp_avg_sq = beta2 * exp_avg_sq + rest2 * (g * g);
        w -= (rate * exp_avg + rate_of_g * g) / (sqrt(exp_avg_sq * bias2) + eps);
    """,
)
"""torch.optim.NAdam with momentum_decay=0."""
BUILT_IN: list[tuple[RowOptimizer, Optimizer]] = [
    (
        RowOptimizer(0.1, name="plain", step="w -= lr * g;", max_gradient=0.3),
        SGD(0.1, max_gradient=0.3),
    ),
    (
        RowOptimizer(
            0.1,
            name="own_adagrad",
            states={"sum": "element"},
            hyperparameters={"eps": 1e-8, "decay": 0.1},
            step=(
                "const float d = g + decay * w; sum += d * d; w -= lr * d / (sqrt(sum)"
                " + eps);"
            ),
        ),
        Adagrad(0.1, weight_decay=0.1),
    ),
    (
        RowOptimizer(
            0.1,
            name="own_row_wise_adagrad",
            states={"sum": "row"},
            hyperparameters={"eps": 1e-8},
            row=(
                "sum += row_sum(g * g) / columns; const float rate = lr / (sqrt(sum) +"
                " eps);"
            ),
            step="w -= rate * g;",
            max_gradient_norm=0.5,
        ),
        RowWiseAdagrad(0.1, max_gradient_norm=0.5),
    ),
    (
        RowOptimizer(
            0.1,
            name="own_adam",
            **MOMENTS,
            once={**REST, "rate": "lr * bias1", "keep": "1 - lr * decay"},
            step="""
                exp_avg = beta1 * exp_avg + rest1 * g;
                exp_avg_sq = beta2 * exp_avg_sq + rest2 * (g * g);
                w = keep * w - rate * exp_avg / (sqrt(exp_avg_sq * bias2) + eps);
            """,
        ),
        Adam(0.1, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1),
    ),
    (
        RowOptimizer(
            0.1,
            name="own_row_wise_adam",
            **MOMENTS | {"states": {"exp_avg_sq": "row", "exp_avg": "element"}},
            once={**REST, "rate": "lr * bias1", "keep": "1 - lr * decay"},
            row="""
                exp_avg_sq = beta2 * exp_avg_sq + rest2 * (row_sum(g * g) / columns);
                const float divisor = sqrt(exp_avg_sq * bias2) + eps;
            """,
            step=(
                "exp_avg = beta1 * exp_avg + rest1 * g; w = keep * w - rate * exp_avg /"
                " divisor;"
            ),
        ),
        PartialRowWiseAdam(0.1, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1),
    ),
    (
        RowOptimizer(
            0.5,
            name="own_adadelta",
            states={"square_avg": "element", "acc_delta": "element"},
            hyperparameters={"rho": 0.5, "eps": 1e-2},
            once={"rest": "1 - rho"},
            step="""
                square_avg = rho * square_avg + rest * (g * g);
                const float delta = sqrt(acc_delta + eps) / sqrt(square_avg + eps) * g;
                acc_delta = rho * acc_delta + rest * (delta * delta);
                w -= lr * delta;
            """,
        ),
        Adadelta(0.5, rho=0.5, eps=1e-2),
    ),
]
"""User-defined optimizers, each with the built-in optimizer of the same formula."""
OPTIMIZERS: list[Optimizer] = [
    SGD(0.1, weight_decay=0.1),
    SGD(0.1, momentum=0.9),
    SGD(0.1, weight_decay=0.1, momentum=0.5, max_gradient_norm=0.7),
    Adagrad(0.1, weight_decay=0.1),
    Adagrad(0.1, weight_decay=0.1, weight_decay_mode="decouple", max_gradient=0.3),
    RowWiseAdagrad(0.1, weight_decay=0.1),
    RowWiseAdagrad(0.1, weight_decay=0.1, weight_decay_mode="decouple"),
    RowWiseAdagrad(0.1, max_norm=0.8, max_gradient_norm=0.5),
    Adam(0.1),
    Adam(
        0.1,
        betas=(0.8, 0.95),
        eps=1e-3,
        weight_decay=0.1,
        max_gradient=0.3,
        max_gradient_norm=0.6,
    ),
    AdamW(0.1),
    PartialRowWiseAdam(0.1, weight_decay=0.1),
    LAMB(0.1),
    LAMB(0.1, weight_decay=0.1, max_gradient_norm=0.6),
    PartialRowWiseLAMB(0.1, weight_decay=0.1),
    LARSSGD(0.1, eta=0.1, weight_decay=0.1),
    LARSSGD(0.5, momentum=0.0, eta=0.02),
    RMSprop(0.1, weight_decay=0.1),
    RMSprop(0.1, alpha=0.5, eps=1e-2, max_gradient=0.5),
    Adadelta(),
    Adadelta(0.5, rho=0.5, eps=1e-2, weight_decay=0.1, max_gradient_norm=0.6),
    Ftrl(0.1),
    Ftrl(0.1, l1=0.3, l2=0.1, beta=1.0),
    Ftrl(0.1, l1=0.01, lr_power=-0.4, beta=0.5),
    NADAM,
]
AS_IN_TORCH: list[tuple[Optimizer, type[torch.optim.Optimizer], dict[str, Any]]] = [
    (
        SGD(0.1, weight_decay=0.1, momentum=0.9),
        torch.optim.SGD,
        {"weight_decay": 0.1, "momentum": 0.9},
    ),
    (
        Adagrad(0.1, weight_decay=0.1),
        torch.optim.Adagrad,
        {"weight_decay": 0.1, "eps": 1e-8},
    ),
    (Adam(0.1, betas=(0.8, 0.99)), torch.optim.Adam, {"betas": (0.8, 0.99)}),
    (AdamW(0.1, weight_decay=0.1), torch.optim.AdamW, {"weight_decay": 0.1}),
    (RMSprop(0.1, weight_decay=0.1), torch.optim.RMSprop, {"weight_decay": 0.1}),
    (
        Adadelta(0.1, rho=0.8, weight_decay=0.1),
        torch.optim.Adadelta,
        {"rho": 0.8, "weight_decay": 0.1},
    ),
    (NADAM, torch.optim.NAdam, {"momentum_decay": 0.0}),
]
"""Optimizers that equal one of torch.optim with these arguments where every row is in
every batch.
"""


def table(optimizer: Optimizer, dim: int = 4) -> Table:
    """Returns a table with rows 0 to 7, of a norm of about 1."""
    made = Table(
        dim, optimizer=optimizer, options=TableOptions(NormalInit(0.0, 0.5), seed=7)
    )
    made.lookup(torch.arange(ROWS), train=True)
    return made


def rows(made: Table) -> Tensor:
    return made.lookup(torch.arange(ROWS))


class Reference:
    """The formulas in plain torch, in float64.

    A call of :meth:`update` is one update of the table.

    The states have the names of the optimizer's.
    """

    def __init__(self, optimizer: Optimizer, rows: dict[int, Tensor]) -> None:
        self.optimizer = optimizer
        self.rows = {id_: row.double() for id_, row in rows.items()}
        self.states: dict[int, dict[str, Tensor]] = {id_: {} for id_ in rows}
        self.updates = 0

    def update(self, ids: list[int], grads: Tensor) -> None:
        o = self.optimizer
        self.updates += 1
        sums: dict[int, Tensor] = {}
        for id_, grad in zip(ids, grads.double(), strict=True):
            if o.max_gradient is not None:
                grad = grad.clamp(-o.max_gradient, o.max_gradient)
            sums[id_] = sums.get(id_, torch.zeros_like(grad)) + grad
        for id_, grad in sums.items():
            if o.max_gradient_norm is not None and grad.norm() > o.max_gradient_norm:
                grad = grad * (o.max_gradient_norm / grad.norm())
            self.rows[id_] = self._step(self.rows[id_], grad, self.states[id_])

    def _step(self, w: Tensor, g: Tensor, state: dict[str, Tensor]) -> Tensor:
        o = self.optimizer
        zero = torch.zeros_like(w)
        if isinstance(o, SGD):
            state["momentum_buffer"] = (
                o.momentum * state.get("momentum_buffer", zero) + g + o.weight_decay * w
            )
            return w - o.lr * state["momentum_buffer"]
        if isinstance(o, Adagrad):
            if o.weight_decay_mode == "l2":
                g = g + o.weight_decay * w
            else:
                w = w - o.lr * o.weight_decay * w
            square = (g**2).mean() if isinstance(o, RowWiseAdagrad) else g**2
            state["sum"] = state.get("sum", torch.zeros_like(square)) + square
            w = w - o.lr * g / (state["sum"].sqrt() + o.eps)
            if (
                isinstance(o, RowWiseAdagrad)
                and o.max_norm is not None
                and w.norm() > o.max_norm
            ):
                w = w * (o.max_norm / w.norm())
            return w
        if isinstance(o, Adam):
            return self._moments(o, w, g, state)
        if isinstance(o, LARSSGD):
            rate = o.lr * o.eta * w.norm() / (g.norm() + o.weight_decay * w.norm())
            state["momentum_buffer"] = o.momentum * state.get(
                "momentum_buffer", zero
            ) + rate * (g + o.weight_decay * w)
            return w - state["momentum_buffer"]
        if isinstance(o, RMSprop):
            g = g + o.weight_decay * w
            state["square_avg"] = (
                o.alpha * state.get("square_avg", zero) + (1 - o.alpha) * g**2
            )
            return w - o.lr * g / (state["square_avg"].sqrt() + o.eps)
        if isinstance(o, Adadelta):
            g = g + o.weight_decay * w
            state["square_avg"] = (
                o.rho * state.get("square_avg", zero) + (1 - o.rho) * g**2
            )
            delta = (
                (state.get("acc_delta", zero) + o.eps).sqrt()
                / (state["square_avg"] + o.eps).sqrt()
                * g
            )
            state["acc_delta"] = (
                o.rho * state.get("acc_delta", zero) + (1 - o.rho) * delta**2
            )
            return w - o.lr * delta
        if isinstance(o, RowOptimizer):
            return self._nadam(o, w, g, state)
        assert isinstance(o, Ftrl)
        before = state.get("accumulator", zero)
        state["accumulator"] = before + g**2
        sigma = (state["accumulator"] ** -o.lr_power - before**-o.lr_power) / o.lr
        state["linear"] = state.get("linear", zero) + g - sigma * w
        slope = (o.beta + state["accumulator"] ** -o.lr_power) / o.lr + o.l2
        solved = (state["linear"].sign() * o.l1 - state["linear"]) / slope
        return torch.where(state["linear"].abs() <= o.l1, zero, solved)

    def _nadam(
        self, o: RowOptimizer, w: Tensor, g: Tensor, state: dict[str, Tensor]
    ) -> Tensor:
        zero, t = torch.zeros_like(w), self.updates
        first, second, eps = dict(o.hyperparameters).values()
        m = state["nadam.exp_avg"] = (
            first * state.get("nadam.exp_avg", zero) + (1 - first) * g
        )
        v = state["nadam.exp_avg_sq"] = (
            second * state.get("nadam.exp_avg_sq", zero) + (1 - second) * g**2
        )
        mu = first / 2
        ahead = mu * m / (1 - mu ** (t + 1)) + (1 - mu) * g / (1 - mu**t)
        return w - o.lr * ahead / ((v / (1 - second**t)).sqrt() + eps)

    def _moments(
        self, o: Adam, w: Tensor, g: Tensor, state: dict[str, Tensor]
    ) -> Tensor:
        square = (
            (g**2).mean()
            if isinstance(o, PartialRowWiseAdam | PartialRowWiseLAMB)
            else g**2
        )
        first, second = o.betas
        state["exp_avg"] = (
            first * state.get("exp_avg", torch.zeros_like(w)) + (1 - first) * g
        )
        state["exp_avg_sq"] = (
            second * state.get("exp_avg_sq", torch.zeros_like(square))
            + (1 - second) * square
        )
        corrected = state["exp_avg_sq"] / (1 - second**self.updates)
        direction = (
            state["exp_avg"] / (1 - first**self.updates) / (corrected.sqrt() + o.eps)
            + o.weight_decay * w
        )
        if isinstance(o, LAMB | PartialRowWiseLAMB):
            direction = direction * (w.norm() / direction.norm())
        return w - o.lr * direction
