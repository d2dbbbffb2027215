"""TorchRec's embedding collections over RecStore tables in one process."""

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


class Features:
    """A batch, of which each group of tables takes its features.

    Args:
        given: the batch.
        is_weighted: whether its weights count.

    Raises:
        TypeError: ids that are not integers.
        ValueError: weights count and there are none.
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
        """The features one by one, as they were given."""
        jagged: dict[str, JaggedTensor] = self.given.to_dict()
        return jagged

    def ids(self, names: Sequence[str]) -> Tensor:
        """(N,) int64 ids of features, one after the other."""
        whole = self._has_all(names)
        ids: Tensor = self.given.values() if whole else _joined([self.jagged[name].values() for name in names])
        return ids.to("cpu", torch.int64)

    def bags(self, names: Sequence[str]) -> tuple[Bags, list[int] | None]:
        """The bags of features, feature by feature.

        Returns:
            As many of each feature, and how many it has of its own where that varies: behind them there are empty ones.
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


def table_arguments(config: BaseEmbeddingConfig, optimizer: Optimizer, options: TableOptions) -> dict[str, Any]:
    """What the table of ``config`` is made with: the same rows as its sharded table has.

    Raises:
        ValueError: data type, initial range, ``init_fn`` or virtual table; the message names the table.
    """
    check_config(config)
    check_init_fn(config, options)
    return {
        "dim": config.embedding_dim,
        "dtype": ROW_DTYPES[config.data_type],
        "optimizer": optimizer,
        "options": replace(options, initializer=initializer_of(config, options)),
        "name": config.name,
    }


def options_of_tables(
    options: TableOptions | Mapping[str, TableOptions], configs: Sequence[BaseEmbeddingConfig]
) -> list[TableOptions]:
    """Each table's options, of a mapping by name or one for all.

    Raises:
        TypeError: something else.
        ValueError: a name that no table has.
    """
    if isinstance(options, TableOptions):
        return [options] * len(configs)
    if not isinstance(options, Mapping) or not all(isinstance(value, TableOptions) for value in options.values()):
        raise TypeError("options must be TableOptions, or a mapping of them by table name")
    unknown = sorted(set(options) - {config.name for config in configs})
    if unknown:
        raise ValueError(f"options name unknown table(s) {', '.join(map(repr, unknown))}")
    return [options.get(config.name, TableOptions()) for config in configs]


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


class RecStoreEmbeddingBagCollection(EagerCollection, EmbeddingBagCollectionInterface):  # type: ignore[misc]
    """TorchRec's ``EmbeddingBagCollection`` over tables that take any int64 id, in one process.

    The output is as its output: order, names and shapes. In training a new id gets its row, and backward updates rows
    with the fused optimizer; the numbers are those of the sharded module, to the bit. In evaluation, or with a table's
    ``weight.requires_grad`` off, nothing changes; an id without a row reads as ``TableOptions.missing`` says.

    Symbols: ``F`` features, ``B`` batch size.

    Args:
        embedding_bag_configs: of the tables: ``EmbeddingBagConfig``, or mappings of its arguments.
        lr: of the default optimizer.
        enable_fusion: look all tables that share pooling up in one native call; otherwise a call a table. The numbers
            are the same.
        fusion_k: accepted for compatibility; it limits nothing, ids have 64 bits.
        tables: TorchRec's name of ``embedding_bag_configs``; give one of the two.
        is_weighted: whether per-sample weights of the input count.
        device: ``cpu`` or ``meta``. Input on another device is copied to the CPU, and the output back.
        optimizer: of ``torchrec_recstore.optim``, for all tables; None: ``RowWiseAdagrad(lr)``.
        options: of all tables, or a mapping by table name.
        fused: whether backward updates the rows; otherwise it collects gradients for ``SparseSGD`` and the like.

    Raises:
        TypeError, ValueError: an argument that makes no sense, or a table that RecStore does not support; the message
            names it.
        ColdStoreError, ImportError: a cold store cannot be opened.

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
    ) -> None:
        super().__init__()
        self._embedding_bag_configs = given_configs(
            embedding_bag_configs, tables, "embedding_bag_configs", EmbeddingBagConfig
        )
        self._is_weighted = is_weighted
        self._poolings = [_pooling(config) for config in self._embedding_bag_configs]
        self.embedding_bags = self._set_up(
            self._embedding_bag_configs, lr, enable_fusion, fusion_k, optimizer, options, fused, device
        )

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled rows.

        Args:
            features: ids of at least the tables' features, of any integer type; a ``TensorDict`` too. A batch whose
                size varies by feature needs inverse indices, as with TorchRec's module.

        Returns:
            (B, sum of dims) float32 on the device of ``features``: table by table, feature by feature.

        Raises:
            KeyError: a feature is missing.
            TypeError: ids that are not integers.
            RuntimeError: the module is on the meta device.
            ValueError, MemoryError, ColdStoreError: as for :class:`torchrec_recstore.kernels.PooledKernel`.
        """
        batch = Features(maybe_td_to_kjt(features, None), self._is_weighted)
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
        """Whether per-sample weights of the input count."""
        return self._is_weighted

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables' configs, in their order."""
        return self._embedding_bag_configs

    def _modules_by_table(self) -> list[TableModule]:
        return list(self.embedding_bags.values())  # type: ignore[arg-type]


