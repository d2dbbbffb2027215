"""The fused optimizers of kernels and modules, as TorchRec and the user see them. Backward updates the rows itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizer

from torchrec_recstore.optim import Optimizer
from torchrec_recstore.table_parameter import TableParameter
from torchrec_recstore.torchrec_seams.models import mark_as_optimized


def placeholder_parameter(name: str, dim: int) -> nn.Parameter:
    """Returns the empty parameter, (0, dim), that represents a table in TorchRec's modules and optimizers.

    Its attribute ``_in_backward_optimizers`` excludes it from dense optimizers that are built with
    ``in_backward_optimizer_filter`` (torchrec 1.8.0).
    """
    parameter = TableParameter(torch.empty(0, dim), table=name)
    mark_as_optimized(parameter, EmptyFusedOptimizer())
    return parameter


class BackwardOptimizer(FusedOptimizer):  # type: ignore[misc]
    """A fused optimizer whose calls do nothing, because backward has updated the rows.

    A module has one that holds the states of its RecStore tables. It has one parameter group for each optimizer of the
    tables, the same on every rank and with every plan. The kernels of these tables read the learning rate from it.
    """

    def step(self, closure: Any = None) -> None:
        """Does nothing, because backward has updated the rows."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Does nothing, because there are no gradient tensors."""


class KernelOptimizer(BackwardOptimizer):
    """The fused optimizer of a kernel, as TorchRec sees it. Backward updates the rows with its learning rate.

    Args:
        params: The parameters of the tables, by ``<table>.weight``.
        optimizer: The optimizer that backward applies.
    """

    def __init__(self, params: dict[str, nn.Parameter], optimizer: Optimizer) -> None:
        super().__init__(params, {}, [{"params": list(params.values()), "lr": optimizer.lr}])

    def learning_rate(self) -> float:
        """Returns the current learning rate, which schedulers and warm-up may have changed."""
        return float(self.param_groups[0]["lr"])


class ParameterOptimizer(FusedOptimizer):  # type: ignore[misc]
    """The optimizer of one table's parameter. Its ``step`` sets the learning rate of the table's kernel, ``group``."""

    def __init__(self, name: str, parameter: nn.Parameter, group: KernelOptimizer) -> None:
        super().__init__({f"{name}.weight": parameter}, {}, [{"params": [parameter], "lr": group.learning_rate()}])
        self._group = group

    def step(self, closure: Any = None) -> None:
        """Sets the learning rate of the next backward pass. The last backward pass has updated the rows already."""
        self._group.param_groups[0]["lr"] = self.param_groups[0]["lr"]

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Sets the learning rate of the next backward pass. There are no gradient tensors."""
        self.step()
