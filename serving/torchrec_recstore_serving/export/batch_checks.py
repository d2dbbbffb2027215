"""Checks of the batches of exported models.

What an exported model would ignore is an error.

TorchScript compiles this function into the exported models.

Tests: tests/serving/export/test_batch_checks.py.
"""

from __future__ import annotations

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


@torch.fx.wrap
def checked_features(
    features: KeyedJaggedTensor,
    names: list[str],
    weighted: bool,
    pooled: bool,
) -> KeyedJaggedTensor:
    """Returns a batch, after checking that an exported collection can look it up.

    Args:
        features: The batch.
        names: The names of the features that the collection looks up.
        weighted: Whether the collection uses the weights of the batch.
        pooled: Whether the collection pools rows.

    Raises:
        ValueError: The batch has a stride for each feature, inverse indices for a
            collection that pools, no weights for a weighted collection, or lacks a
            feature.
    """
    if features.variable_stride_per_key():
        raise ValueError(
            "exported models take batches with one batch size for all features, and"
            " this batch has stride_per_key_per_rank: expand it to one bag for each"
            " example and feature"
        )
    if pooled and features.inverse_indices_or_none() is not None:
        raise ValueError(
            "exported models do not apply inverse indices, and this batch has inverse"
            " indices: expand it to one bag for each example and feature"
        )
    if weighted and features.weights_or_none() is None:
        raise ValueError(
            "the exported collection is weighted, and the batch has no weights"
        )
    keys = features.keys()
    for name in names:
        if name not in keys:
            raise ValueError("the batch has no feature " + name)
    return features
