"""The cases in which kernels are compared with the core."""

from __future__ import annotations

import torch

from tests.kernels.device_work import Case
from torchrec_recstore.kernels.routing import BlockRouting
from torchrec_recstore.optim import (
    LAMB,
    LARSSGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Ftrl,
    Optimizer,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RMSprop,
    RowWiseAdagrad,
)

OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": SGD(lr=0.05),
    "sgd_decay": SGD(lr=0.05, weight_decay=0.01),
    "sgd_momentum": SGD(lr=0.05, momentum=0.9, weight_decay=0.01),
    "adagrad": Adagrad(lr=0.05),
    "adagrad_decay": Adagrad(lr=0.05, weight_decay=0.01),
    "adagrad_decoupled": Adagrad(
        lr=0.05, weight_decay=0.01, weight_decay_mode="decouple"
    ),
    "row_wise_adagrad": RowWiseAdagrad(lr=0.05),
    "row_wise_adagrad_decay": RowWiseAdagrad(lr=0.05, weight_decay=0.01),
    "row_wise_adagrad_bounds": RowWiseAdagrad(
        lr=0.05, max_gradient=0.7, max_gradient_norm=0.5, max_norm=0.8
    ),
    "adam": Adam(lr=0.01, weight_decay=0.01),
    "partial_row_wise_adam": PartialRowWiseAdam(lr=0.01),
    "lamb": LAMB(lr=0.01, weight_decay=0.01),
    "partial_row_wise_lamb": PartialRowWiseLAMB(lr=0.01, weight_decay=0.01),
    "lars": LARSSGD(lr=0.1, weight_decay=0.01),
    "rmsprop": RMSprop(lr=0.01),
    "ftrl": Ftrl(lr=0.1, l1=0.01, l2=0.001, beta=0.1),
    "adadelta": Adadelta(lr=1.0),
}
COLUMNS = (1, 3, 16, 50, 64, 128, 192, 1024)
ROW_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_ADAGRAD = OPTIMIZERS["row_wise_adagrad"]
_OTHER_ADAGRAD = OPTIMIZERS["row_wise_adagrad_bounds"]
_SMALL = Case([_ADAGRAD], bags=6, rows=9, longest_bag=4)

SPECIAL: dict[str, Case] = {
    "two_tables": _SMALL.numbered(
        optimizers=[_ADAGRAD, _OTHER_ADAGRAD], weighted=True, pooling="mean"
    ),
    "not_finite": _SMALL.numbered(columns=50, special=True, weighted=True),
    "not_finite_skipped": _SMALL.numbered(
        optimizers=[_ADAGRAD, _OTHER_ADAGRAD],
        special=True,
        nonfinite="skip",
        hot_share=0.05,
    ),
    "learning_rate_zero": _SMALL.numbered(optimizers=[Ftrl(lr=0.0), Ftrl(lr=0.1)]),
    "float16_gradients": _SMALL.numbered(grad_dtype=torch.float16),
    "bfloat16_gradients": _SMALL.numbered(
        grad_dtype=torch.bfloat16, weighted=True, pooling="mean"
    ),
    "hot": _SMALL.numbered(columns=3, bags=50, longest_bag=9, hot_share=0.5),
    "float16_stochastic": _SMALL.numbered(
        columns=70, column_begin=50, dtype=torch.float16, stochastic=True
    ),
    "bfloat16_stochastic": _SMALL.numbered(
        dtype=torch.bfloat16,
        stochastic=True,
        routing=BlockRouting(block_rows=5, world_size=3, rank=1, mixed=True),
    ),
    "routed": _SMALL.numbered(
        dtype=torch.float16,
        stochastic=True,
        routing=BlockRouting(block_rows=5, world_size=3, rank=2, mixed=False),
    ),
}


def grid() -> dict[str, Case]:
    """Returns a case of each optimizer, number of columns and row type.

    Pooling, weights and stochastic rounding alternate.
    """
    cases = {}
    for name, optimizer in OPTIMIZERS.items():
        for columns in COLUMNS:
            for dtype in ROW_DTYPES:
                number = len(cases)
                cases[f"{name}-{columns}-{dtype}"] = _SMALL.numbered(
                    optimizers=[optimizer],
                    columns=columns,
                    dtype=dtype,
                    stochastic=dtype is not torch.float32 and number % 2 == 0,
                    weighted=columns in (3, 50),
                    pooling="mean" if columns in (3, 64) else "sum",
                    bags=4,
                    rows=6,
                )
    return cases
