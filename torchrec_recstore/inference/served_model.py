"""A model's static collections as TorchScript, ``torch.export`` and deltas take them."""

# Without "from __future__ import annotations": fx copies the annotations of forward as they are, and TorchScript reads
# them.

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import DistributedModelParallel
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_recstore.inference.served_tables import ServedTable, served_table
from torchrec_recstore.inference.static_modules import (
    ProcessedFeatures,
    StaticEmbeddingBagCollection,
    StaticEmbeddingCollection,
    stored_rows,
)
from torchrec_recstore.inference.verification import checksum_of, hexadecimal, scripted_function

_KINDS = ("ids", "rows")


def served_tables(model: nn.Module, *, every_path: bool = False) -> Iterator[tuple[str, ServedTable]]:
    """The path and the table of each one in a model.

    Args:
        model: that has them.
        every_path: also the further paths of a table that a model has at several.
    """
    for path, module in model.named_modules(remove_duplicate=not every_path):
        if isinstance(module, ServedTable):
            yield path, module


def dense_tensors(model: nn.Module, *, every_path: bool = False) -> dict[str, Tensor]:
    """A served model's tensors beside its tables, by name: parameters, buffers and plain attributes.

    Args:
        model: that has them.
        every_path: also the further names of a tensor that has several.
    """
    tensors: dict[str, Tensor] = {}
    known: set[int] = set()
    for path, module in model.named_modules(remove_duplicate=not every_path):
        if isinstance(module, ServedTable):
            continue
        for name, value in {**vars(module), **module._parameters, **module._buffers}.items():
            if isinstance(value, Tensor) and (every_path or id(value) not in known):
                known.add(id(value))
                tensors[f"{path}.{name}" if path else name] = value.detach()
    return tensors


def tensor_at(script: torch.jit.ScriptModule, name: str) -> Tensor | None:
    """A served model's tensor of that name, None where it has none."""
    found: object = script
    for part in name.split("."):
        found = getattr(found, part, None)
    return found.detach() if isinstance(found, Tensor) else None


def version_of(served: nn.Module, script: torch.jit.ScriptModule) -> str:
    """What says which rows and weights a served model has: a checksum of all of them, 16 hexadecimal digits.

    Args:
        served: the model.
        script: that as TorchScript, or an earlier export of the same model: tensors that it does not have do not count.
    """
    tensors = {f"{table.name}/{kind}": getattr(table, kind) for _, table in served_tables(served) for kind in _KINDS}
    for name, tensor in dense_tensors(served, every_path=True).items():
        if tensor_at(script, name) is not None:
            tensors[f"dense/{name}"] = tensor
    return str(scripted_function(hexadecimal)(scripted_function(checksum_of)(tensors)))


