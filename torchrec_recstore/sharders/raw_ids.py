"""Ids on their way into TorchRec's input distribution."""

from __future__ import annotations

from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def int64_ids(features: Any) -> Any:
    """``features`` with int64 ids.

    TorchRec's row-wise split (``block_bucketize_sparse_features``, fbgemm-gpu 1.8.0) is lossless for int64 and wrong
    for int32 ids beyond ``num_embeddings``.

    Args:
        features: a ``KeyedJaggedTensor`` of any integer type; anything else is passed through.

    Raises:
        TypeError: ids that are not integers.
    """
    if not isinstance(features, KeyedJaggedTensor) or features.values().dtype == torch.int64:
        return features
    dtype = features.values().dtype
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise TypeError(f"ids must be integers, got {dtype} for features {features.keys()}")
    varies = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values().to(torch.int64),
        weights=features.weights_or_none(),
        lengths=features.lengths_or_none(),
        offsets=features.offsets_or_none(),
        stride=None if varies else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if varies else None,
        inverse_indices=features.inverse_indices_or_none(),
    )
