"""The base class of the eager collections: their tables, groups and batches.

Tests: tests/modules/test_embedding_modules.py, tests/modules/test_against_sharded.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from torchrec_recstore.kernels import RowService
from torchrec_recstore.kernels.device_copies import (
    CopyTarget,
    to_host,
    weights_to_host,
)
from torchrec_recstore.modules.eager_groups import Bags, EagerGroups, EagerTable
from torchrec_recstore.modules.table_module import (
    LearningRate,
    RemoteTableModule,
    TableModule,
    rows_device,
)
from torchrec_recstore.ops import check_integers, concatenated
from torchrec_recstore.optim import Optimizer
from torchrec_recstore.options import TableOptions, check_int
from torchrec_recstore.quantization import RefusesQuantization
from torchrec_recstore.table_configs import (
    ROW_DTYPES,
    check_config,
    check_init_fn,
    initializer_of,
    missing_features,
)
from torchrec_recstore.table_parameter import are_trained

_Config = TypeVar("_Config", bound=BaseEmbeddingConfig)


class EagerCollection(RefusesQuantization, nn.Module):
    """The common base class of the eager collections."""

    _tables_name = ""
    """TorchRec's name of the attribute that has the tables."""

    def _register(
        self,
        configs: Sequence[_Config],
        enable_fusion: bool,
        fusion_k: int,
    ) -> None:
        if not isinstance(enable_fusion, bool):
            raise TypeError(
                f"enable_fusion must be a bool, got {type(enable_fusion).__name__}"
            )
        check_int("fusion_k", fusion_k, -(2**63))
        names: set[str] = set()
        for config in configs:
            if config.name in names:
                raise ValueError(f"Duplicate table name {config.name}")
            names.add(config.name)
            if not config.feature_names:
                config.feature_names = [config.name]  # TorchRec's default
        self._configs: list[Any] = list(configs)
        self._enable_fusion = enable_fusion
        self._feature_names = [config.feature_names for config in configs]
        self._names_by_table: list[list[str]] = get_embedding_names_by_table(
            self._configs
        )
        self._table_groups = EagerGroups()

    def _tables(
        self,
        optimizer: Optimizer,
        options: TableOptions | Mapping[str, TableOptions],
        fused: bool,
        device: torch.device | str | int | None,
        state_dtype: torch.dtype,
        client: RowService | None,
        staleness: int,
    ) -> nn.ModuleDict:
        """Returns the modules of the tables by name."""
        if client is not None:
            _check_remote(client, fused, device, state_dtype)
        elif staleness != 0:
            raise ValueError(
                f"staleness={staleness!r} needs client: tables in the module are always"
                " up to date"
            )
        rate = LearningRate(optimizer.lr)
        modules: dict[str, EagerTable] = {}
        options_of_tables = _options_of_tables(options, self._configs)
        for config, table_options in zip(self._configs, options_of_tables, strict=True):
            arguments = _table_arguments(config, optimizer, table_options, state_dtype)
            if client is None:
                modules[config.name] = TableModule(
                    arguments,
                    rate,
                    fused=fused,
                    device=device,
                )
            else:
                remote_table = client.table(
                    config.name,
                    (config.num_embeddings, config.embedding_dim),
                    arguments["dtype"],
                    optimizer,
                    # Other models may train the table that this one only reads.
                    replace(arguments["options"], frozen=False),
                    staleness,
                )
                modules[config.name] = RemoteTableModule(
                    remote_table,
                    rate,
                    frozen=arguments["options"].frozen,
                )
        self._has_device_rows = any(
            module.has_device_rows for module in modules.values()
        )
        return nn.ModuleDict(modules)

    def _modules_by_table(self) -> list[EagerTable]:
        return list(getattr(self, self._tables_name).values())

    @property
    def device(self) -> torch.device:
        """The device of the rows: ``cpu``, or ``meta`` if there are no rows."""
        return self._modules_by_table()[0].weight.device

    @property
    def learning_rate(self) -> float:
        """The learning rate of the fused optimizer.

        Each backward pass reads it; a new value applies from the next.
        """
        return self._modules_by_table()[0].learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._modules_by_table()[0].learning_rate = value

    def reset_parameters(self) -> None:
        """Removes all rows. Each id gets a new initial row when it is next trained."""
        for module in self._modules_by_table():
            module.reset_parameters()

    def _groups(self, kinds: Sequence[object]) -> Iterator[tuple[list[int], bool]]:
        """Yields groups of tables of one kind that one native call looks up: their
        numbers, and whether they train.
        """
        groups: dict[object, list[int]] = {}
        modules = self._modules_by_table()
        trained = are_trained(module.weight for module in modules)
        for number, kind in enumerate(kinds):
            key: object = number
            if self._enable_fusion:
                # A group takes either tables that their options freeze, or others, also
                # those whose weight is not trained.
                key = (kind, trained[number], modules[number].is_frozen)
                if modules[number].has_device_rows:
                    key = ("with device rows", key)
            groups.setdefault(key, []).append(number)

        for numbers in groups.values():
            first = numbers[0]
            yield numbers, self.training and trained[first]

    def _apply(self, *args: Any, **kwargs: Any) -> EagerCollection:
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._table_groups.clear()
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
    table_configs = []
    for config in configs or tables or ():
        if isinstance(config, Mapping):
            config = kind(**config)
        table_configs.append(config)
    for config in table_configs:
        if not isinstance(config, kind):
            raise TypeError(
                f"each of {argument} must be {kind.__name__} or a mapping, got"
                f" {type(config).__name__}"
            )
    if not table_configs:
        raise ValueError(f"{argument} must have at least one table")
    return table_configs


