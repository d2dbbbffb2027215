"""A model's static collections as TorchScript, ``torch.export`` and deltas take them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import xxhash
from torch import Tensor, nn
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import get_embedding_names_by_table

from torchrec_recstore.inference.copies import copied_with
from torchrec_recstore.inference.served_collections import ServedEmbeddingBagCollection, ServedEmbeddingCollection
from torchrec_recstore.inference.served_tables import ServedTable, served_table
from torchrec_recstore.inference.static_collections import (
    StaticEmbeddingBagCollection,
    StaticEmbeddingCollection,
    stored_rows,
)

_KINDS = ("ids", "rows")


def scriptable(exported: nn.Module) -> nn.Module:
    """What :func:`torchrec_recstore.inference.export_for_inference` gives, as TorchScript and ``torch.export`` take it.

    TorchRec's quantised modules can be scripted after ``torchrec.fx.symbolic_trace`` alone, and not exported
    (torchrec 1.8.0). In the place of its collections stand modules that read the same rows by the same op, and whose
    rows can be replaced. Rows are shared with ``exported``, not copied.

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
    return copied_with(exported, replaced)


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


def served_tables(model: nn.Module) -> Iterator[tuple[str, ServedTable]]:
    """The path and the table of each one in a model."""
    for path, module in model.named_modules():
        if isinstance(module, ServedTable):
            yield path, module


def dense_tensors(model: nn.Module) -> dict[str, Tensor]:
    """A served model's tensors beside its tables, by name."""
    inside = tuple(f"{path}." for path, _ in served_tables(model))
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach() for name, tensor in tensors.items() if not name.startswith(inside or ("\0",))}


def version_of(served: nn.Module) -> str:
    """What says which rows and weights a served model has: a checksum of all of them, 32 hexadecimal digits."""
    tensors = [(f"{table.name}/{kind}", getattr(table, kind)) for _, table in served_tables(served) for kind in _KINDS]
    digest = xxhash.xxh3_128()
    for name, tensor in sorted([*tensors, *dense_tensors(served).items()], key=lambda each: each[0]):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        if tensor.numel():
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
