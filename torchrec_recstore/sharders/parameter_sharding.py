"""The plan's entry for a RecStore table."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding

from torchrec_recstore.optim import Optimizer
from torchrec_recstore.options import TableOptions
from torchrec_recstore.sharders.fused_params import ACCUMULATION_KEY, OPTIMIZER_KEY, OPTIONS_KEY, CarriedOptions

RECSTORE_KERNEL: str = EmbeddingComputeKernel.CUSTOMIZED_KERNEL.value
"""TorchRec's name, in plans and constraints, for the kernel that RecStore provides."""


class RecStoreModulePlan(EmbeddingModuleShardingPlan):  # type: ignore[misc]
    """A module's plan in which TorchRec's own kernels are those that constraints ask for."""


@dataclass
class RecStoreParameterSharding(ParameterSharding):  # type: ignore[misc]
    """A :class:`ParameterSharding` that takes a table's options to every rank. Pickles with the plan.

    Args:
        options: the table's options.
        row_name: The name that decides the table's initial rows and keeps them apart in cold stores; None: the name in
            the table's config. A planner sets it where several collections of the model have a table of that name.
        optimizer, accumulation_steps: those of the sharder, on their way to the kernel; a planner leaves them out.
    """

    options: TableOptions = field(default_factory=TableOptions)
    row_name: str | None = None
    optimizer: Optimizer | None = None
    accumulation_steps: int = 1

    @classmethod
    def of(
        cls, sharding: ParameterSharding, options: TableOptions, row_name: str | None = None
    ) -> RecStoreParameterSharding:
        """``sharding`` with ``options`` and ``row_name`` attached."""
        stock = {f.name: getattr(sharding, f.name) for f in fields(ParameterSharding)}
        return cls(**stock, options=options, row_name=row_name)

    def get_additional_fused_params(self) -> dict[str, Any]:
        """Called by TorchRec for customized kernels (``add_params_from_parameter_sharding``, torchrec 1.8.0)."""
        params: dict[str, Any] = {OPTIONS_KEY: CarriedOptions(self.options, self.row_name)}
        if self.optimizer is not None:
            params[OPTIMIZER_KEY] = self.optimizer
        if self.accumulation_steps > 1:
            params[ACCUMULATION_KEY] = self.accumulation_steps
        return params
