"""The plan's entry for a RecStore table."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ParameterSharding

from torchrec_recstore.optim import Optimizer
from torchrec_recstore.options import TableOptions
from torchrec_recstore.sharders.fused_params import OPTIMIZER_KEY, OPTIONS_KEY, CarriedOptions

RECSTORE_KERNEL: str = EmbeddingComputeKernel.CUSTOMIZED_KERNEL.value
"""TorchRec's name, in plans and constraints, for the kernel that RecStore provides."""


@dataclass
class RecStoreParameterSharding(ParameterSharding):  # type: ignore[misc]
    """A :class:`ParameterSharding` that takes a table's options to every rank. Pickles with the plan.

    Args:
        options: the table's options.
        optimizer: that of ``RecStoreSharder(optimizer=...)``, on its way to the kernel; None for a plan's own entries.
    """

    options: TableOptions = field(default_factory=TableOptions)
    optimizer: Optimizer | None = None

    @classmethod
    def of(cls, sharding: ParameterSharding, options: TableOptions) -> RecStoreParameterSharding:
        """``sharding`` with ``options`` attached."""
        return cls(**{f.name: getattr(sharding, f.name) for f in fields(ParameterSharding)}, options=options)

    def get_additional_fused_params(self) -> dict[str, Any]:
        """Called by TorchRec for customized kernels (``add_params_from_parameter_sharding``, torchrec 1.8.0)."""
        optimizer = {} if self.optimizer is None else {OPTIMIZER_KEY: self.optimizer}
        return {OPTIONS_KEY: CarriedOptions(self.options), **optimizer}
