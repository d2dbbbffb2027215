"""Stores lists of ids as tensors and makes the ``KeyedJaggedTensor`` of a batch from them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor
from two_tower.movielens import Features


class FeatureStore:
    """The features of all users or of all items.

    Args:
        features: The lists of raw ids.
        modulo: The divisor that ids are taken modulo of; the results are not negative. Default: None, raw ids.
    """

    def __init__(self, features: Features, modulo: int | None = None) -> None:
        self.names = list(features.names)
        self.num_rows = len(features.lists[0])
        every = [ids for lists in features.lists for ids in lists]
        self.ids = torch.tensor([each for ids in every for each in ids], dtype=torch.int64)
        if modulo is not None:
            self.ids %= modulo
        lengths = torch.tensor([len(ids) for ids in every])
        self.lengths = lengths.view(len(self.names), -1)
        self.begins = (lengths.cumsum(0) - lengths).view_as(self.lengths)

    def pick(self, rows: Tensor) -> KeyedJaggedTensor:
        """Returns the features of the given rows, (B,) int64, in their order."""
        lengths = self.lengths[:, rows].flatten()
        # The position of each id is the begin of its list plus the position of the id in the list.
        shifts = self.begins[:, rows].flatten() - (lengths.cumsum(0) - lengths)
        sources = torch.arange(int(lengths.sum())) + shifts.repeat_interleave(lengths)
        return KeyedJaggedTensor(self.names, self.ids[sources], lengths=lengths)


def shuffled(interactions: Tensor, batch_size: int, seed: int, rank: int, world_size: int) -> Iterator[Tensor]:
    """Yields the part of one rank of every batch of an epoch. The order depends only on the seed.

    All ranks get the same number of batches, and the same number of samples of each batch. The last interactions that
    do not fill a batch are left out.
    """
    order = torch.randperm(len(interactions), generator=torch.Generator().manual_seed(seed))
    part = batch_size // world_size
    for begin in range(rank * part, len(order) // batch_size * batch_size, batch_size):
        yield interactions[order[begin : begin + part]]
