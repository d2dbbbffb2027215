"""The way of a sharder's ``optimizer=`` argument to its RecStore tables, past TorchRec's own kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torchrec.distributed.types import ParameterSharding

from torchrec_recstore.optim import Optimizer
from torchrec_recstore.options import TableOptions
from torchrec_recstore.sharders.fused_params import OPTIMIZER_KEY, optimizer_from_fused_params
from torchrec_recstore.sharders.parameter_sharding import RECSTORE_KERNEL, RecStoreParameterSharding


def with_optimizer(fused_params: Mapping[str, Any] | None, optimizer: Optimizer | None) -> dict[str, Any] | None:
    """A sharder's ``fused_params`` that carry ``optimizer``, for the planner to weigh its states.

    Raises:
        TypeError: ``optimizer`` is none of :mod:`torchrec_recstore.optim`.
        ValueError: ``fused_params`` ask for another optimizer.
    """
    if optimizer is None:
        return None if fused_params is None else dict(fused_params)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be one of torchrec_recstore.optim, got {type(optimizer).__name__}")
    carrying = {**(fused_params or {}), OPTIMIZER_KEY: optimizer}
    optimizer_from_fused_params(carrying, ["of the sharder"])
    return carrying


def deal_out(
    fused_params: dict[str, Any] | None, plan: dict[str, ParameterSharding], parameters: Mapping[str, nn.Parameter]
) -> tuple[dict[str, Any] | None, dict[str, ParameterSharding]]:
    """``fused_params`` as TorchRec's kernels take them, and a plan whose RecStore entries carry the optimizer instead.

    Args:
        fused_params: what :func:`with_optimizer` made.
        plan: the module's entries by table.
        parameters: the module's tables by name, with the marks of ``apply_optimizer_in_backward``.

    Raises:
        ValueError: a table on one of TorchRec's fused kernels, to which nothing else gives an optimizer.
    """
    if fused_params is None or OPTIMIZER_KEY not in fused_params:
        return fused_params, plan
    optimizer = fused_params[OPTIMIZER_KEY]
    stock = {key: value for key, value in fused_params.items() if key != OPTIMIZER_KEY}
    dealt = dict(plan)
    for name, sharding in plan.items():
        if sharding.compute_kernel == RECSTORE_KERNEL:
            if not isinstance(sharding, RecStoreParameterSharding):
                sharding = RecStoreParameterSharding.of(sharding, TableOptions())
            dealt[name] = replace(sharding, optimizer=optimizer)
        elif (
            sharding.compute_kernel.startswith("fused")
            and "optimizer" not in stock
            and not hasattr(parameters.get(name), "_optimizer_classes")
        ):
            raise ValueError(
                f"table {name!r} is on TorchRec's kernel {sharding.compute_kernel!r}, which does not take "
                f"optimizer={optimizer!r}: select its optimizer by fused_params or apply_optimizer_in_backward"
            )
    return stock, dealt
