"""A model's static collections as TorchScript, ``torch.export`` and deltas take them."""

from __future__ import annotations

from collections import Counter

from torch import nn
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import get_embedding_names_by_table

from torchrec_recstore.inference.copies import copied_with
from torchrec_recstore.inference.served_collections import ServedEmbeddingBagCollection, ServedEmbeddingCollection
from torchrec_recstore.inference.served_tables import served_table
from torchrec_recstore.inference.static_collections import (
    ProcessedFeatures,
    StaticEmbeddingBagCollection,
    StaticEmbeddingCollection,
    stored_rows,
)
from torchrec_recstore.inference.versions import served_tables


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
