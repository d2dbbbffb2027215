"""Gradients of per-sample weights, which TorchRec's input distribution loses for most shardings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torchrec.distributed.embedding_sharding import EmbeddingSharding
from torchrec.distributed.types import ParameterSharding, ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_recstore.sharders.parameter_sharding import RECSTORE_KERNEL
from torchrec_recstore.sharders.row_split import ROW_SPLIT


def require_gradient(features: object) -> bool:
    """Whether ``features`` have weights that are to be trained."""
    if not isinstance(features, KeyedJaggedTensor) or not torch.is_grad_enabled():
        return False
    weights = features.weights_or_none()
    return weights is not None and bool(weights.requires_grad)


def check_weight_gradients(
    features: KeyedJaggedTensor,
    configs: Sequence[BaseEmbeddingConfig],
    plan: Mapping[str, ParameterSharding],
    shardings: Sequence[EmbeddingSharding[Any, Any, Any, Any]],
    ranks: int,
) -> None:
    """Refuses weights that require a gradient where the input distribution of a RecStore table loses it.

    TorchRec's collections distribute features without autograd (torchrec 1.8.0). The weights keep their gradient only
    where they are handed on as they are: on one rank, with one sharding that does not split rows, and with the features
    in its order.

    Args:
        features: a batch, before its input distribution.
        configs: of the collection's tables.
        plan: the collection's plan, by table.
        shardings: the collection's shardings, in their order.
        ranks: of the collection's group.

    Raises:
        NotImplementedError: the gradient would be lost; the message names table, features and sharding type.
    """
    names = features.keys()
    order = [name for sharding in shardings for name in sharding.feature_names()]
    for config in configs:
        of_table = [name for name in config.feature_names if name in names]
        if plan[config.name].compute_kernel != RECSTORE_KERNEL or not of_table:
            continue
        sharding_type = plan[config.name].sharding_type
        if ranks == 1 and len(shardings) == 1 and sharding_type not in ROW_SPLIT and names == order:
            continue
        fix = "use a FeatureProcessedEmbeddingBagCollection, which makes weights after it, or detach the weights"
        if ranks == 1 and {sharding.sharding_type for sharding in plan.values()} == {ShardingType.TABLE_WISE.value}:
            fix = f"give the features in the order {order}, {fix}"
        elif ranks == 1:
            fix = f"shard all tables of the collection table_wise, {fix}"
        raise NotImplementedError(
            f"RecStore table {config.name!r}: the weights of feature(s) {', '.join(map(repr, of_table))} require a "
            f"gradient, which TorchRec's input distribution does not carry ({sharding_type} on {ranks} rank(s)): {fix}"
        )
