"""The scriptable form of an exported model.

It replaces the static collections of the eager form by modules for TorchScript,
``torch.export`` and deltas.

Tests: tests/serving/export/test_from_model.py.
"""

# There is no "from __future__ import annotations" here, because fx copies the
# annotations of forward unchanged and TorchScript reads them.

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import DistributedModelParallel
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_recstore_serving.export.batch_checks import checked_features
from torchrec_recstore_serving.export.eager_modules import (
    ProcessedFeatures,
    StaticEmbeddingBagCollection,
    StaticEmbeddingCollection,
    stored_rows,
)
from torchrec_recstore_serving.export.hashed_tables import check_index, hashed
from torchrec_recstore_serving.export.model_table import ModelTable
from torchrec_recstore_serving.export.sorted_tables import (
    check_lengths,
    integers,
    served_table,
)
from torchrec_recstore_serving.export.structure import tensors_of
from torchrec_recstore_serving.export.verification import (
    hexadecimal_checksum,
)


def served_tables(
    model: nn.Module,
    *,
    every_path: bool = False,
) -> Iterator[tuple[str, ModelTable]]:
    """Yields the path and the table of each served table of a model.

    Args:
        model: The model.
        every_path: Whether a table that the model has at several paths is yielded for
            each path. Default: False, only for the first path.
    """
    for path, module in model.named_modules(remove_duplicate=not every_path):
        if isinstance(module, ModelTable):
            yield path, module


def dense_tensors(model: nn.Module, *, every_path: bool = False) -> dict[str, Tensor]:
    """Returns a served model's tensors outside its tables by name.

    They are parameters, buffers and attributes.

    Args:
        model: The model.
        every_path: Whether a tensor with several names is returned for each name.
            Default: False, only for the first name.
    """
    tensors: dict[str, Tensor] = {}
    known_ids: set[int] = set()
    for path, module in model.named_modules(remove_duplicate=not every_path):
        if isinstance(module, ModelTable):
            continue
        for name, tensor in tensors_of(module):
            if every_path or id(tensor) not in known_ids:
                known_ids.add(id(tensor))
                tensors[f"{path}.{name}" if path else name] = tensor.detach()
    return tensors


def tensor_at(script: torch.jit.ScriptModule, name: str) -> Tensor | None:
    """Returns a served model's tensor of this name; None if there is no such tensor."""
    value: object = script
    for part in name.split("."):
        value = getattr(value, part, None)
    return value.detach() if isinstance(value, Tensor) else None


def version_of(served: nn.Module, script: torch.jit.ScriptModule) -> str:
    """Returns the version of a served model.

    It is the checksum of all rows and weights in 16 hexadecimal digits.

    Args:
        served: The model.
        script: The compiled model, or an earlier export of the same model. Tensors that
            it does not have are ignored.
    """
    tensors: dict[str, Tensor] = {}
    for _, table in served_tables(served):
        table.give_tensors(tensors)
    for name, tensor in dense_tensors(served, every_path=True).items():
        if tensor_at(script, name) is not None:
            tensors[f"dense/{name}"] = tensor
    return hexadecimal_checksum(tensors)


def side_by_side(pooled: Tensor, features: int) -> Tensor:
    """Converts (features * B, dim), in which the bags are ordered by feature, to (B,
    features * dim).
    """
    if features == 1:
        return pooled
    bags = pooled.shape[0] // features
    dim = pooled.shape[1]
    by_feature = pooled.view(features, bags, dim)
    return by_feature.transpose(0, 1).reshape(bags, features * dim)


