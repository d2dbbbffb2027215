"""References for tables with max_rows: the residents by the exact policies, and their
rows.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchrec_recstore.options import LFU, LRU, Scored, TableOptions
from torchrec_recstore.store import Table

Ids = npt.NDArray[np.int64]


def fmix64(ids: Ids) -> npt.NDArray[np.uint64]:
    """The number that decides between rows of equal rank.

    Source: Appleby, MurmurHash3.cpp, fmix64.
    """
    x = ids.astype(np.uint64)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x = (x ^ (x >> np.uint64(33))) * np.uint64(factor)
    return x ^ (x >> np.uint64(33))


class Residents:
    """The ids that have a row, with their last steps, frequencies and scores.

    Args:
        universe: All ids that will be looked up.
        max_rows: The bound.
        eviction: The policy.
    """

    def __init__(
        self, universe: Ids, max_rows: int, eviction: LRU | LFU | Scored
    ) -> None:
        self._universe = np.unique(universe)
        self._ties = fmix64(self._universe)
        self._max_rows = max_rows
        self._half_life = (
            eviction.half_life_steps if isinstance(eviction, LFU) else None
        )
        self._by_frequency = isinstance(eviction, LFU)
        self._by_occurrence = (
            isinstance(eviction, LFU) and eviction.count == "occurrences"
        )
        self._default_score = eviction.default if isinstance(eviction, Scored) else None
        self.resident = np.zeros(len(self._universe), bool)
        self.last_step = np.zeros(len(self._universe), np.int64)
        self.frequency = np.zeros(len(self._universe), np.int64)
        self.score = np.zeros(len(self._universe), np.float32)
        self.steps = 0
        self.evicted = 0

    def lookup(self, ids: Ids, pinned: Ids | None = None) -> int:
        """Runs a training step.

        Returns the number of its distinct ids that had a row.
        """
        places = self._places(ids)
        hits = int(self.resident[places].sum())
        self._arrive(places, pinned)
        self.steps += 1
        times = np.unique(ids, return_counts=True)[1] if self._by_occurrence else 1
        if self._default_score is None:
            self.frequency[places] = self._aged(places) + times
        self.last_step[places] = self.steps
        return hits

    def write(self, ids: Ids, pinned: Ids | None = None) -> None:
        """Makes rows outside of a step."""
        self._arrive(self._places(ids), pinned)

    def set_scores(self, ids: Ids, scores: npt.NDArray[np.float32]) -> int:
        """Sets the scores of resident ids, in order.

        Returns the number of distinct ones.
        """
        is_resident = np.isin(ids, self.ids())
        for id_, score in zip(ids[is_resident], scores[is_resident], strict=True):
            self.score[np.searchsorted(self._universe, id_)] = score
        return len(np.unique(ids[is_resident]))

    def remove(self, ids: Ids) -> None:
        """Removes rows."""
        self.resident[self._places(ids)] = False

    def set_bookkeeping(self, ids: Ids, last_step: Ids, frequency: Ids) -> None:
        """Writes the last steps and the frequencies of resident ids."""
        places = np.searchsorted(self._universe, ids)
        self.last_step[places], self.frequency[places] = last_step, frequency

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
        halvings = (
            self.steps // self._half_life - self.last_step[places] // self._half_life
        )
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
            if self._default_score is not None:
                keys.append(self.score[candidates])
            leaving = candidates[np.lexsort(keys)][:over]
            self.resident[leaving] = False
            self.evicted += len(leaving)
        self.resident[new] = True
        self.last_step[new] = self.steps
        self.frequency[new] = 0
        if self._default_score is not None:
            self.score[new] = self._default_score


def zipf_steps(
    exponent: float, population: int, steps: int, batch: int, seed: int = 0
) -> list[Tensor]:
    """Batches of 64-bit ids whose popularity follows Zipf's law."""
    generator = np.random.default_rng(seed)
    weights = np.arange(1, population + 1, dtype=np.float64) ** -exponent
    ranks = np.searchsorted(
        np.cumsum(weights) / weights.sum(), generator.random((steps, batch))
    )
    ids = fmix64(np.minimum(ranks, population - 1).astype(np.int64)).astype(np.int64)
    return list(torch.from_numpy(ids))


def universe_of(batches: Iterable[Tensor]) -> Ids:
    """All ids of the batches, ascending."""
    universe: Ids = torch.cat(list(batches)).unique().numpy()
    return universe


class Model:
    """A reference table: rows are tensors, the policies decide which rows are resident,
    and SGD is plain torch.
    """

    def __init__(
        self, options: TableOptions, initial: Table, universe: list[int]
    ) -> None:
        assert options.max_rows is not None
        assert options.eviction is not None
        self.policy = Residents(np.array(universe), options.max_rows, options.eviction)
        self.count = options.admission.count if options.admission else 1
        self.initial = initial
        self.weights: dict[int, Tensor] = {}
        self.seen: dict[int, int] = {}
        self.lookups = self.hits = self.refused = self.inserts = 0

    def initial_row(self, id_: int) -> Tensor:
        return self.initial.lookup(torch.tensor([id_]))[0]

    def admitted(self, ids: list[int], *, sighting: bool) -> list[int]:
        """Returns the ids that have a row or get one.

        Only a sighting can admit an id, unless all are admitted.
        """
        if self.count == 1:
            return ids
        return [
            id_
            for id_ in ids
            if id_ in self.weights
            or (sighting and self.seen.get(id_, 0) + 1 >= self.count)
        ]

    def fits(self, ids: list[int]) -> bool:
        return len(ids) <= self.policy._max_rows

    def _arrived(self, ids: list[int]) -> None:
        """Creates and removes rows after the policy has changed the residents."""
        self.inserts += sum(id_ not in self.weights for id_ in ids)
        here = set(self.policy.ids().tolist())
        self.weights = {id_: row for id_, row in self.weights.items() if id_ in here}
        for id_ in ids:
            self.weights.setdefault(id_, self.initial_row(id_))

    def lookup(self, ids: list[int]) -> list[Tensor]:
        distinct = sorted(set(ids))
        admitted = self.admitted(distinct, sighting=True)
        self.lookups += len(distinct)
        self.refused += len(distinct) - len(admitted)
        for id_ in distinct:
            if id_ not in self.weights:
                self.seen[id_] = self.seen.get(id_, 0) + 1
        here = set(admitted)
        occurrences = [id_ for id_ in ids if id_ in here]
        self.hits += self.policy.lookup(np.array(occurrences, dtype=np.int64))
        self._arrived(admitted)
        return [
            self.weights[id_] if id_ in self.weights else self.initial_row(id_)
            for id_ in ids
        ]

    def write(self, ids: list[int]) -> None:
        self.policy.write(np.array(sorted(set(ids)), dtype=np.int64))
        self._arrived(sorted(set(ids)))

    def update(self, ids: list[int], grads: Tensor, lr: float) -> None:
        sums: dict[int, Tensor] = {}
        for id_, grad in zip(ids, grads, strict=True):
            if id_ in self.weights:
                sums[id_] = sums[id_] + grad if id_ in sums else grad
        for id_, grad in sums.items():
            self.weights[id_] = self.weights[id_] - lr * grad

    def remove(self, ids: list[int]) -> None:
        self.policy.remove(np.array(sorted(set(ids)), dtype=np.int64))
        for id_ in ids:
            self.weights.pop(id_, None)
