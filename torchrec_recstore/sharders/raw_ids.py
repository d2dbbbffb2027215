"""Ids on their way into TorchRec's input distribution."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_recstore import ops


def int64_ids(features: Any) -> KeyedJaggedTensor:
    """``features`` with int64 ids.

    TorchRec's row-wise split (``block_bucketize_sparse_features``, fbgemm-gpu 1.8.0) is lossless for int64 and wrong
    for int32 ids beyond ``num_embeddings``.

    Args:
        features: a ``KeyedJaggedTensor`` or ``TensorDict`` of any integer type.

    Raises:
        TypeError: ids that are not integers.
    """
    features = maybe_td_to_kjt(features)
    dtype = features.values().dtype
    if dtype == torch.int64:
        return features
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise TypeError(f"ids must be integers, got {dtype} for features {features.keys()}")
    return _with_ids(features, features.values().to(torch.int64))


def mixed_ids(features: KeyedJaggedTensor, names: Set[str]) -> KeyedJaggedTensor:
    """``features`` in which the ids of those called ``names`` are spread by ``ops.mix_ids``: hash routing.

    Args:
        features: with int64 ids.
        names: features, which need not all be among ``features``.
    """
    keys: list[str] = features.keys()
    mixes = [key in names for key in keys]
    if not any(mixes):
        return features
    if all(mixes):
        return _with_ids(features, ops.mix_ids(features.values(), False))
    by_feature = features.values().split(features.length_per_key())
    return _with_ids(
        features,
        torch.cat([ops.mix_ids(ids, False) if mix else ids for ids, mix in zip(by_feature, mixes, strict=True)]),
    )


def _with_ids(features: KeyedJaggedTensor, ids: torch.Tensor) -> KeyedJaggedTensor:
    varies = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=ids,
        weights=features.weights_or_none(),
        lengths=features.lengths_or_none(),
        offsets=features.offsets_or_none(),
        stride=None if varies else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if varies else None,
        inverse_indices=features.inverse_indices_or_none(),
    )
