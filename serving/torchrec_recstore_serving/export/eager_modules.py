"""The eager form of an exported model: static modules on TorchRec's collections.

They convert raw ids to row numbers, and call TorchRec's own modules.

Tests: tests/serving/export/test_from_model.py.
"""

# There is no "from __future__ import annotations" here, because fx copies the
# annotations of forward unchanged and TorchScript reads them.

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    QuantConfig,
)
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    get_embedding_names_by_table,
)
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.quant.embedding_modules import (
    EmbeddingBagCollection as QuantEmbeddingBagCollection,
)
from torchrec.quant.embedding_modules import (
    EmbeddingCollection as QuantEmbeddingCollection,
)
from torchrec.quant.embedding_modules import quant_prep_enable_register_tbes
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_recstore.modules import RecStoreEmbedding, RecStoreEmbeddingBag
from torchrec_recstore.torchrec_seams.models import (
    kernels_of,
    set_device,
    weights_are_positions,
)
from torchrec_recstore_serving.export.batch_checks import checked_features
from torchrec_recstore_serving.export.row_formats import FORMAT_NAMES
from torchrec_recstore_serving.export.sorted_tables import (
    check_lengths,
    id_buffer,
    integers,
    pooled_in_order,
    rows_of_ids,
    rows_of_numbers,
    served_table,
)

torch.fx.wrap("checked_features")  # A module that fx traces calls it, too.


@dataclass(frozen=True)
class StaticTable:
    """The ids and rows of a table that does not change.

    Args:
        config: TorchRec's config of the table, with the names of its features.
        ids: (R,) int64. The ids in ascending order. None for a table of TorchRec, in
            which row i is id i.
        weight: (R + 1, dim) float32. The rows, after a first row for ids without a row.
            Without ids: (R, dim), without that first row.
    """

    config: BaseEmbeddingConfig
    ids: Tensor | None
    weight: Tensor


class IdMap(nn.Module):
    """A module that holds the ids of one table.

    Args:
        ids: (R,) int64. The ids in ascending order. None for a table of TorchRec, in
            which row i is id i.
        rows: The number of rows of the table.
    """

    if TYPE_CHECKING:  # TorchScript must not read this annotation.
        ids: Tensor

    def __init__(self, ids: Tensor | None, rows: int) -> None:
        super().__init__()
        self.register_buffer("ids", id_buffer(ids))
        self.rows = rows