def side_by_side(pooled: Tensor, features: int) -> Tensor:
    """(B, features * dim) of (features * B, dim), whose bags are feature by feature."""
    if features == 1:
        return pooled
    bags = pooled.shape[0] // features
    return pooled.view(features, bags, pooled.shape[1]).transpose(0, 1).reshape(bags, features * pooled.shape[1])


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class ServedEmbeddingBagCollection(nn.Module):
    """Pooled rows of raw ids.

    Args:
        tables: in the collection's order.
        features: names of each table's.
        means: whether each table pools the mean; the others sum.
        keys: of the output: those of all features, table by table.
        weighted: whether weights of the batch count.
    """

    def __init__(
        self,
        tables: Sequence[ServedTable],
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
        self._dims = [table.dim for table, names in zip(tables, features, strict=True) for _ in names]
        self._weighted = weighted

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """(B, sum of dims) float32: table by table, feature by feature."""
        by_name = features.to_dict()
        outputs: list[Tensor] = []
        for number, table in enumerate(self.tables):
            names = self._features[number]
            values = _joined([by_name[name].values() for name in names])
            lengths = _joined([by_name[name].lengths() for name in names])
            weights: Tensor | None = None
            if self._weighted:
                weights = _joined([by_name[name].weights() for name in names])
            pooled = table.pooled(values, lengths, weights, self._means[number])  # type: ignore[operator]
            outputs.append(side_by_side(pooled, len(names)))
        return KeyedTensor(keys=self._keys, length_per_key=self._dims, values=torch.cat(outputs, dim=1))


class ServedEmbeddingCollection(nn.Module):
    """The row of each raw id.

    Args:
        tables: in the collection's order.
        features: names of each table's.
        keys: of the output: those of each table's features.
        need_indices: whether the output has the raw ids as its weights.
    """

    def __init__(
        self, tables: Sequence[ServedTable], features: list[list[str]], keys: list[list[str]], need_indices: bool
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleList(tables)
        self._features = features
        self._keys = keys
        self._need_indices = need_indices

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """By key: values (N, dim) float32, lengths as given."""
        by_name = features.to_dict()
        found: dict[str, JaggedTensor] = {}
        for number, table in enumerate(self.tables):
            for place, name in enumerate(self._features[number]):
                feature = by_name[name]
                found[self._keys[number][place]] = JaggedTensor(
                    values=table.lookup(feature.values()),  # type: ignore[operator]
                    lengths=feature.lengths(),
                    weights=feature.values() if self._need_indices else None,
                )
        return found


def copied_with(model: nn.Module, replaced: dict[int, Any]) -> nn.Module:
    """A copy of a model, without the wrappers that make it parallel.

    Args:
        model: left as it is.
        replaced: what stands for each module or tensor, by its ``id``; ``copy.deepcopy``'s memory afterwards.
    """
    for module in reversed(list(model.modules())):  # inner ones first
        if isinstance(module, DistributedModelParallel | DistributedDataParallel) and id(module) not in replaced:
            replaced[id(module)] = copy.deepcopy(module.module, replaced)
    copied: nn.Module = copy.deepcopy(model, replaced)
    return copied


def scriptable(exported: nn.Module) -> nn.Module:
    """What :func:`torchrec_recstore.inference.export_for_inference` gives, as TorchScript and ``torch.export`` take it.

    TorchRec's quantised modules can be scripted after ``torchrec.fx.symbolic_trace`` alone, and not exported
    (torchrec 1.8.0). In the place of its collections stand modules that read the same rows by the same op, and whose
    rows can be replaced. Rows are shared with ``exported``, not copied. Tables that have one name in several modules
    are named by the path of the module, a dot and their name.

    Args:
        exported: with TorchRec's plain or quantised collections, not sharded ones.
    """
    replaced = {
        id(module): _served(module)
        for module in exported.modules()
        if isinstance(module, StaticEmbeddingBagCollection | StaticEmbeddingCollection)
    }
    for tensor in [*exported.parameters(), *exported.buffers()]:
        replaced.setdefault(id(tensor), tensor)  # type: ignore[arg-type]
    model = copied_with(exported, replaced)
    _name_apart(model)
    return model


def _name_apart(model: nn.Module) -> None:
    """Tables of one name get the path of their module before it, as in checkpoints."""
    tables = list(served_tables(model))
    times = Counter(table.name for _, table in tables)
    for path, table in tables:
        if times[table.name] == 1:
            continue
        parts = path.split(".")[:-1]
        if isinstance(model.get_submodule(".".join(parts)), nn.ModuleList):
            parts.pop()
        if parts and isinstance(model.get_submodule(".".join(parts[:-1])), ProcessedFeatures):
            parts.pop()
        table.name = ".".join([*parts, table.name])


def _served(module: StaticEmbeddingBagCollection | StaticEmbeddingCollection) -> nn.Module:
    stored = stored_rows(module.collection)
    described = module.tables()
    tables = []
    for config, ids in described:
        row_format, rows = stored[config.name]
        tables.append(served_table(config.name, config.embedding_dim, row_format, ids, rows))
    configs = [config for config, _ in described]
    features = [list(config.feature_names) for config in configs]
    keys = get_embedding_names_by_table(configs)
    if isinstance(module, StaticEmbeddingCollection):
        return ServedEmbeddingCollection(tables, features, keys, module.need_indices())
    means = [config.pooling == PoolingType.MEAN for config in module.embedding_bag_configs()]
    return ServedEmbeddingBagCollection(
        tables, features, means, [key for some in keys for key in some], module.is_weighted()
    )
