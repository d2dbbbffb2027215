"""What sharders for RecStore tables have in common."""

from __future__ import annotations

import copy
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torchrec.distributed.embedding_types import BaseEmbeddingSharder
from torchrec.distributed.types import ParameterSharding, ShardingEnv

from torchrec_recstore.optim import Optimizer
from torchrec_recstore.sharders.collection import RecStoreCollection
from torchrec_recstore.sharders.own_arguments import deal_out, with_own_arguments
from torchrec_recstore.sharders.parameter_sharding import RECSTORE_KERNEL
from torchrec_recstore.sharders.plan_checks import refuse_replicas
from torchrec_recstore.sharders.resident import ResidentParameter
from torchrec_recstore.sharders.stock_tables import warn_if_overridden, warn_of_stock_tables
from torchrec_recstore.warn import warn_user

_Self = TypeVar("_Self", bound="RecStoreCollectionSharder")


class RecStoreCollectionSharder(BaseEmbeddingSharder):  # type: ignore[misc]
    """Mixed into TorchRec's sharders: offers RecStore's kernel, and TorchRec's own on request."""

    _sharded: ClassVar[type[RecStoreCollection]]
    _offers_stock = False

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        *args: Any,
        optimizer: Optimizer | None = None,
        accumulation_steps: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(with_own_arguments(fused_params, optimizer, accumulation_steps), *args, **kwargs)

    def with_stock_kernels(self: _Self) -> _Self:
        """A copy that offers TorchRec's own kernels as well, for planners that choose by constraint."""
        offer = copy.copy(self)
        offer._offers_stock = True
        return offer

    def _dealt_out(
        self, module: nn.Module, params: dict[str, ParameterSharding], env: ShardingEnv
    ) -> tuple[dict[str, Any] | None, dict[str, ParameterSharding]]:
        """``fused_params`` and the plan's entries as TorchRec passes them on."""
        refuse_replicas(params, env)
        warn_of_stock_tables(self, params)
        kernels = {sharding.compute_kernel for sharding in params.values()}
        if RECSTORE_KERNEL in kernels and module.device != torch.device("meta"):
            warn_user(
                "RecStore tables do not take the weights of the module that is sharded, which is not on the meta "
                "device: make it with device='meta'; TableOptions(initializer=...) sets initial rows, "
                "load_dense_weights given ones"
            )
        return deal_out(self.fused_params, params, super().shardable_parameters(module))

    def shardable_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """The tables by name; for planning they weigh what their resident rows weigh."""
        parameters: dict[str, nn.Parameter] = super().shardable_parameters(module)
        if self._offers_stock:
            return parameters  # whose weight depends on the kernel: left to the planner's estimator
        return {name: ResidentParameter.of(parameter, name=name) for name, parameter in parameters.items()}

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """The sharding types that RecStore supports, on any device, and what TorchRec's sharder offers on request."""
        stock = super().sharding_types(compute_device_type) if self._offers_stock else []
        return list(dict.fromkeys([*self._sharded._supported, *stock]))

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """RecStore's kernel for the sharding types it supports, and TorchRec's kernels on request."""
        kernels = [RECSTORE_KERNEL] if sharding_type in self._sharded._supported else []
        if self._offers_stock and sharding_type in super().sharding_types(compute_device_type):
            kernels += super().compute_kernels(sharding_type, compute_device_type)
        return kernels

    @property
    def module_type(self) -> type[nn.Module]:
        """The class of the modules that it shards."""
        kind: type[nn.Module] = super().module_type
        warn_if_overridden(self, kind)
        return kind

    @property
    def sharded_module_type(self) -> type[RecStoreCollection]:
        """The class of the sharded module."""
        return self._sharded