class ExactEmbeddingBag(nn.EmbeddingBag):
    """An ``nn.EmbeddingBag`` whose results are those of RecStore's kernels.

    They are bit-equal, also for weighted means.
    """

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Pools the rows of bags.

        Args:
            input: (N,) of an integer type. The row numbers.
            offsets: (bags + 1,) of an integer type. The offsets of the bags. TorchRec's
                collection always passes them.
            per_sample_weights: (N,) floating point. The weights of the rows. None: no
                weights.

        Returns:
            (bags, dim) float32.
        """
        assert offsets is not None
        return pooled_in_order(
            self.weight,
            input,
            offsets,
            per_sample_weights,
            self.mode == "mean",
        )


@torch.fx.wrap
def rows_instead_of_ids(
    features: KeyedJaggedTensor,
    names: list[str],
    keys: list[str],
    table_of: list[int],
    ids: list[Tensor],
    rows: list[int],
    weighted: bool,
    pooled: bool,
) -> KeyedJaggedTensor:
    """Replaces the raw ids of a batch by row numbers.

    Args:
        features: The batch. Its ids have any integer type.
        names: The names of the features to look up. A feature of several tables is
            listed once for each table.
        keys: For each entry of ``names``, the key of the feature in the result.
        table_of: For each entry of ``names``, the number of the table.
        ids: For each table, (R + 1,) int64, the result of :func:`id_buffer`; or (0,)
            for a table of TorchRec.
        rows: For each table, the number of rows.
        weighted: Whether the weights of the batch are used.
        pooled: Whether the collection pools rows.

    Raises:
        ValueError: See :func:`checked_features`, :func:`integers` and
            :func:`check_lengths`.
    """
    by_name = checked_features(features, names, weighted, pooled).to_dict()
    values: list[Tensor] = []
    lengths: list[Tensor] = []
    weights: list[Tensor] = []
    for number, name in enumerate(names):
        feature = by_name[name]
        check_lengths(feature.values(), integers(feature.lengths(), "lengths"))
        table = table_of[number]
        if ids[table].shape[0] > 0:
            values.append(rows_of_ids(ids[table], feature.values()))
        else:
            values.append(rows_of_numbers(rows[table], feature.values()))
        lengths.append(feature.lengths())
        if weighted:
            weights.append(feature.weights())
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.cat(values),
        lengths=torch.cat(lengths),
        weights=torch.cat(weights) if weighted else None,
    )


@torch.fx.wrap
def in_order(pooled: KeyedTensor, keys: list[str], dims: list[int]) -> KeyedTensor:
    """Reorders the columns of pooled rows.

    TorchRec's quantised modules sort the tables by their pooling (TorchRec 1.8.0).
    """
    if pooled.keys() == keys:
        return pooled
    return KeyedTensor(
        keys=keys,
        length_per_key=dims,
        values=torch.cat([pooled[key] for key in keys], dim=1),
    )


class _StaticCollection(nn.Module):
    """The base class of the two static collections."""

    def __init__(
        self,
        tables: Sequence[StaticTable],
        collection: nn.Module,
        weighted: bool,
        pooled: bool,
    ) -> None:
        super().__init__()
        self.maps = nn.ModuleList(
            IdMap(table.ids, len(table.weight)) for table in tables
        )
        self.collection = collection
        self._configs = [table.config for table in tables]
        self._weighted = weighted
        self._pooled = pooled
        keys_by_table = get_embedding_names_by_table(self._configs)
        self._keys = list(chain.from_iterable(keys_by_table))
        names: list[str] = []
        table_of: list[int] = []
        for number, config in enumerate(self._configs):
            names.extend(config.feature_names)
            table_of.extend([number] * len(config.feature_names))
        self._names = names
        self._table_of = table_of

    def _rows_of(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        return rows_instead_of_ids(
            features,
            self._names,
            self._keys,
            self._table_of,
            [id_map.ids for id_map in self.maps],  # type: ignore[misc]
            [id_map.rows for id_map in self.maps],  # type: ignore[misc]
            self._weighted,
            self._pooled,
        )

    def tables(self) -> list[tuple[BaseEmbeddingConfig, Tensor | None]]:
        """Returns each table's config and ids.

        The ids are in ascending order, (R,) int64; None for a table of TorchRec.
        """
        tables: list[tuple[BaseEmbeddingConfig, Tensor | None]] = []
        for config, id_map in zip(self._configs, self.maps, strict=True):
            assert isinstance(id_map, IdMap)
            ids = id_map.ids[:-1] if len(id_map.ids) else None
            tables.append((config, ids))
        return tables


class StaticEmbeddingBagCollection(_StaticCollection):
    """An ``EmbeddingBagCollection`` for inference.

    It converts raw ids to row numbers and calls TorchRec's own module.

    The attribute ``collection`` is TorchRec's module, ``EmbeddingBagCollection`` or its
    quantised version. TorchRec's functions can find, quantise and shard it. An id
    without a row reads the table's first row.

    Args:
        tables: The tables in the collection's order.
        weighted: Whether the per-sample weights of the batch are used.
        dtype: The data type of the rows.
    """

    def __init__(
        self,
        tables: Sequence[StaticTable],
        weighted: bool,
        dtype: torch.dtype,
    ) -> None:
        configs = _inner_configs(tables)
        collection = EmbeddingBagCollection(
            configs,
            weighted,
            device=torch.device("meta"),
        )
        for config, table in zip(configs, tables, strict=True):
            collection.embedding_bags[config.name] = ExactEmbeddingBag(
                len(table.weight),
                config.embedding_dim,
                mode="mean" if config.pooling == PoolingType.MEAN else "sum",
                _weight=table.weight,
                include_last_offset=True,
            ).requires_grad_(False)
        set_device(collection, torch.device("cpu"))
        super().__init__(
            tables,
            collection=_quantized(collection, QuantEmbeddingBagCollection, dtype),
            weighted=weighted,
            pooled=True,
        )
        dims: list[int] = []
        for config in configs:
            dims.extend([config.embedding_dim] * len(config.feature_names))
        self._dims = dims

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Returns the pooled rows, (B, sum of dims) float32, table by table and feature
        by feature.
        """
        pooled = self.collection(self._rows_of(features))
        return in_order(pooled, self._keys, self._dims)

    def is_weighted(self) -> bool:
        """Returns whether the per-sample weights of the batch are used."""
        return self._weighted

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables' configs, in their order."""
        return self._configs