def _options_of_tables(
    options: TableOptions | Mapping[str, TableOptions],
    configs: Sequence[BaseEmbeddingConfig],
) -> list[TableOptions]:
    if isinstance(options, TableOptions):
        return [options] * len(configs)
    if not isinstance(options, Mapping) or not all(
        isinstance(value, TableOptions) for value in options.values()
    ):
        raise TypeError(
            "options must be TableOptions, or a mapping from table names to"
            " TableOptions"
        )
    unknown = sorted(set(options) - {config.name for config in configs})
    if unknown:
        raise ValueError(
            f"options name unknown table(s) {', '.join(map(repr, unknown))}"
        )
    return [options.get(config.name, TableOptions()) for config in configs]


def _table_arguments(
    config: BaseEmbeddingConfig,
    optimizer: Optimizer,
    options: TableOptions,
    state_dtype: torch.dtype,
) -> dict[str, Any]:
    """Returns the arguments of the ``Table`` for ``config``, which makes the same rows
    as in a sharded module.
    """
    check_config(config)
    check_init_fn(config, options)
    options = replace(options, initializer=initializer_of(config, options))
    return {
        "dim": config.embedding_dim,
        "dtype": ROW_DTYPES[config.data_type],
        "state_dtype": state_dtype,
        "optimizer": optimizer,
        "options": options,
        "name": config.name,
    }


def _check_remote(
    client: object,
    fused: bool,
    device: torch.device | str | int | None,
    state_dtype: torch.dtype,
) -> None:
    if not hasattr(client, "pooled_group"):
        raise TypeError(f"client must be a RecStoreClient, got {type(client).__name__}")
    if fused is not True:
        raise ValueError(
            "fused must be True with client: the servers apply the optimizer"
        )
    if state_dtype is not torch.float32:
        raise ValueError(
            f"state_dtype must be torch.float32 with client, got {state_dtype}: servers"
            " have no other"
        )
    if rows_device(device).type == "meta":
        raise ValueError(
            "device must be cpu with client, got meta: make the module on the CPU"
        )


class Features:
    """A batch from which each group of tables takes its features, with its weights if
    ``is_weighted``.
    """

    def __init__(
        self,
        features: KeyedJaggedTensor,
        is_weighted: bool,
        configs: Sequence[BaseEmbeddingConfig],
    ) -> None:
        check_integers(features.values().dtype, features.keys())
        if is_weighted and features.weights_or_none() is None:
            raise ValueError(
                f"is_weighted=True needs weights of the features {features.keys()}"
            )
        self.device = features.values().device
        self.on_device = features
        self.on_host = features
        self.target: CopyTarget | None = None
        """Where the rows of the batch go. None: they stay on the CPU."""
        if self.device.type != "cpu":
            self.on_host = _on_host(features, is_weighted)
            self.target = CopyTarget(self.device, torch.float32)
        self._is_weighted = is_weighted
        self._configs = configs

    @cached_property
    def jagged(self) -> dict[str, JaggedTensor]:
        """The features of the batch by name, on the CPU."""
        return self.on_host.to_dict()  # type: ignore[no-any-return]

    def ids(self, names: Sequence[str]) -> Tensor:
        """Returns the ids of features, (N,) int64, on the CPU, feature by feature."""
        if self._has_all(names):
            return self.on_host.values().to(torch.int64)  # type: ignore[no-any-return]
        values = [feature.values() for feature in self._features(names)]
        return concatenated(values).to(torch.int64)

    def bags(self, names: Sequence[str]) -> tuple[Bags, list[int] | None]:
        """Returns the bags of features, feature by feature, and None.

        If the batch size varies by feature, features with fewer bags are filled up with
        empty ones, and the second value is each feature's own number of bags.
        """
        varies = self.on_host.variable_stride_per_key()
        if self._has_all(names) and not varies:
            offsets = self.on_host.offsets().to(torch.int64)
            weights = self.on_host.weights().float() if self._is_weighted else None
            return Bags(self.ids(names), offsets, weights), None

        features = self._features(names)
        lengths = [feature.lengths().to(torch.int64) for feature in features]
        counts = [len(feature_lengths) for feature_lengths in lengths]
        most_bags = max(counts)
        padded_lengths = []
        for feature_lengths in lengths:
            missing_bags = most_bags - len(feature_lengths)
            padded_lengths.append(F.pad(feature_lengths, (0, missing_bags)))
        ends = torch.cat(padded_lengths).cumsum(0)
        offsets = F.pad(ends, (1, 0))

        weights = None
        if self._is_weighted:
            weights = concatenated([feature.weights() for feature in features]).float()
        bags = Bags(self.ids(names), offsets, weights)
        return bags, counts if varies else None

    def _features(self, names: Sequence[str]) -> list[JaggedTensor]:
        try:
            return [self.jagged[name] for name in names]
        except KeyError:
            raise ValueError(
                missing_features(self.on_host.keys(), self._configs)
            ) from None

    def _has_all(self, names: Sequence[str]) -> bool:
        return list(names) == list(self.on_host.keys())


def _on_host(features: KeyedJaggedTensor, is_weighted: bool) -> KeyedJaggedTensor:
    """Returns a batch of an accelerator on the CPU, without weights that are not used."""
    tensors = [features.values().to(torch.int64), features.lengths()]
    weights = features.weights().float() if is_weighted else None
    if weights is None:
        values, lengths = to_host(tensors)
    elif weights.requires_grad:
        values, lengths = to_host(tensors)
        weights = weights_to_host(weights)
    else:
        values, lengths, weights = to_host([*tensors, weights])
    strides = None
    if features.variable_stride_per_key():
        strides = features.stride_per_key_per_rank()
    return KeyedJaggedTensor(
        features.keys(),
        values,
        weights,
        lengths,
        stride_per_key_per_rank=strides,
        inverse_indices=features.inverse_indices_or_none(),
    )
