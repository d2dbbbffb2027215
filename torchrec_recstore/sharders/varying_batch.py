"""Batches whose size varies by feature (VBE), for a kernel that pools as many bags of each feature."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def padded_offsets(offsets: Tensor, bags: Sequence[int]) -> Tensor:
    """Offsets in which every feature has as many bags as the one with the most: empty ones at its end.

    Args:
        offsets: (sum of bags + 1,) of all features' bags, feature by feature.
        bags: of each feature.

    Returns:
        (features * max(bags) + 1,), of the dtype of ``offsets``.
    """
    counts = torch.tensor(bags)
    first = counts.cumsum(0) - counts
    within = torch.minimum(torch.arange(max(bags))[None], counts[:, None])
    taken = (first[:, None] + within).view(-1)
    return offsets[torch.cat([taken, counts.sum()[None]])]


def rank_major(pooled: Tensor, bags: Sequence[Sequence[int]], columns: Sequence[int]) -> Tensor:
    """The order in which TorchRec's output distribution expects bags of varying batches (torchrec 1.8.0).

    Args:
        pooled: (at least the most bags of a feature, sum of columns).
        bags: of each feature from each rank.
        columns: of each feature.

    Returns:
        One dimension: rank by rank, feature by feature, its bags.
    """
    by_feature = [
        torch.split(block[: sum(from_ranks)], list(from_ranks))
        for block, from_ranks in zip(torch.split(pooled, list(columns), dim=1), bags, strict=True)
    ]
    return torch.cat([part.reshape(-1) for rank in zip(*by_feature, strict=True) for part in rank])
