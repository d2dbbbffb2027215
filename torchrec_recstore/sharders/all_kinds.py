"""The sharders of every kind of collection that RecStore can hold, in one list.

Tests: tests/sharders/test_all_kinds.py.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torchrec.distributed.types import ModuleSharder, QuantizedCommCodecs

from torchrec_recstore.optim import Optimizer
from torchrec_recstore.sharders.sharded_collections import (
    RecStoreEmbeddingCollectionSharder,
    RecStoreFeatureProcessedEmbeddingBagCollectionSharder,
    RecStoreSharder,
)


def get_recstore_sharders(
    fused_params: dict[str, Any] | None = None,
    qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    *,
    optimizer: Optimizer | None = None,
    accumulation_steps: int = 1,
) -> list[ModuleSharder[nn.Module]]:
    """Returns the sharders that place a model's tables in RecStore.

    They are the sharders of bags, sequences and feature-processed bags.

    TorchRec chooses a sharder by the class of a collection, and leaves a collection
    without a sharder as it is: its tables become dense parameters on every rank. With
    this list, no collection that RecStore can hold is left out.

    Example::

        fused_params = {
            "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "learning_rate": 0.01,
        }
        sharders = get_recstore_sharders(fused_params)
        model = DistributedModelParallel(model, sharders=sharders)

    Args:
        fused_params: The arguments of the fused optimizer, for every collection.
            Default: None. See :class:`RecStoreSharder`.
        qcomm_codecs_registry: The codecs of quantized communication, as for TorchRec's
            sharders. Default: None.
        optimizer: The optimizer of the RecStore tables. Default: None. See
            :class:`RecStoreSharder`.
        accumulation_steps: The number of backward passes for one update. Default: 1.
            See :class:`RecStoreSharder`.

    Returns:
        A :class:`RecStoreSharder`, a :class:`RecStoreEmbeddingCollectionSharder` and a
        :class:`RecStoreFeatureProcessedEmbeddingBagCollectionSharder`. To give one kind
        other arguments, replace its sharder in the list.

    Raises:
        TypeError: See :class:`RecStoreSharder`.
        ValueError: See :class:`RecStoreSharder`.
    """
    arguments: dict[str, Any] = {
        "optimizer": optimizer,
        "accumulation_steps": accumulation_steps,
    }
    bags = RecStoreSharder(
        _copy(fused_params),
        qcomm_codecs_registry,
        **arguments,
    )
    sequences = RecStoreEmbeddingCollectionSharder(
        _copy(fused_params),
        qcomm_codecs_registry,
        **arguments,
    )
    processed_bags = RecStoreFeatureProcessedEmbeddingBagCollectionSharder(
        bags,
        qcomm_codecs_registry,
    )
    return [bags, sequences, processed_bags]


def _copy(fused_params: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if fused_params is None else dict(fused_params)
