"""TorchRec's embedding collections with RecStore tables in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    pooling_type_to_str,
)
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    get_embedding_names_by_table,
    reorder_inverse_indices,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_recstore.modules.lookups import Bags, Lookups
from torchrec_recstore.modules.table_module import LearningRate, TableModule, optimizer_of
from torchrec_recstore.optim import Optimizer
from torchrec_recstore.options import TableOptions
from torchrec_recstore.quantization import RefusesQuantization
from torchrec_recstore.table_configs import ROW_DTYPES, check_config, check_init_fn, initializer_of

_Config = TypeVar("_Config", bound=BaseEmbeddingConfig)

DEFAULT_OPTIONS = TableOptions()


class _Features:
    """A batch from which each group of tables takes its features.

    Args:
        given: The batch.
        is_weighted: Whether the per-sample weights of the batch are used.

    Raises:
        TypeError: The ids are not integers.
        ValueError: ``is_weighted`` is True and the batch has no weights.
    """

    def __init__(self, given: KeyedJaggedTensor, is_weighted: bool) -> None:
        dtype = given.values().dtype
        if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
            raise TypeError(f"ids must be integers, got {dtype} for features {given.keys()}")
        self.given = given
        self.device = given.values().device
        self._is_weighted = is_weighted
        if is_weighted and given.weights_or_none() is None:
            raise ValueError(f"is_weighted=True needs weights of the features {given.keys()}")

    @cached_property
    def jagged(self) -> dict[str, JaggedTensor]:
        """The features of the batch by name, as given."""
        jagged: dict[str, JaggedTensor] = self.given.to_dict()
        return jagged

    def ids(self, names: Sequence[str]) -> Tensor:
        """Returns the ids of features, (N,) int64, on the CPU, feature by feature."""
        whole = self._has_all(names)
        ids: Tensor = self.given.values() if whole else _joined([self.jagged[name].values() for name in names])
        return ids.to("cpu", torch.int64)

    def bags(self, names: Sequence[str]) -> tuple[Bags, list[int] | None]:
        """Returns the bags of features, feature by feature.

        Returns:
            The bags, and None. If the batch size varies by feature, empty bags are appended to the shorter features, so
            that all features have the same number of bags, and the second value is each feature's own number of bags.
        """
        varies = self.given.variable_stride_per_key()
        if self._has_all(names) and not varies:
            weights = self.given.weights() if self._is_weighted else None
            offsets = self.given.offsets().to("cpu", torch.int64)
            return Bags(self.ids(names), offsets, _on_cpu(weights)), None
        parts = [self.jagged[name] for name in names]
        lengths = [part.lengths().to("cpu", torch.int64) for part in parts]
        counts = [len(some) for some in lengths]
        most = max(counts)
        padded = torch.cat([F.pad(some, (0, most - count)) for some, count in zip(lengths, counts, strict=True)])
        offsets = F.pad(padded.cumsum(0), (1, 0))
        weights = _joined([part.weights() for part in parts]) if self._is_weighted else None
        return Bags(self.ids(names), offsets, _on_cpu(weights)), counts if varies else None

    def _has_all(self, names: Sequence[str]) -> bool:
        return list(names) == list(self.given.keys())


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _on_cpu(weights: Tensor | None) -> Tensor | None:
    return None if weights is None else weights.to("cpu", torch.float32)


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
        return nn.ModuleDict(
            {
                config.name: TableModule(
                    _table_arguments(config, optimizer, of_table, state_dtype), self._rate, fused=fused, device=device
                )
                for config, of_table in zip(configs, _options_of_tables(options, configs), strict=True)
            }
        )

    def _modules_by_table(self) -> list[TableModule]:
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


def _given_configs(
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


class RecStoreEmbeddingBagCollection(EagerCollection, EmbeddingBagCollectionInterface):  # type: ignore[misc]
    """An ``EmbeddingBagCollection`` in one process whose tables accept any int64 id.

    The output has the order, names and shapes of TorchRec's ``EmbeddingBagCollection``. In training, the forward pass
    makes a row for each new id, and the backward pass updates the rows with the fused optimizer. The results are equal
    to those of the sharded module, bit for bit. In evaluation, or if a table's ``weight.requires_grad`` is False,
    nothing changes, and ``TableOptions.missing`` determines the row that is read for an id without a row.

    Args:
        embedding_bag_configs: The configs of the tables: ``EmbeddingBagConfig``, or mappings of its arguments.
        lr: The learning rate of the default optimizer. Default: 0.01.
        enable_fusion: Whether one native call looks up all tables that have the same pooling. If False, there is one
            call for each table; the results are the same. Default: True.
        fusion_k: Has no effect; ids have 64 bits. It is accepted for compatibility. Default: 30.
        tables: TorchRec's name for ``embedding_bag_configs``. Exactly one of the two must be given.
        is_weighted: Whether the per-sample weights of the input are used. Default: False.
        device: ``cpu`` or ``meta``. Input on another device is copied to the CPU, and the output is copied back.
            Default: None, ``meta`` if it is torch's default device, else ``cpu``.
        optimizer: The optimizer of all tables, from ``torchrec_recstore.optim``. Default: None, ``RowWiseAdagrad(lr)``.
        options: The options of all tables, or a mapping from table names to options. Default: ``TableOptions()``.
        fused: Whether the backward pass updates the rows. If False, it collects gradients for a sparse optimizer, for
            example ``SparseSGD``. Default: True.
        state_dtype: The data type in which optimizer state is stored, ``torch.float32`` or ``float16``. See
            :class:`torchrec_recstore.store.Table`. Default: ``torch.float32``.

    Raises:
        TypeError: An argument has an unsupported type; the message names the argument.
        ValueError: An argument has an unsupported value, or RecStore does not support a table; the message names the
            argument or the table.
        ColdStoreError: A cold store cannot be opened.
        ImportError: The package of a cold store is not installed.

    Example::

        user = EmbeddingBagConfig(name="t_user", embedding_dim=16, num_embeddings=2**40, feature_names=["user"])
        ebc = RecStoreEmbeddingBagCollection([user])
        ids = KeyedJaggedTensor(["user"], values=torch.tensor([7, -1, 2**62]), lengths=torch.tensor([2, 1]))
        ebc(ids).values().sum().backward()  # makes three rows and updates them
    """

    def __init__(
        self,
        embedding_bag_configs: Sequence[EmbeddingBagConfig | Mapping[str, Any]] | None = None,
        lr: float = 0.01,
        enable_fusion: bool = True,
        fusion_k: int = 30,
        *,
        tables: Sequence[EmbeddingBagConfig | Mapping[str, Any]] | None = None,
        is_weighted: bool = False,
        device: torch.device | str | int | None = None,
        optimizer: Optimizer | None = None,
        options: TableOptions | Mapping[str, TableOptions] = DEFAULT_OPTIONS,
        fused: bool = True,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self._embedding_bag_configs = _given_configs(
            embedding_bag_configs, tables, "embedding_bag_configs", EmbeddingBagConfig
        )
        self._is_weighted = is_weighted
        self._poolings = [_pooling(config) for config in self._embedding_bag_configs]
        self.embedding_bags = self._set_up(
            self._embedding_bag_configs, lr, enable_fusion, fusion_k, optimizer, options, fused, device, state_dtype
        )

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Returns the pooled rows of the tables' features.

        Args:
            features: The ids, of any integer dtype, of the tables' features and possibly of others; a
                ``KeyedJaggedTensor`` or a ``TensorDict``. If the batch size varies by feature, the features must have
                inverse indices, as with TorchRec's module.

        Returns:
            (batch size, sum of dims) float32, on the device of ``features``: table by table, feature by feature.

        Raises:
            KeyError: A feature is missing.
            TypeError: The ids are not integers.
            RuntimeError: The module is on the meta device.
            ValueError, MemoryError, ColdStoreError: See :class:`torchrec_recstore.kernels.PooledKernel`.
        """
        batch = _Features(maybe_td_to_kjt(features, None), self._is_weighted)
        modules = self._modules_by_table()
        flat_names = [name for names in self._feature_names for name in names]
        inverse = reorder_inverse_indices(batch.given.inverse_indices_or_none(), flat_names).to("cpu")
        pooled: dict[int, list[Tensor]] = {}
        whole: Tensor | None = None
        for numbers, trains in self._groups(self._poolings):
            feature_tables = [place for place, number in enumerate(numbers) for _ in self._feature_names[number]]
            names = [name for number in numbers for name in self._feature_names[number]]
            bags, counts = batch.bags(names)
            group = [modules[number] for number in numbers]
            out = self._lookups.bags(group, feature_tables, self._poolings[numbers[0]], bags, train=trains)
            if len(numbers) == len(modules) and counts is None and inverse.numel() == 0:
                whole = out
                break
            dims = [group[place].table.dim for place in feature_tables]
            parts = iter(torch.split(out, dims, dim=1))
            sizes = iter([out.shape[0]] * len(names) if counts is None else counts)
            for number in numbers:
                pooled[number] = [next(parts)[: next(sizes)] for _ in self._feature_names[number]]
        if whole is None:
            every = [part for number in range(len(modules)) for part in pooled[number]]
            if inverse.numel():
                every = [part.index_select(0, which) for part, which in zip(every, inverse, strict=True)]
            whole = torch.cat(every, dim=1)
        lengths = [c.embedding_dim for c in self._embedding_bag_configs for _ in c.feature_names]
        keys = [name for names in self._names_by_table for name in names]
        return KeyedTensor(keys=keys, length_per_key=lengths, values=whole.to(batch.device))

    def is_weighted(self) -> bool:
        """Returns whether the per-sample weights of the input are used."""
        return self._is_weighted

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Returns the configs of the tables, in the given order."""
        return self._embedding_bag_configs

    def _modules_by_table(self) -> list[TableModule]:
        return list(self.embedding_bags.values())  # type: ignore[arg-type]


def _pooling(config: EmbeddingBagConfig) -> Any:
    if config.pooling not in (PoolingType.SUM, PoolingType.MEAN):
        raise ValueError(f"RecStore table {config.name!r}: pooling must be SUM or MEAN, got {config.pooling}")
    return pooling_type_to_str(config.pooling)


class RecStoreEmbeddingCollection(EagerCollection, EmbeddingCollectionInterface):  # type: ignore[misc]
    """An ``EmbeddingCollection`` in one process whose tables accept any int64 id.

    The output has one row for each id. Rows are made and updated as in :class:`RecStoreEmbeddingBagCollection`.

    Args:
        embedding_configs: The configs of the tables: ``EmbeddingConfig``, or mappings of its arguments. All tables must
            have the same dim.
        lr, enable_fusion, fusion_k, device, optimizer, options, fused, state_dtype: See
            :class:`RecStoreEmbeddingBagCollection`.
        tables: TorchRec's name for ``embedding_configs``. Exactly one of the two must be given.
        need_indices: Whether the output has the ids as its weights. Default: False.

    Raises:
        ValueError: The tables have different dims.
        TypeError, ValueError, ColdStoreError, ImportError: See :class:`RecStoreEmbeddingBagCollection`.

    Example::

        item = EmbeddingConfig(name="t_item", embedding_dim=8, num_embeddings=2**40, feature_names=["item"])
        ec = RecStoreEmbeddingCollection([item])
        ids = KeyedJaggedTensor(["item"], values=torch.tensor([5, -3, 5]), lengths=torch.tensor([2, 1]))
        ec(ids)["item"].values()  # (3, 8)
    """

    def __init__(
        self,
        embedding_configs: Sequence[EmbeddingConfig | Mapping[str, Any]] | None = None,
        lr: float = 0.01,
        enable_fusion: bool = True,
        fusion_k: int = 30,
        *,
        tables: Sequence[EmbeddingConfig | Mapping[str, Any]] | None = None,
        need_indices: bool = False,
        device: torch.device | str | int | None = None,
        optimizer: Optimizer | None = None,
        options: TableOptions | Mapping[str, TableOptions] = DEFAULT_OPTIONS,
        fused: bool = True,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self._embedding_configs = _given_configs(embedding_configs, tables, "embedding_configs", EmbeddingConfig)
        self._embedding_dim = self._embedding_configs[0].embedding_dim
        for config in self._embedding_configs:
            if config.embedding_dim != self._embedding_dim:
                raise ValueError(
                    f"the tables of a collection must have the same embedding_dim: {config.name!r} has "
                    f"{config.embedding_dim}, not {self._embedding_dim}"
                )
        self._need_indices = need_indices
        self.embeddings = self._set_up(
            self._embedding_configs, lr, enable_fusion, fusion_k, optimizer, options, fused, device, state_dtype
        )

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Returns the row of each id.

        Args:
            features: The ids, of any integer dtype, of the tables' features and possibly of others; a
                ``KeyedJaggedTensor`` or a ``TensorDict``.

        Returns:
            One ``JaggedTensor`` for each feature, by the feature's name, or by ``feature@table`` if several tables have
            the feature. Its values are (ids of the feature, dim) float32, on the device of ``features``. Its lengths
            are those of the input. With ``need_indices``, its weights are the ids.

        Raises:
            KeyError: A feature is missing.
            TypeError: The ids are not integers.
            RuntimeError: The module is on the meta device.
            ValueError, MemoryError, ColdStoreError: See :class:`torchrec_recstore.kernels.SequenceKernel`.
        """
        batch = _Features(maybe_td_to_kjt(features, None), False)
        modules = self._modules_by_table()
        rows: dict[int, Tensor] = {}
        for numbers, trains in self._groups([None] * len(modules)):
            ids = [batch.ids(self._feature_names[number]) for number in numbers]
            counts = [len(some) for some in ids]
            group = [modules[number] for number in numbers]
            parts = self._lookups.rows(group, torch.cat(ids) if len(ids) > 1 else ids[0], counts, train=trains)
            rows.update(zip(numbers, parts, strict=True))
        found: dict[str, JaggedTensor] = {}
        for number, names in enumerate(self._names_by_table):
            jagged = [batch.jagged[name] for name in self._feature_names[number]]
            first = 0
            for name, one in zip(names, jagged, strict=True):
                count = len(one.values())
                found[name] = JaggedTensor(
                    values=rows[number][first : first + count].to(batch.device),
                    lengths=one.lengths(),
                    weights=one.values() if self._need_indices else None,
                )
                first += count
        return found

    def need_indices(self) -> bool:
        """Returns whether the output has the ids as its weights."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """Returns the number of columns of every table."""
        dim: int = self._embedding_dim
        return dim

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Returns the configs of the tables, in the given order."""
        return self._embedding_configs

    def embedding_names_by_table(self) -> list[list[str]]:
        """Returns the keys of the output, as one list for each table."""
        return self._names_by_table

    def _modules_by_table(self) -> list[TableModule]:
        return list(self.embeddings.values())  # type: ignore[arg-type]
