"""Every fused optimizer, with and without its options, and tables to test the optimizers on."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_recstore.optim import (
    LAMB,
    LARSSGD,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Ftrl,
    Optimizer,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RMSprop,
    RowWiseAdagrad,
)
from torchrec_recstore.options import NormalInit, TableOptions
from torchrec_recstore.store import Table

ROWS = 8
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
    Adam(0.1, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1, max_gradient=0.3, max_gradient_norm=0.6),
    AdamW(0.1),
    PartialRowWiseAdam(0.1, weight_decay=0.1),
    LAMB(0.1),
    LAMB(0.1, weight_decay=0.1, max_gradient_norm=0.6),
    PartialRowWiseLAMB(0.1, weight_decay=0.1),
    LARSSGD(0.1, eta=0.1, weight_decay=0.1),
    LARSSGD(0.5, momentum=0.0, eta=0.02),
    RMSprop(0.1, weight_decay=0.1),
    RMSprop(0.1, alpha=0.5, eps=1e-2, max_gradient=0.5),
    Ftrl(0.1),
    Ftrl(0.1, l1=0.3, l2=0.1, beta=1.0),
    Ftrl(0.1, l1=0.01, lr_power=-0.4, beta=0.5),
]


def table(optimizer: Optimizer, dim: int = 4) -> Table:
    """Returns a table with rows 0 to 7, of a norm of about 1."""
    made = Table(dim, optimizer=optimizer, options=TableOptions(NormalInit(0.0, 0.5), seed=7))
    made.lookup(torch.arange(ROWS), train=True)
    return made


def rows(made: Table) -> Tensor:
    return made.lookup(torch.arange(ROWS))
