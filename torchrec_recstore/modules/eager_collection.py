"""The common base class of the eager collections: their tables, and the groups that one call looks up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import get_embedding_names_by_table

from torchrec_recstore.kernels import RemoteTable, RowService
from torchrec_recstore.modules.lookups import EagerTable, Lookups
from torchrec_recstore.modules.remote_table_module import RemoteTableModule
from torchrec_recstore.modules.table_module import LearningRate, TableModule, optimizer_of, rows_device
from torchrec_recstore.optim import Optimizer
from torchrec_recstore.options import TableOptions
from torchrec_recstore.quantization import RefusesQuantization
from torchrec_recstore.table_configs import ROW_DTYPES, check_config, check_init_fn, initializer_of

TableModules = list[EagerTable]
"""The modules of a collection's tables, in the order of the configs."""

_Config = TypeVar("_Config", bound=BaseEmbeddingConfig)


def _table_arguments(
    config: BaseEmbeddingConfig, optimizer: Optimizer, options: TableOptions, state_dtype: torch.dtype
) -> dict[str, Any]:
    """Returns the arguments of the ``Table`` for ``config``. The table makes the same rows as in a sharded module.

    Raises:
        ValueError: RecStore does not support the data type, the initial range or the ``init_fn`` of ``config``, or
            ``config`` has a virtual table; the message names the table.
    """
    check_config(config)
    check_init_fn(config, options)
    return {
        "dim": config.embedding_dim,
        "dtype": ROW_DTYPES[config.data_type],
        "optimizer": optimizer,
        "options": replace(options, initializer=initializer_of(config, options)),
        "name": config.name,
        "state_dtype": state_dtype,
    }


def _check_remote(
    client: object, fused: bool, device: torch.device | str | int | None, state_dtype: torch.dtype
) -> None:
    """Raises an error if ``client`` is not a client, or if an argument cannot be used together with it."""
    if not hasattr(client, "pooled_kernel"):
        raise TypeError(f"client must be a RecStoreClient, got {type(client).__name__}")
    if fused is not True:
        raise ValueError("fused must be True with client: the servers apply the optimizer")
    if state_dtype is not torch.float32:
        raise ValueError(f"state_dtype must be torch.float32 with client, got {state_dtype}: servers have no other")
    if rows_device(device).type == "meta":
        raise ValueError("device must be cpu with client, got meta: make the module on the CPU")


def _remote_table(
    client: RowService, config: BaseEmbeddingConfig, optimizer: Optimizer, options: TableOptions, staleness: int
) -> RemoteTable:
    """Returns the table for ``config`` of a client, and creates it if it does not exist.

    Raises:
        ValueError: See :func:`_table_arguments`.
    """
    arguments = _table_arguments(config, optimizer, options, torch.float32)
    shape = (config.num_embeddings, config.embedding_dim)
    return client.table(config.name, shape, arguments["dtype"], optimizer, arguments["options"], staleness)


def _options_of_tables(
    options: TableOptions | Mapping[str, TableOptions], configs: Sequence[BaseEmbeddingConfig]
) -> list[TableOptions]:
    """Returns the options of each table.

    Args:
        options: The options of all tables, or a mapping from table names to options.
        configs: The configs of the tables.

    Raises:
        TypeError: ``options`` is neither ``TableOptions`` nor a mapping of them.
        ValueError: The mapping has a name that no table has.
    """
    if isinstance(options, TableOptions):
        return [options] * len(configs)
    if not isinstance(options, Mapping) or not all(isinstance(value, TableOptions) for value in options.values()):
        raise TypeError("options must be TableOptions, or a mapping from table names to TableOptions")
    unknown = sorted(set(options) - {config.name for config in configs})
    if unknown:
        raise ValueError(f"options name unknown table(s) {', '.join(map(repr, unknown))}")
    return [options.get(config.name, TableOptions()) for config in configs]


class EagerCollection(RefusesQuantization, nn.Module):
    """The common base class of the eager collections. Each subclass registers its tables under TorchRec's name."""

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
        state_dtype: torch.dtype,
        client: RowService | None,
        staleness: int,
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
                config.feature_names = [config.name]  # TorchRec's default
        optimizer = optimizer_of(optimizer, lr)
        self._rate = LearningRate(optimizer.lr)
        self._enable_fusion = enable_fusion
        self._feature_names = [config.feature_names for config in configs]
        self._names_by_table: list[list[str]] = get_embedding_names_by_table(list(configs))
        self._lookups = Lookups()
        if client is not None:
            _check_remote(client, fused, device, state_dtype)
            return nn.ModuleDict(
                {
                    config.name: RemoteTableModule(
                        _remote_table(client, config, optimizer, of_table, staleness), self._rate
                    )
                    for config, of_table in zip(configs, _options_of_tables(options, configs), strict=True)
                }
            )
        if staleness != 0:
            raise ValueError(f"staleness={staleness!r} needs client: tables in the module are always up to date")
        return nn.ModuleDict(
            {
                config.name: TableModule(
                    _table_arguments(config, optimizer, of_table, state_dtype), self._rate, fused=fused, device=device
                )
                for config, of_table in zip(configs, _options_of_tables(options, configs), strict=True)
            }
        )

    def _modules_by_table(self) -> TableModules:
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """The device of the rows: ``cpu``, or ``meta`` if there are no rows."""
        return self._modules_by_table()[0].weight.device

    @property
    def learning_rate(self) -> float:
        """The learning rate of the fused optimizer. Each backward pass reads it; a new value applies from the next."""
        return self._modules_by_table()[0].learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._modules_by_table()[0].learning_rate = value

    def reset_parameters(self) -> None:
        """Removes all rows. Each id gets a new initial row when it is next trained."""
        for module in self._modules_by_table():
            module.reset_parameters()

    def _groups(self, kinds: Sequence[object]) -> Iterator[tuple[list[int], bool]]:
        """Yields groups of tables that one native call looks up: the tables' numbers, and whether they are trained.

        Args:
            kinds: One value for each table. Tables with different values are in different groups.
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
    """Returns the configs from the argument that is given: ``configs`` or ``tables``."""
    if (configs is None) == (tables is None):
        raise TypeError(f"exactly one of {argument} and tables must be given")
    found = [kind(**config) if isinstance(config, Mapping) else config for config in configs or tables or ()]
    for config in found:
        if not isinstance(config, kind):
            raise TypeError(f"each of {argument} must be {kind.__name__} or a mapping, got {type(config).__name__}")
    if not found:
        raise ValueError(f"{argument} must have at least one table")
    return found
