"""What both collections have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import get_embedding_names_by_table

from torchrec_recstore.modules.configs import options_of_tables, table_arguments
from torchrec_recstore.modules.lookups import Lookups
from torchrec_recstore.modules.settings import optimizer_of
from torchrec_recstore.modules.table_module import LearningRate, TableModule
from torchrec_recstore.optim import Optimizer
from torchrec_recstore.options import TableOptions
from torchrec_recstore.quantization import RefusesQuantization

_Config = TypeVar("_Config", bound=BaseEmbeddingConfig)
DEFAULT_OPTIONS = TableOptions()


class EagerCollection(RefusesQuantization, nn.Module):
    """What both collections have in common; each registers its tables under TorchRec's name for them."""

    def _set_up(
        self,
        configs: Sequence[_Config],
        lr: float,
        enable_fusion: bool,
        fusion_k: int,
        optimizer: Optimizer | None,
        options: TableOptions | Mapping[str, TableOptions],
        fused: bool,
        device: torch.device | str | int | None,
    ) -> nn.ModuleDict:
        if not isinstance(enable_fusion, bool):
            raise TypeError(f"enable_fusion must be a bool, got {type(enable_fusion).__name__}")
        if isinstance(fusion_k, bool) or not isinstance(fusion_k, int):
            raise TypeError(f"fusion_k must be an int, got {type(fusion_k).__name__}")
        names: set[str] = set()
        for config in configs:
            if config.name in names:
                raise ValueError(f"Duplicate table name {config.name}")
            names.add(config.name)
            if not config.feature_names:
                config.feature_names = [config.name]  # as TorchRec does
        optimizer = optimizer_of(optimizer, lr)
        self._rate = LearningRate(optimizer.lr)
        self._enable_fusion = enable_fusion
        self._feature_names = [config.feature_names for config in configs]
        self._names_by_table: list[list[str]] = get_embedding_names_by_table(list(configs))
        self._lookups = Lookups()
        return nn.ModuleDict(
            {
                config.name: TableModule(
                    table_arguments(config, optimizer, of_table), self._rate, fused=fused, device=device
                )
                for config, of_table in zip(configs, options_of_tables(options, configs), strict=True)
            }
        )

    def _modules_by_table(self) -> list[TableModule]:
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Where rows live: cpu or meta."""
        return self._modules_by_table()[0].weight.device

    @property
    def learning_rate(self) -> float:
        """Of the fused optimizer, read in each backward; setting it changes the next one's."""
        return self._modules_by_table()[0].learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._modules_by_table()[0].learning_rate = value

    def reset_parameters(self) -> None:
        """Forgets all rows: each starts anew when it is next looked up."""
        for module in self._modules_by_table():
            module.reset_parameters()

    def _groups(self, kinds: Sequence[object]) -> Iterator[tuple[list[int], bool]]:
        """Tables that are looked up in one call, by number, and whether they are trained.

        Args:
            kinds: what else the tables of a call have in common.
        """
        groups: dict[object, list[int]] = {}
        modules = self._modules_by_table()
        for number, (module, kind) in enumerate(zip(modules, kinds, strict=True)):
            trains = module.weight.requires_grad
            groups.setdefault((kind, trains) if self._enable_fusion else number, []).append(number)
        for numbers in groups.values():
            yield numbers, self.training and modules[numbers[0]].weight.requires_grad

    def _apply(self, *args: Any, **kwargs: Any) -> EagerCollection:
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._lookups.clear()
        return self


def given_configs(
    configs: Sequence[_Config | Mapping[str, Any]] | None,
    tables: Sequence[_Config | Mapping[str, Any]] | None,
    argument: str,
    kind: type[_Config],
) -> list[_Config]:
    """The configs under whichever of their names."""
    if (configs is None) == (tables is None):
        raise TypeError(f"give either {argument} or tables")
    found = [kind(**config) if isinstance(config, Mapping) else config for config in configs or tables or ()]
    for config in found:
        if not isinstance(config, kind):
            raise TypeError(f"{argument} must be {kind.__name__} or mappings, got {type(config).__name__}")
    if not found:
        raise ValueError(f"{argument} must have at least one table")
    return found