class StaticEmbeddingCollection(_StaticCollection):
    """An ``EmbeddingCollection`` for inference.

    See :class:`StaticEmbeddingBagCollection`.

    Args:
        tables: The tables in the collection's order.
        need_indices: Whether the output has the raw ids as its weights.
        dtype: The data type of the rows.
    """

    def __init__(
        self,
        tables: Sequence[StaticTable],
        need_indices: bool,
        dtype: torch.dtype,
    ) -> None:
        configs = _inner_configs(tables)
        collection = EmbeddingCollection(configs, device=torch.device("meta"))
        for config, table in zip(configs, tables, strict=True):
            collection.embeddings[config.name] = nn.Embedding(
                len(table.weight),
                config.embedding_dim,
                _weight=table.weight,
            ).requires_grad_(False)
        set_device(collection, torch.device("cpu"))
        super().__init__(
            tables,
            collection=_quantized(collection, QuantEmbeddingCollection, dtype),
            weighted=False,
            pooled=False,
        )
        self._need_indices = need_indices

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Returns for each feature: values, (N, dim) float32, and the lengths of the
        input.

        The key is the feature's name, or ``feature@table`` if several tables have the
        feature.
        """
        rows = self.collection(self._rows_of(features))
        return _with_lengths(
            features,
            rows,
            self._names,
            self._keys,
            self._need_indices,
        )

    def need_indices(self) -> bool:
        """Returns whether the output has the raw ids as its weights."""
        return self._need_indices

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The tables' configs, in their order."""
        return self._configs


class ProcessedFeatures(nn.Module):
    """A ``FeatureProcessedEmbeddingBagCollection`` for inference.

    The feature processors get raw ids.

    Args:
        processors: The feature processors by feature, or a
            ``FeatureProcessorsCollection``.
        collection: The weighted collection.
    """

    _names: list[str]

    def __init__(self, processors: nn.Module, collection: nn.Module) -> None:
        super().__init__()
        self._names = list(processors) if isinstance(processors, nn.ModuleDict) else []
        if isinstance(processors, nn.ModuleDict):
            processors = ProcessorsByFeature(processors)
        self.processors = processors
        self.collection = collection

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Returns the pooled rows, weighted by the weights of the processors.

        Raises:
            ValueError: See :func:`checked_features`.
        """
        # The processors may return features without the strides and inverse indices of
        # their input.
        features = checked_features(features, self._names, False, True)
        return self.collection(self.processors(features))


class PositionWeights(nn.Module):
    """A ``PositionWeightedModule`` that TorchScript accepts.

    TorchRec 1.9 calls functions of ``torch.fx`` in its own module.

    Args:
        processor: The feature processor. Its parameter is used, not copied.
    """

    def __init__(self, processor: PositionWeightedModule) -> None:
        super().__init__()
        self.position_weight = processor.position_weight
        # the name that exports of TorchRec's own module have
        self._pre_processed = weights_are_positions(processor)

    def forward(self, features: JaggedTensor) -> JaggedTensor:
        """Returns the feature with the weight of each id's position in its bag."""
        if self._pre_processed:
            positions = features.weights().to(torch.int64)
        else:
            positions = torch.ops.fbgemm.offsets_range(
                features.offsets().long(),
                features.values().numel(),
            )
        return JaggedTensor(
            values=features.values(),
            weights=self.position_weight[positions],
            lengths=features.lengths(),
            offsets=features.offsets(),
        )


