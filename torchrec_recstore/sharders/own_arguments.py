"""How a sharder's ``optimizer`` and ``accumulation_steps`` reach its RecStore tables, past TorchRec's own kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torchrec.distributed.types import ParameterSharding
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type

from torchrec_recstore.optim import Optimizer
from torchrec_recstore.options import TableOptions
from torchrec_recstore.sharders.fused_params import ACCUMULATION_KEY, OPTIMIZER_KEY, optimizer_from_fused_params
from torchrec_recstore.sharders.parameter_sharding import RECSTORE_KERNEL, RecStoreParameterSharding


def with_own_arguments(
    fused_params: Mapping[str, Any] | None, optimizer: Optimizer | None, accumulation_steps: int
) -> dict[str, Any] | None:
    """A sharder's ``fused_params`` that carry its own arguments; the planner weighs the optimizer's states by them.

    Raises:
        TypeError: ``optimizer`` is none of :mod:`torchrec_recstore.optim`, ``accumulation_steps`` no int.
        ValueError: ``fused_params`` ask for another optimizer; ``accumulation_steps`` below 1.
    """
    if isinstance(accumulation_steps, bool) or not isinstance(accumulation_steps, int):
        raise TypeError(f"accumulation_steps must be an int, got {type(accumulation_steps).__name__}")
    if accumulation_steps < 1:
        raise ValueError(f"accumulation_steps must be at least 1, got {accumulation_steps}")
    if optimizer is None and accumulation_steps == 1:
        return fused_params if fused_params is None else dict(fused_params)
    carrying = dict(fused_params or {})
    if accumulation_steps > 1:
        carrying[ACCUMULATION_KEY] = accumulation_steps
    if optimizer is not None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be one of torchrec_recstore.optim, got {type(optimizer).__name__}")
        carrying[OPTIMIZER_KEY] = optimizer
        optimizer_from_fused_params(carrying, [])
    return carrying


def deal_out(
    fused_params: dict[str, Any] | None, plan: dict[str, ParameterSharding], parameters: Mapping[str, nn.Parameter]
) -> tuple[dict[str, Any] | None, dict[str, ParameterSharding]]:
    """``fused_params`` as TorchRec's kernels take them, and a plan whose RecStore entries carry the arguments instead.

    Args:
        fused_params: what :func:`with_own_arguments` made.
        plan: the module's entries by table.
        parameters: the module's tables by name, with the marks of ``apply_optimizer_in_backward``.

    Raises:
        ValueError: a table on one of TorchRec's fused kernels, to which nothing else gives an optimizer; a RecStore
            table whose mark and ``fused_params`` name different optimizers.
    """
    _check_marks(fused_params or {}, plan, parameters)
    own = {key: fused_params[key] for key in (OPTIMIZER_KEY, ACCUMULATION_KEY) if fused_params and key in fused_params}
    if fused_params is None or not own:
        return fused_params, plan
    stock = {key: value for key, value in fused_params.items() if key not in own}
    dealt = dict(plan)
    for name, sharding in plan.items():
        if sharding.compute_kernel == RECSTORE_KERNEL:
            if not isinstance(sharding, RecStoreParameterSharding):
                sharding = RecStoreParameterSharding.of(sharding, TableOptions())
            dealt[name] = replace(
                sharding, optimizer=own.get(OPTIMIZER_KEY), accumulation_steps=own.get(ACCUMULATION_KEY, 1)
            )
        elif (
            OPTIMIZER_KEY in own
            and sharding.compute_kernel.startswith("fused")
            and "optimizer" not in stock
            and not hasattr(parameters.get(name), "_optimizer_classes")
        ):
            raise ValueError(
                f"table {name!r} is on TorchRec's kernel {sharding.compute_kernel!r}, which does not take "
                f"optimizer={own[OPTIMIZER_KEY]!r}: select its optimizer by fused_params or apply_optimizer_in_backward"
            )
    return stock, dealt


def _check_marks(
    fused_params: Mapping[str, Any], plan: Mapping[str, ParameterSharding], parameters: Mapping[str, nn.Parameter]
) -> None:
    # TorchRec lets the mark win without a word (merge_fused_params, torchrec 1.8.0), which hides a mistake.
    if "optimizer" not in fused_params:
        return
    for name, sharding in plan.items():
        (marked,) = getattr(parameters.get(name), "_optimizer_classes", [None])
        if marked is None or sharding.compute_kernel != RECSTORE_KERNEL:
            continue
        by_params = optimizer_from_fused_params(fused_params, [name])
        by_mark = optimizer_from_fused_params({"optimizer": optimizer_type_to_emb_opt_type(marked)}, [name])
        if type(by_params) is not type(by_mark):
            raise ValueError(
                f"RecStore table {name!r}: fused_params select {type(by_params).__name__}, "
                f"apply_optimizer_in_backward {type(by_mark).__name__}: give one of them"
            )
