"""Arguments that all eager modules take."""

from __future__ import annotations

from torchrec_recstore.optim import Optimizer, RowWiseAdagrad

_DEFAULT_LR = 0.01


def optimizer_of(optimizer: Optimizer | None, lr: float) -> Optimizer:
    """The optimizer that is meant: the default one with ``lr``, or the one given.

    Raises:
        TypeError: something that is none of ``torchrec_recstore.optim``.
        ValueError: both have a learning rate, and they differ; or one that makes no sense.
    """
    if optimizer is None:
        return RowWiseAdagrad(lr=lr)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be one of torchrec_recstore.optim, got {type(optimizer).__name__}")
    if lr not in (_DEFAULT_LR, optimizer.lr):
        raise ValueError(f"lr={lr} disagrees with optimizer={optimizer!r}: give the learning rate there alone")
    return optimizer