class ProcessorsByFeature(nn.Module):
    """A module that calls one feature processor for each feature.

    TorchScript and fx accept it.
    """

    def __init__(self, processors: nn.ModuleDict) -> None:
        super().__init__()
        self.processors = processors

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Returns the features that have a processor, with the weights of the
        processor.
        """
        by_name = features.to_dict()
        keys: list[str] = []
        values: list[Tensor] = []
        lengths: list[Tensor] = []
        weights: list[Tensor] = []
        for name, processor in self.processors.items():
            feature = processor(by_name[name])
            keys.append(name)
            values.append(feature.values())
            lengths.append(feature.lengths())
            weights.append(feature.weights())
        return KeyedJaggedTensor(
            keys=keys,
            values=torch.cat(values),
            lengths=torch.cat(lengths),
            weights=torch.cat(weights),
        )


@torch.fx.wrap
def _with_lengths(
    features: KeyedJaggedTensor,
    rows: dict[str, JaggedTensor],
    names: list[str],
    keys: list[str],
    need_indices: bool,
) -> dict[str, JaggedTensor]:
    by_name = features.to_dict()
    outputs: dict[str, JaggedTensor] = {}
    for number, key in enumerate(keys):
        feature = by_name[names[number]]
        outputs[key] = JaggedTensor(
            values=rows[key].values(),
            lengths=feature.lengths(),
            weights=feature.values() if need_indices else None,
        )
    return outputs


def _inner_configs(tables: Sequence[StaticTable]) -> list[BaseEmbeddingConfig]:
    """Returns the configs of TorchRec's module: each feature belongs to one table.

    A feature of several tables becomes several features, because an id has another row
    number in each table.
    """
    keys_by_table = get_embedding_names_by_table([table.config for table in tables])
    configs: list[BaseEmbeddingConfig] = []
    for table, keys in zip(tables, keys_by_table, strict=True):
        config = copy.copy(table.config)
        config.feature_names = keys
        config.num_embeddings = len(table.weight)
        config.data_type = type(config).data_type
        configs.append(config)
    return configs


def _quantized(
    collection: nn.Module,
    kind: type[nn.Module],
    dtype: torch.dtype,
) -> nn.Module:
    if dtype == torch.float32:
        return collection
    observer = torch.ao.quantization.PlaceholderObserver
    collection.qconfig = QuantConfig(
        activation=observer.with_args(dtype=torch.float32),
        weight=observer.with_args(dtype=dtype),
    )
    quant_prep_enable_register_tbes(collection, [type(collection)])
    return kind.from_float(collection)  # type: ignore[attr-defined, no-any-return]


def stored_rows(collection: nn.Module) -> Mapping[str, tuple[str, Tensor]]:
    """Returns each table's row format and its rows by name.

    The rows share the collection's memory.

    Args:
        collection: TorchRec's collection, plain or quantised.
    """
    if isinstance(collection, EmbeddingBagCollection | EmbeddingCollection):
        modules = getattr(collection, "embedding_bags", None) or collection.embeddings
        return {
            name: ("float32", module.weight.detach())
            for name, module in modules.items()
        }
    rows_by_name: dict[str, tuple[str, Tensor]] = {}
    for tbe in kernels_of(collection):
        weights = tbe.split_embedding_weights_with_scale_bias(split_scale_bias_mode=0)
        for (name, _, _, sparse_type, _), (weight, _, _) in zip(
            tbe.embedding_specs, weights, strict=True
        ):
            rows_by_name[name] = (FORMAT_NAMES[sparse_type.as_int()], weight)
    return rows_by_name


class StaticEmbedding(nn.Module):
    """A ``RecStoreEmbedding`` for inference.

    Args:
        module: The module that is exported.
        ids: (R,) int64. The ids in ascending order.
        rows: (R + 1, ...). The rows in the row format, after a first row for ids
            without a row.
        row_format: A name in :data:`torchrec_recstore_serving.export.row_formats.FORMATS`.
    """

    def __init__(
        self,
        module: RecStoreEmbedding,
        ids: Tensor,
        rows: Tensor,
        row_format: str,
    ) -> None:
        super().__init__()
        self.table = served_table(
            name=module.table.name,
            dim=module.embedding_dim,
            row_format=row_format,
            ids=ids,
            rows=rows,
        )
        self._has_padding = module.padding_idx is not None
        self._padding = module.padding_idx or 0
        self._output = module.weight.dtype

    def forward(self, input: Tensor) -> Tensor:
        """Returns the rows of ids.

        Args:
            input: Any shape, int32 or int64. The raw ids.

        Returns:
            (*input.shape, dim) of the dtype of the module that was exported.

        Raises:
            ValueError: ``input`` is not of an integer type.
        """
        values = integers(input, "ids").reshape(-1)
        rows = self.table.lookup(values)
        # A padding id without a row reads as zeros, even if other ids without a row do
        # not.
        if self._has_padding:
            has_no_row = torch.logical_not(self.table.has_rows(values))
            is_empty = (values == self._padding) & has_no_row
            rows = rows.masked_fill(is_empty.unsqueeze(1), 0.0)
        shape: list[int] = list(input.shape)
        return rows.to(self._output).view(shape + [rows.shape[1]])  # noqa: RUF005  (TorchScript)


def _bag_bounds(
    ids: Tensor,
    offsets: Tensor | None,
    include_last_offset: bool,
) -> Tensor:
    """Returns where each bag begins, and the end of the last: (bags + 1,) int64."""
    if ids.dim() == 2:
        bags = torch.arange(ids.shape[0] + 1, device=ids.device)
        return bags * ids.shape[1]
    if offsets is None or ids.dim() != 1:
        raise ValueError(
            "ids must have the shape (B, L), or the shape (N,) together with offsets"
        )
    bounds = integers(offsets, "offsets")
    if include_last_offset:
        return bounds
    last_bound = bounds.new_full((1,), ids.shape[0])
    return torch.cat([bounds, last_bound])


class StaticEmbeddingBag(nn.Module):
    """A ``RecStoreEmbeddingBag`` for inference.

    See :class:`StaticEmbedding`; the arguments are the same.
    """

    def __init__(
        self,
        module: RecStoreEmbeddingBag,
        ids: Tensor,
        rows: Tensor,
        row_format: str,
    ) -> None:
        super().__init__()
        self.table = served_table(
            name=module.table.name,
            dim=module.embedding_dim,
            row_format=row_format,
            ids=ids,
            rows=rows,
        )
        self._has_padding = module.padding_idx is not None
        self._padding = module.padding_idx or 0
        self._output = module.weight.dtype
        self._mode = str(module.mode)
        self._by_torch = self._mode == "max" or bool(module.scale_grad_by_freq)
        self._include_last_offset = bool(module.include_last_offset)

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Pools the rows of bags.

        See ``RecStoreEmbeddingBag.forward``; nested tensors are not supported.
        """
        weights = per_sample_weights
        bounds = _bag_bounds(input, offsets, self._include_last_offset)
        values = integers(input, "ids").reshape(-1)
        if weights is not None:
            weights = weights.reshape(-1)
        if self._has_padding:
            stays = values != self._padding
            counts_before = F.pad(stays.to(torch.int64).cumsum(0), [1, 0])
            bounds = counts_before[bounds]
            values = values[stays]
            if weights is not None:
                weights = weights[stays]
        # The ids behind the last bag are a bag more, which is dropped. A slice of the
        # ids would read its end from a tensor, which torch.export cannot trace. The bag
        # has one id more, because torch cannot pool without any.
        rows = self.table.lookup(F.pad(values, [0, 1]))
        if weights is not None:
            weights = F.pad(weights, [0, 1])
        places = torch.arange(rows.shape[0], device=rows.device)
        last_bound = bounds.new_full((1,), rows.shape[0])
        bounds = torch.cat([bounds, last_bound])
        if not self._by_torch:
            out = pooled_in_order(
                rows,
                places,
                bounds,
                weights,
                self._mode == "mean",
            )
        else:
            if weights is not None:
                weights = weights.to(torch.float32)
            out = F.embedding_bag(
                places,
                rows,
                bounds,
                norm_type=2.0,
                mode=self._mode,
                per_sample_weights=weights,
                include_last_offset=True,
            )
        return out[:-1].to(self._output)
