"""Statistics of whole tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from torchrec_recstore.sharders.collection import RecStoreCollection
from torchrec_recstore.sharders.gather import all_gathered
from torchrec_recstore.store import TableStats
from torchrec_recstore.store.stats import combined

_Shard = tuple[int, TableStats]  # first column, counts


def table_stats(model: nn.Module) -> dict[str, TableStats]:
    """Counts of each RecStore table of the model, over all its shards. Collective: every rank calls it.

    Args:
        model: ``DistributedModelParallel``, a sharded module, or anything that contains them.

    Returns:
        Statistics by table name, the same on every rank; no entry for tables on TorchRec's kernels. Counts are summed
        over ranks; a row split by columns counts once, its bytes in full; ``steps`` is the furthest shard's.

    Raises:
        ValueError: two collections of the model have a RecStore table of the same name.
    """
    stats: dict[str, TableStats] = {}
    for module in model.modules():
        if not isinstance(module, RecStoreCollection):
            continue
        gathered = _all_shards(module)
        for name in module.recstore_table_names():
            if name in stats:
                raise ValueError(
                    f"two collections have a RecStore table {name!r}: give table_stats one of them at a time"
                )
            stats[name] = _combined([shard for shards in gathered for shard in shards.get(name, [])])
    return stats


def _all_shards(module: RecStoreCollection) -> list[dict[str, list[_Shard]]]:
    local: dict[str, list[_Shard]] = {}
    for table in module.recstore_tables():
        local.setdefault(table.name, []).append((table.columns.start, table.stats()))
    return all_gathered(local, module._env)


def _combined(shards: Iterable[_Shard]) -> TableStats:
    shards = list(shards)
    first = min(column for column, _ in shards)
    whole = combined(stats for column, stats in shards if column == first)
    return replace(whole, bytes=sum(stats.bytes for _, stats in shards), steps=max(stats.steps for _, stats in shards))
