"""Moves tables of a plan between ranks and sharding types while the step of the slowest
rank becomes shorter.

Tests: tests/planner/test_forecasts.py, tests/planner/test_statistics.py.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.distributed.planner.types import ShardingOption, Topology

from torchrec_recstore.planner.traffic import (
    COLLECTIVES,
    OUTPUTS,
    PlacedTable,
    library_factor,
)
from torchrec_recstore.sharders import RECSTORE_KERNEL

REFINED = ("table_wise", "row_wise")
"""The sharding types between which tables are moved."""

SHARDING_TYPE_MS: Mapping[str, float] = {"table_wise": 2.3, "row_wise": 2.2}
"""The milliseconds of a step that each sharding type of a collection takes on every
rank of several, whatever its tables are: TorchRec's own work, with the calls of the
collectives, as ``benchmarks/plan.py`` measures it in processor time for two ranks with
gloo on an AMD EPYC (Zen 5) with torch 2.13 and TorchRec 1.8.
"""

_LEAST_GAIN = 1e-3  # A change for less is not worth another plan.


def check_sharding_type_ms(milliseconds: Mapping[str, float]) -> None:
    """Raises ValueError if a sharding type is not one of ``REFINED``, or has no time in
    milliseconds.
    """
    for kind, value in milliseconds.items():
        if kind not in REFINED:
            raise ValueError(
                f"sharding_type_ms must have only {' and '.join(REFINED)}, got {kind!r}"
            )
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 <= value < math.inf
        ):
            raise ValueError(
                f"sharding_type_ms[{kind!r}] must be a finite number of at least 0, got"
                f" {value!r}"
            )


def refined(
    plan: list[ShardingOption],
    found: list[ShardingOption],
    topology: Topology,
    measured: set[str],
    sharding_type_ms: Mapping[str, float],
) -> list[ShardingOption]:
    """Returns a plan whose slowest rank takes no longer.

    TorchRec's planner adds up the times of a rank's shards. This search also counts
    what a rank sends to and receives from the shards of other ranks, and what each
    sharding type of a collection takes. It starts from the plan, and from the plans in
    which the tables have only one sharding type. Only tables on the slowest rank are
    moved, or swapped with a table of another rank. ``found`` are all options from which
    the plan was chosen, and ``measured`` the names of the tables that may be moved.
    """
    choices = {
        (option.fqn, option.sharding_type): option
        for option in found
        if option.name in measured
        and option.sharding_type in REFINED
        and option.compute_kernel == RECSTORE_KERNEL
        and option.is_pooled
    }
    fixed = [
        option for option in plan if (option.fqn, option.sharding_type) not in choices
    ]
    cost = _Cost(choices, fixed, topology, sharding_type_ms)
    places = {
        option.fqn: _Place(
            option.sharding_type, tuple(shard.rank for shard in option.shards)
        )
        for option in plan
        if (option.fqn, option.sharding_type) in choices
    }
    if not places:
        return plan
    starts = [
        places,
        *(
            start
            for kind in REFINED
            if (start := _of_one_type(kind, list(places), cost)) is not None
        ),
    ]
    places = min(
        (_best_from(start, cost) for start in starts),
        key=lambda each: cost.slowest(each, cost.load(each))[0],
    )
    moved = []
    for option in plan:
        if option.fqn in places and (option.fqn, option.sharding_type) in choices:
            place = places[option.fqn]
            option = copy.deepcopy(choices[option.fqn, place.sharding_type])
            for shard, rank in zip(option.shards, place.ranks, strict=True):
                shard.rank = rank
        moved.append(option)
    return moved


@dataclass(frozen=True)
class _Place:
    """The sharding type of a table and the rank of each of its shards."""

    sharding_type: str
    ranks: tuple[int, ...]


def _of_one_type(
    sharding_type: str, tables: list[str], cost: _Cost
) -> dict[str, _Place] | None:
    """Returns places of one sharding type, or None if the tables cannot have it or do
    not fit.

    Table-wise tables are placed one by one, that with the longest lookups first, where
    the slowest rank is fastest.
    """
    if not all((table, sharding_type) in cost.choices for table in tables):
        return None
    if sharding_type == "row_wise":
        places = dict.fromkeys(tables, cost.everywhere)
        return places if cost.fits(cost.load(places)) else None
    places = {}
    alone = {
        table: cost.load({table: _Place(sharding_type, (0,))})[0, 0] for table in tables
    }
    for table in sorted(tables, key=lambda name: -alone[name]):
        after = [
            {**places, table: _Place(sharding_type, (rank,))}
            for rank in range(cost.ranks)
        ]
        fitting = [(each, load) for each in after if cost.fits(load := cost.load(each))]
        if not fitting:
            return None
        places, _ = min(fitting, key=lambda each: cost.slowest(*each)[0])
    return places


def _best_from(places: dict[str, _Place], cost: _Cost) -> dict[str, _Place]:
    while better := _improved(places, cost):
        places = better
    return places


def _improved(places: Mapping[str, _Place], cost: _Cost) -> dict[str, _Place]:
    """Returns the best of the changed plans, or no places if no change makes the
    slowest rank faster.
    """
    load = cost.load(places)
    now, rank = cost.slowest(places, load)
    best: tuple[float, dict[str, _Place]] = (now * (1 - _LEAST_GAIN), {})
    for changed in _changes(places, rank, cost):
        if not all(
            (table, place.sharding_type) in cost.choices
            for table, place in changed.items()
        ):
            continue
        after = {**places, **changed}
        load_after = (
            load
            + cost.load(changed)
            - cost.load({table: places[table] for table in changed})
        )
        if cost.fits(load_after):
            best = min(
                best,
                (cost.slowest(after, load_after)[0], after),
                key=lambda each: each[0],
            )
    return best[1]


def _changes(
    places: Mapping[str, _Place], slowest: int, cost: _Cost
) -> Iterator[dict[str, _Place]]:
    """Returns the other places of each table of a rank, and the swaps of two tables of
    two ranks.
    """
    for table, place in places.items():
        if slowest not in place.ranks:
            continue
        for other in (
            cost.everywhere,
            *(_Place("table_wise", (rank,)) for rank in range(cost.ranks)),
        ):
            if other != place:
                yield {table: other}
        for partner, its_place in places.items():
            if place != its_place:
                yield {table: its_place, partner: place}


class _Cost:
    """The step of each rank and its memory, for any places of the tables.

    ``fixed`` are the tables that stay.
    """

    def __init__(
        self,
        choices: Mapping[tuple[str, str], ShardingOption],
        fixed: list[ShardingOption],
        topology: Topology,
        sharding_type_ms: Mapping[str, float],
    ) -> None:
        self.choices, self.ranks = choices, int(topology.world_size)
        self.everywhere = _Place("row_wise", tuple(range(self.ranks)))
        self._type_ms = sharding_type_ms
        self._device = str(topology.compute_device)
        hosts = torch.arange(self.ranks) // int(topology.local_world_size)
        bandwidths = topology.comms_bandwidths
        same_host = hosts[:, None] == hosts[None, :]
        self._ms_per_byte = torch.where(
            same_host, 1 / bandwidths.intra_host_bw, 1 / bandwidths.inter_host_bw
        ).double()
        self._ms_per_byte.fill_diagonal_(0)
        self._fixed_ms = torch.zeros(self.ranks, dtype=torch.float64)
        self._free = torch.tensor(
            [[d.storage.ddr, d.storage.hbm] for d in topology.devices],
            dtype=torch.float64,
        )
        self._known: dict[tuple[str, _Place], Tensor] = {}
        # the path is the collection's
        self._fixed_types = {(option.path, option.sharding_type) for option in fixed}
        for shard in (shard for option in fixed for shard in option.shards):
            self._fixed_ms[shard.rank] += shard.perf.total
            self._free[shard.rank] -= torch.tensor(
                [shard.storage.ddr, shard.storage.hbm], dtype=torch.float64
            )

    def slowest(self, places: Mapping[str, _Place], load: Tensor) -> tuple[float, int]:
        """Returns the milliseconds of the slowest rank, and the rank.

        ``load`` is that of the places.
        """
        exchanged = load[:, 1:-2].view(self.ranks, len(COLLECTIVES), 2)
        step = self._fixed_ms + load[:, 0] + exchanged.amax(2).sum(1)
        options = (
            self.choices[table, place.sharding_type] for table, place in places.items()
        )
        types = self._fixed_types | {
            (option.path, option.sharding_type) for option in options
        }
        return float(step.max()) + sum(
            self._type_ms.get(kind, 0.0) for _, kind in types
        ), int(step.argmax())

    def fits(self, load: Tensor) -> bool:
        """Returns whether every rank has the memory."""
        return bool((load[:, -2:] <= self._free).all())

    def load(self, places: Mapping[str, _Place]) -> Tensor:
        """Returns what tables cost each rank together, (R, 1 + 2C + 2) float64.

        The columns are the milliseconds of lookups, those of sending and of receiving
        with each of C collectives, and the bytes of host and device memory.
        """
        none = torch.zeros(self.ranks, 3 + 2 * len(COLLECTIVES), dtype=torch.float64)
        return sum(
            (self._of(table, place) for table, place in places.items()), start=none
        )

    def _of(self, table: str, place: _Place) -> Tensor:
        if (table, place) in self._known:
            return self._known[table, place]
        option = self.choices[table, place.sharding_type]
        load = torch.zeros(self.ranks, 3 + 2 * len(COLLECTIVES), dtype=torch.float64)
        for shard, rank in zip(option.shards, place.ranks, strict=True):
            load[rank, 0] += shard.perf.fwd_compute + shard.perf.bwd_compute
            load[rank, -2:] += torch.tensor(
                [shard.storage.ddr, shard.storage.hbm], dtype=torch.float64
            )
        placed = PlacedTable(
            place.sharding_type,
            place.ranks,
            dim=option.tensor.shape[1],
            features=len(option.input_lengths),
            ids_per_sample=sum(option.input_lengths),
            weighted=bool(option.is_weighted),
        )
        held = torch.zeros(self.ranks, dtype=torch.float64)
        held[list(place.ranks)] = 1
        owner = place.ranks[0]
        other = (owner + 1) % self.ranks
        for at, name in enumerate(COLLECTIVES):
            # Each rank sends inputs and gradients to each rank with a shard, which
            # sends pooled rows back.
            source, to = (owner, other) if name in OUTPUTS else (other, owner)
            size = placed.message_bytes(
                name, source, to, option.batch_size
            ) * library_factor(name, self._device)
            sends, receives = (
                size * (self._ms_per_byte @ held),
                size * held * self._ms_per_byte.sum(1),
            )
            outward = (receives, sends) if name in OUTPUTS else (sends, receives)
            load[:, 1 + 2 * at], load[:, 2 + 2 * at] = outward
        self._known[table, place] = load
        return load
