"""The resident ids of each step by the exact policies and by the store's own rule, in plain numpy."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchrec_recstore.options import LFU, LRU

Ids = npt.NDArray[np.int64]


def fmix64(ids: Ids) -> npt.NDArray[np.uint64]:
    """The number that decides between rows of equal rank.

    Source: Appleby, MurmurHash3.cpp, fmix64.
    """
    x = ids.astype(np.uint64)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x = (x ^ (x >> np.uint64(33))) * np.uint64(factor)
    return x ^ (x >> np.uint64(33))


def least_at_once(max_rows: int) -> int:
    """The number of rows that the store evicts together when fewer would be enough."""
    return max(1, max_rows // 32)


class Residents:
    """The ids that have a row, with their last steps and frequencies.

    Args:
        universe: All ids that will be looked up.
        max_rows: The bound.
        eviction: The policy.
        at_once: The number of rows that are evicted together when fewer would be enough. 1 for the exact policy.
    """

    def __init__(self, universe: Ids, max_rows: int, eviction: LRU | LFU, at_once: int = 1) -> None:
        self._universe = np.unique(universe)
        self._ties = fmix64(self._universe)
        self._max_rows = max_rows
        self._half_life = eviction.half_life_steps if isinstance(eviction, LFU) else None
        self._by_frequency = isinstance(eviction, LFU)
        self._at_once = at_once
        self.resident = np.zeros(len(self._universe), bool)
        self.last_step = np.zeros(len(self._universe), np.int64)
        self.frequency = np.zeros(len(self._universe), np.int64)
        self.steps = 0
        self.evicted = 0

    def lookup(self, ids: Ids, pinned: Ids | None = None) -> int:
        """Runs a training step. Returns the number of its distinct ids that had a row."""
        places = self._places(ids)
        hits = int(self.resident[places].sum())
        self._arrive(places, pinned)
        self.steps += 1
        self.frequency[places] = self._aged(places) + 1
        self.last_step[places] = self.steps
        return hits

    def write(self, ids: Ids, pinned: Ids | None = None) -> None:
        """Makes rows outside of a step."""
        self._arrive(self._places(ids), pinned)

    def remove(self, ids: Ids) -> None:
        """Removes rows."""
        self.resident[self._places(ids)] = False

    def ids(self) -> Ids:
        """The ids of the resident rows, ascending."""
        return self._universe[self.resident]

    def bookkeeping(self, ids: Ids) -> tuple[Ids, Ids]:
        """The last steps and the frequencies of resident ids."""
        places = np.searchsorted(self._universe, ids)
        return self.last_step[places], self.frequency[places]

    def _places(self, ids: Ids) -> Ids:
        return np.searchsorted(self._universe, np.unique(ids))

    def _aged(self, places: Ids) -> Ids:
        if self._half_life is None:
            return self.frequency[places]
        halvings = self.steps // self._half_life - self.last_step[places] // self._half_life
        aged: Ids = self.frequency[places] >> np.clip(halvings, 0, 62)
        return aged

    def _arrive(self, places: Ids, pinned: Ids | None) -> None:
        new = places[~self.resident[places]]
        over = int(self.resident.sum()) + len(new) - self._max_rows
        if over > 0:
            may_leave = self.resident.copy()
            may_leave[places] = False
            if pinned is not None:
                may_leave[self._places(pinned)] = False
            candidates = np.flatnonzero(may_leave)
            assert len(candidates) >= over, "the working set does not fit"
            keys = [self._ties[candidates], self.last_step[candidates]]
            if self._by_frequency:
                keys.append(self._aged(candidates))
            leaving = candidates[np.lexsort(keys)][: max(over, self._at_once)]
            self.resident[leaving] = False
            self.evicted += len(leaving)
        self.resident[new] = True
        self.last_step[new] = self.steps
        self.frequency[new] = 0


def zipf_steps(exponent: float, population: int, steps: int, batch: int, seed: int = 0) -> list[Tensor]:
    """Batches of 64-bit ids whose popularity follows Zipf's law."""
    generator = np.random.default_rng(seed)
    weights = np.arange(1, population + 1, dtype=np.float64) ** -exponent
    ranks = np.searchsorted(np.cumsum(weights) / weights.sum(), generator.random((steps, batch)))
    ids = fmix64(np.minimum(ranks, population - 1).astype(np.int64)).astype(np.int64)
    return list(torch.from_numpy(ids))


def universe_of(batches: Iterable[Tensor]) -> Ids:
    """All ids of the batches, ascending."""
    universe: Ids = torch.cat(list(batches)).unique().numpy()
    return universe