def _concatenated(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class ServedEmbeddingBagCollection(nn.Module):
    """A collection that returns the pooled rows of raw ids.

    Args:
        tables: The tables in the collection's order.
        features: For each table, the names of its features.
        means: For each table, whether it pools by the mean. Otherwise it pools by the
            sum.
        keys: The keys of the output: the keys of all features, table by table.
        weighted: Whether the weights of the batch are used.
    """

    def __init__(
        self,
        tables: Sequence[ModelTable],
        features: list[list[str]],
        means: list[bool],
        keys: list[str],
        weighted: bool,
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleList(tables)
        self._features = features
        self._means = means
        self._keys = keys
        self._names = list(chain.from_iterable(features))
        dims: list[int] = []
        for table, names in zip(tables, features, strict=True):
            dims.extend([table.dim] * len(names))
        self._dims = dims
        self._weighted = weighted

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Returns (B, sum of dims) float32: the pooled rows table by table and feature
        by feature.

        Raises:
            ValueError: See :func:`checked_features` and :func:`check_lengths`.
        """
        features = checked_features(features, self._names, self._weighted, True)
        by_name = features.to_dict()
        outputs: list[Tensor] = []
        for number, table in enumerate(self.tables):
            names = self._features[number]
            values = _concatenated([by_name[name].values() for name in names])
            lengths = _concatenated([by_name[name].lengths() for name in names])
            weights: Tensor | None = None
            if self._weighted:
                weights = _concatenated([by_name[name].weights() for name in names])
            pooled = table.pooled(values, lengths, weights, self._means[number])  # type: ignore[operator]
            outputs.append(side_by_side(pooled, len(names)))
        return KeyedTensor(
            keys=self._keys,
            length_per_key=self._dims,
            values=torch.cat(outputs, dim=1),
        )


class ServedEmbeddingCollection(nn.Module):
    """A collection that returns the row of each raw id.

    Args:
        tables: The tables in the collection's order.
        features: For each table, the names of its features.
        keys: For each table, the keys of its features in the output.
        need_indices: Whether the output has the raw ids as its weights.
    """

    def __init__(
        self,
        tables: Sequence[ModelTable],
        features: list[list[str]],
        keys: list[list[str]],
        need_indices: bool,
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleList(tables)
        self._features = features
        self._keys = keys
        self._names = list(chain.from_iterable(features))
        self._need_indices = need_indices

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Returns for each key: values, (N, dim) float32, and the lengths of the input.

        Raises:
            ValueError: See :func:`checked_features` and :func:`check_lengths`.
        """
        by_name = checked_features(features, self._names, False, False).to_dict()
        outputs: dict[str, JaggedTensor] = {}
        for number, table in enumerate(self.tables):
            keys = self._keys[number]
            for position, name in enumerate(self._features[number]):
                feature = by_name[name]
                check_lengths(feature.values(), integers(feature.lengths(), "lengths"))
                outputs[keys[position]] = JaggedTensor(
                    values=table.lookup(feature.values()),  # type: ignore[operator]
                    lengths=feature.lengths(),
                    weights=feature.values() if self._need_indices else None,
                )
        return outputs


def copied_with(model: nn.Module, replaced: dict[int, Any]) -> nn.Module:
    """Copies a model without the wrappers of distributed training.

    They are ``DistributedModelParallel`` and ``DistributedDataParallel``.

    Args:
        model: The model. It does not change.
        replaced: The modules and tensors to use instead of those of the model, by the
            ``id`` of the latter. The dict is the ``memo`` of ``copy.deepcopy``, and is
            changed.
    """
    wrappers = (DistributedModelParallel, DistributedDataParallel)
    for module in reversed(list(model.modules())):  # Inner modules come first.
        if isinstance(module, wrappers) and id(module) not in replaced:
            replaced[id(module)] = copy.deepcopy(module.module, replaced)
    copied: nn.Module = copy.deepcopy(model, replaced)
    return copied


def scriptable(exported: nn.Module, *, index: str = "sorted") -> nn.Module:
    """Converts an exported model for TorchScript and ``torch.export``.

    TorchRec's quantised modules can only be scripted after
    ``torchrec.fx.symbolic_trace``, and cannot be exported with ``torch.export``
    (torchrec 1.8.0). This function replaces TorchRec's collections by modules that look
    up the same rows with the same op, and whose rows can be replaced. The rows are
    shared with ``exported`` and not copied. If several modules have tables of the same
    name, the name of such a table is the path of the module, a dot, and the table's
    name.

    Args:
        exported: The result of
            :func:`torchrec_recstore.inference.export_for_inference`, with TorchRec's
            plain or quantised collections. They must not be sharded.
        index: How the tables search ids; see
            :func:`torchrec_recstore.inference.export_for_inference`. Default:
            ``"sorted"``.

    Raises:
        TypeError, ValueError: ``index`` is neither ``"sorted"`` nor ``"hash"``.
        ImportError: ``index`` is ``"hash"``, and the native library does not fit this
            torch.
    """
    check_index(index)
    replaced: dict[int, Any] = {}
    for module in exported.modules():
        if isinstance(module, StaticEmbeddingBagCollection | StaticEmbeddingCollection):
            replaced[id(module)] = served_collection(module)
    for parameter in exported.parameters():
        replaced.setdefault(id(parameter), parameter)
    for buffer in exported.buffers():
        # An expanded buffer can be neither read as bytes nor written by a delta.
        replaced.setdefault(id(buffer), buffer.contiguous())
    model = copied_with(exported, replaced)
    _name_apart(model)
    return hashed(model) if index == "hash" else model


def _name_apart(model: nn.Module) -> None:
    """Renames tables that have the same name.

    The new name begins with the path of the module, as in checkpoints.
    """
    tables = list(served_tables(model))
    name_counts = Counter(table.name for _, table in tables)
    for path, table in tables:
        if name_counts[table.name] == 1:
            continue
        parts = path.split(".")[:-1]
        if isinstance(model.get_submodule(".".join(parts)), nn.ModuleList):
            parts.pop()
        if parts:
            outer = model.get_submodule(".".join(parts[:-1]))
            if isinstance(outer, ProcessedFeatures):
                parts.pop()
        table.name = ".".join([*parts, table.name])


def served_collection(
    module: StaticEmbeddingBagCollection | StaticEmbeddingCollection,
) -> nn.Module:
    """Returns the served collection of a static one.

    Its ``tables`` are in the order of the static tables.
    """
    rows_by_name = stored_rows(module.collection)
    tables = []
    configs = []
    for config, ids in module.tables():
        row_format, rows = rows_by_name[config.name]
        table = served_table(
            name=config.name,
            dim=config.embedding_dim,
            row_format=row_format,
            ids=ids,
            rows=rows,
        )
        tables.append(table)
        configs.append(config)
    features = [list(config.feature_names) for config in configs]
    keys_by_table = get_embedding_names_by_table(configs)
    if isinstance(module, StaticEmbeddingCollection):
        return ServedEmbeddingCollection(
            tables=tables,
            features=features,
            keys=keys_by_table,
            need_indices=module.need_indices(),
        )
    means = [
        config.pooling == PoolingType.MEAN for config in module.embedding_bag_configs()
    ]
    return ServedEmbeddingBagCollection(
        tables=tables,
        features=features,
        means=means,
        keys=list(chain.from_iterable(keys_by_table)),
        weighted=module.is_weighted(),
    )
