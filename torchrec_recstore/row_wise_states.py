"""Row-wise optimizer states, of which each column shard of a table has its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def column_weighted_mean(states: Sequence[Tensor], widths: Sequence[int]) -> Tensor:
    """One row-wise state in the place of those of several column shards.

    Args:
        states: (N,) float32 each. The state of the same N rows in each column shard.
        widths: The number of columns that each state counts for.

    Returns:
        (N,) float32. A single state is returned as it is, bit for bit.
    """
    if len(states) == 1:
        return states[0]
    columns = sum(widths)
    weighted = [state.double() * (width / columns) for state, width in zip(states, widths, strict=True)]
    return torch.stack(weighted).sum(0).float()
