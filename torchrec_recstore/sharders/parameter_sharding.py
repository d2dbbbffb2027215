"""The plan's entry for a RecStore table."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ParameterSharding

from torchrec_recstore.optim import Optimizer
from torchrec_recstore.options import TableOptions
from torchrec_recstore.sharders.fused_params import ACCUMULATION_KEY, OPTIMIZER_KEY, OPTIONS_KEY, CarriedOptions

RECSTORE_KERNEL: str = EmbeddingComputeKernel.CUSTOMIZED_KERNEL.value
"""TorchRec's name, in plans and constraints, for the kernel that RecStore provides."""


@dataclass
class RecStoreParameterSharding(ParameterSharding):  # type: ignore[misc]
    """A :class:`ParameterSharding` that takes a table's options to every rank. Pickles with the plan.

    Args:
        options: the table's options.
        optimizer, accumulation_steps: those of the sharder, on their way to the kernel; a planner leaves them out.
    """

    options: TableOptions = field(default_factory=TableOptions)
    optimizer: Optimizer | None = None
    accumulation_steps: int = 1

    @classmethod
    def of(cls, sharding: ParameterSharding, options: TableOptions) -> RecStoreParameterSharding:
        """``sharding`` with ``options`` attached."""
        return cls(**{f.name: getattr(sharding, f.name) for f in fields(ParameterSharding)}, options=options)

    def get_additional_fused_params(self) -> dict[str, Any]:
        """Called by TorchRec for customized kernels (``add_params_from_parameter_sharding``, torchrec 1.8.0)."""
        params: dict[str, Any] = {OPTIONS_KEY: CarriedOptions(self.options)}
        if self.optimizer is not None:
            params[OPTIMIZER_KEY] = self.optimizer
        if self.accumulation_steps > 1:
            params[ACCUMULATION_KEY] = self.accumulation_steps
        return params
