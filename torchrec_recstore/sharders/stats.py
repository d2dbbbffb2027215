"""Statistics of whole tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from torchrec_recstore.sharders.collection import RecStoreCollection
from torchrec_recstore.sharders.gather import all_gathered
from torchrec_recstore.sharders.model_tables import recstore_tables
from torchrec_recstore.store import TableStats
from torchrec_recstore.store.stats import combined

_Shard = tuple[int, TableStats]  # first column, counts


def table_stats(model: nn.Module) -> dict[str, TableStats]:
    """Counts of each RecStore table of the model, over all its shards. Collective: every rank calls it.

    Args:
        model: ``DistributedModelParallel``, a sharded module, or anything that contains them.

    Returns:
        Statistics by table name, the same on every rank; no entry for tables on TorchRec's kernels. A table whose name
        another collection has too is named by the path of its collection in the model, a dot and its name. Counts are
        summed over ranks; a row split by columns counts once, its bytes in full; ``steps`` is the furthest shard's.
    """
    stats: dict[str, TableStats] = {}
    gathered: dict[RecStoreCollection, list[dict[str, list[_Shard]]]] = {}
    for table in recstore_tables(model):
        if table.module not in gathered:
            gathered[table.module] = _all_shards(table.module)
        shards = [shard for of_rank in gathered[table.module] for shard in of_rank[table.config_name]]
        stats[table.name] = _combined(shards)
    return stats


def _all_shards(module: RecStoreCollection) -> list[dict[str, list[_Shard]]]:
    local = {
        name: [(shard.table.columns.start, shard.table.stats()) for shard in shards]
        for name, shards in module.recstore_state.shards.items()
    }
    return all_gathered(local, module._env)


def _combined(shards: Iterable[_Shard]) -> TableStats:
    shards = list(shards)
    first = min(column for column, _ in shards)
    whole = combined(stats for column, stats in shards if column == first)
    return replace(whole, bytes=sum(stats.bytes for _, stats in shards), steps=max(stats.steps for _, stats in shards))
