"""What a plan may ask of RecStore tables. Every rank checks every table, so that none waits for another that failed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingEnv2D
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from torchrec_recstore.sharders.parameter_sharding import RECSTORE_KERNEL, RecStoreParameterSharding
from torchrec_recstore.sharders.row_split import ROW_SPLIT
from torchrec_recstore.table_configs import check_init_fn


def check_plan(
    config: BaseEmbeddingConfig, sharding: ParameterSharding, supported: Collection[str], collection: str
) -> None:
    """Refuses a sharding type or an ``init_fn`` that a RecStore table cannot have.

    Args:
        config: of one of the collection's tables, on whichever kernel.
        sharding: the plan's entry for it.
        supported: sharding types.
        collection: what the table belongs to, for messages.

    Raises:
        ValueError: the message names the table.
    """
    if sharding.compute_kernel != RECSTORE_KERNEL:
        return
    if sharding.sharding_type not in supported:
        raise ValueError(
            f"RecStore table {config.name!r}: sharding type {sharding.sharding_type!r} is not supported in "
            f"{collection}; supported are {', '.join(supported)}"
        )
    check_init_fn(config, sharding.options if isinstance(sharding, RecStoreParameterSharding) else None)


def refuse_replicas(plan: Mapping[str, ParameterSharding], env: ShardingEnv) -> None:
    """Refuses RecStore tables in a ``DMPCollection``, which averages the replicas' stock tables alone.

    Args:
        plan: of one collection, by table.
        env: that the collection is to be sharded in.

    Raises:
        NotImplementedError: a RecStore table would have replicas, which would drift apart; the message names it.
    """
    tables = [name for name, sharding in plan.items() if sharding.compute_kernel == RECSTORE_KERNEL]
    if tables and isinstance(env, ShardingEnv2D):
        raise NotImplementedError(
            f"RecStore table(s) {', '.join(map(repr, tables))}: DMPCollection would not average their replicas, which "
            "would drift apart: use DistributedModelParallel, which shards tables over all ranks and replicates the "
            "other layers, or TorchRec's own kernels"
        )


def hashed_features(
    configs: Sequence[BaseEmbeddingConfig], shardings: Mapping[str, ParameterSharding]
) -> frozenset[str]:
    """The features whose ids are mixed before they are split: those of row-split tables with ``routing="hash"``.

    Raises:
        ValueError: such a feature also belongs to a table that needs its ids as they are; the message names both.
    """
    hashed = {feature: c.name for c in configs if _is_hashed(shardings[c.name]) for feature in c.feature_names}
    for config in configs:
        shared = sorted(hashed.keys() & set(config.feature_names))
        if shared and not _is_hashed(shardings[config.name]):
            raise ValueError(
                f"RecStore table {hashed[shared[0]]!r} with routing='hash' shares feature(s) {shared} with table "
                f"{config.name!r}, whose ids are not routed so: give both routing='hash' and a sharding by rows, or "
                "neither"
            )
    return frozenset(hashed)


def _is_hashed(sharding: ParameterSharding) -> bool:
    return (
        isinstance(sharding, RecStoreParameterSharding)
        and sharding.compute_kernel == RECSTORE_KERNEL
        and sharding.sharding_type in ROW_SPLIT
        and sharding.options.routing == "hash"
    )
