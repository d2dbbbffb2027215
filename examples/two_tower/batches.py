"""Lists of ids as tensors, from which the ``KeyedJaggedTensor`` of any batch is picked."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor
from two_tower.movielens import Features


class FeatureStore:
    """The features of all users, or of all items.

    Args:
        features: lists of raw ids.
        modulo: ids are taken modulo this (never negative); None keeps them as they are.
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
        """The features of some rows, (B,) and in that order."""
        lengths = self.lengths[:, rows].flatten()
        # Where each id comes from: the begin of its list, and how far it stands in it.
        shifts = self.begins[:, rows].flatten() - (lengths.cumsum(0) - lengths)
        sources = torch.arange(int(lengths.sum())) + shifts.repeat_interleave(lengths)
        return KeyedJaggedTensor(self.names, self.ids[sources], lengths=lengths)


def shuffled(interactions: Tensor, batch_size: int, seed: int, rank: int, world_size: int) -> Iterator[Tensor]:
    """Yields one rank's part of every batch of an epoch, in an order that the seed alone decides.

    Every rank gets equally many samples of a batch, and none is left with a batch that another lacks; the last
    interactions of an order that do not fill a batch are left out.
    """
    order = torch.randperm(len(interactions), generator=torch.Generator().manual_seed(seed))
    part = batch_size // world_size
    for begin in range(rank * part, len(order) // batch_size * batch_size, batch_size):
        yield interactions[order[begin : begin + part]]
