"""What a plan may ask of RecStore tables. Every rank checks every table, so that none waits for another that failed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

from torch import nn
from torchrec.distributed.types import ParameterSharding
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from torchrec_recstore.sharders.parameter_sharding import RECSTORE_KERNEL, RecStoreParameterSharding
from torchrec_recstore.sharders.row_split import ROW_SPLIT


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
    initializer = sharding.options.initializer if isinstance(sharding, RecStoreParameterSharding) else None
    if initializer is None and not _is_default_init(config):
        raise ValueError(
            f"RecStore table {config.name!r}: init_fn initialises whole tables, but rows are made one at a time: "
            "set TableOptions.initializer, or the config's weight_init_min and weight_init_max"
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


def _is_default_init(config: BaseEmbeddingConfig) -> bool:
    """Whether ``init_fn`` is the one that TorchRec fills in (``BaseEmbeddingConfig.__post_init__``, torchrec 1.8.0)."""
    filled_in: Mapping[str, float] = {"a": config.get_weight_init_min(), "b": config.get_weight_init_max()}
    init_fn = config.init_fn
    return init_fn is None or (
        isinstance(init_fn, partial) and init_fn.func is nn.init.uniform_ and init_fn.keywords == filled_in
    )
