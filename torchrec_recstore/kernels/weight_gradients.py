"""The gradients of per-sample weights, computed from the rows of the ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor


def weight_gradients(
    rows: Sequence[Tensor],
    feature_tables: Sequence[int],
    pooling: Literal["sum", "mean"],
    offsets: Tensor,
    grad: Tensor,
) -> Tensor:
    """Returns the gradient of the per-sample weights of a pooled lookup, (N,) float32.

    Args:
        rows: For each table, (n, columns). The rows of its ids, feature by feature.
        feature_tables: The index of each feature's table in ``rows``.
        pooling: The way in which the rows of a bag were pooled.
        offsets: (F * B + 1,). The position where each bag begins, and N at the end.
        grad: (B, sum of the features' columns) float32. The gradient of the lookup's output.
    """
    bags = grad.shape[0]
    taken = [0] * len(rows)
    parts = [grad.new_empty(0)]
    columns = torch.split(grad, [rows[table].shape[1] for table in feature_tables], dim=1)
    for number, (table, of_bags) in enumerate(zip(feature_tables, columns, strict=True)):
        own = offsets[number * bags : (number + 1) * bags + 1]
        begin, taken[table] = taken[table], taken[table] + int(own[-1] - own[0])
        scales = bag_scales(own, pooling)
        of_ids = (of_bags if scales is None else of_bags * scales[:, None])[bag_of(own)]
        parts.append((rows[table][begin : taken[table]].float() * of_ids).sum(1))
    return torch.cat(parts)


def bag_scales(offsets: Tensor, pooling: Literal["sum", "mean"]) -> Tensor | None:
    """Returns the factor of each bag's sum, (bags,) float32: 1 / length for a mean. Returns None for a sum."""
    if pooling == "sum":
        return None
    return 1.0 / (offsets[1:] - offsets[:-1]).clamp(min=1).float()


def bag_of(offsets: Tensor) -> Tensor:
    """Returns the number of each id's bag, (n,) int64, for bags that begin at ``offsets``."""
    lengths = offsets[1:] - offsets[:-1]
    return torch.repeat_interleave(torch.arange(len(lengths)), lengths)