def _pooling(config: EmbeddingBagConfig) -> Any:
    if config.pooling not in (PoolingType.SUM, PoolingType.MEAN):
        raise ValueError(f"RecStore table {config.name!r}: pooling must be SUM or MEAN, got {config.pooling}")
    return pooling_type_to_str(config.pooling)


class RecStoreEmbeddingCollection(EagerCollection, EmbeddingCollectionInterface):  # type: ignore[misc]
    """TorchRec's ``EmbeddingCollection`` over tables that take any int64 id, in one process.

    As :class:`RecStoreEmbeddingBagCollection`, with a row an id instead of pooled bags.

    Args:
        embedding_configs: of the tables: ``EmbeddingConfig``, or mappings of its arguments; all of one dim.
        lr, enable_fusion, fusion_k, device, optimizer, options, fused: as for :class:`RecStoreEmbeddingBagCollection`.
        tables: TorchRec's name of ``embedding_configs``; give one of the two.
        need_indices: whether the output has the ids as its weights.

    Raises:
        TypeError, ValueError, ColdStoreError, ImportError: as there; tables of several dims.

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
    ) -> None:
        super().__init__()
        self._embedding_configs = given_configs(embedding_configs, tables, "embedding_configs", EmbeddingConfig)
        self._embedding_dim = self._embedding_configs[0].embedding_dim
        for config in self._embedding_configs:
            if config.embedding_dim != self._embedding_dim:
                raise ValueError(
                    f"the tables of a collection must have one embedding_dim: {config.name!r} has "
                    f"{config.embedding_dim}, not {self._embedding_dim}"
                )
        self._need_indices = need_indices
        self.embeddings = self._set_up(
            self._embedding_configs, lr, enable_fusion, fusion_k, optimizer, options, fused, device
        )

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """The row of each id.

        Args:
            features: ids of at least the tables' features, of any integer type; a ``TensorDict`` too.

        Returns:
            By feature (``feature@table`` where tables share it): values (ids of the feature, dim) float32 on the device
            of ``features``, lengths as given, and with ``need_indices`` the ids as weights.

        Raises:
            KeyError, TypeError, RuntimeError, ValueError, MemoryError, ColdStoreError: as for
                :class:`RecStoreEmbeddingBagCollection`.
        """
        batch = Features(maybe_td_to_kjt(features, None), False)
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
        """Whether the output has the ids as its weights."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """Columns of every table."""
        dim: int = self._embedding_dim
        return dim

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The tables' configs, in their order."""
        return self._embedding_configs

    def embedding_names_by_table(self) -> list[list[str]]:
        """The keys of the output, table by table."""
        return self._names_by_table

    def _modules_by_table(self) -> list[TableModule]:
        return list(self.embeddings.values())  # type: ignore[arg-type]
