"""Moves tables of a plan while the step of the slowest rank becomes shorter.

They are moved between ranks and sharding types.

Tests: tests/planner/test_forecasts.py, tests/planner/test_statistics.py.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.distributed.planner.types import ShardingOption, Storage, Topology

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
# The columns of the load of each rank, see _Cost.load().
_LOOKUPS = 0
_EXCHANGES = slice(1, -2)
_MEMORY = slice(-2, None)


def check_sharding_type_ms(milliseconds: Mapping[str, float]) -> None:
    """Refuses sharding types other than ``REFINED``, and times that are no numbers."""
    for kind, value in milliseconds.items():
        if kind not in REFINED:
            allowed = " and ".join(REFINED)
            raise ValueError(f"sharding_type_ms must have only {allowed}, got {kind!r}")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value < math.inf:
            raise ValueError(
                f"sharding_type_ms[{kind!r}] must be a finite number of at least 0, got"
                f" {value!r}"
            )


def refined(
    plan: list[ShardingOption],
    options: list[ShardingOption],
    topology: Topology,
    measured: set[str],
    sharding_type_ms: Mapping[str, float],
) -> list[ShardingOption]:
    """Returns a plan whose slowest rank takes no longer.

    TorchRec's planner adds up the times of a rank's shards. This search also counts
    what a rank sends to and receives from the shards of other ranks, and what each
    sharding type of a collection takes. It starts from the plan, and from the plans in
    which the tables have only one sharding type. Only tables on the slowest rank are
    moved, or swapped with a table of another rank. ``options`` are all options from
    which the plan was chosen, and ``measured`` the names of the tables that may be
    moved.
    """
    choices = {}
    for option in options:
        if (
            option.name in measured
            and option.sharding_type in REFINED
            and option.compute_kernel == RECSTORE_KERNEL
            and option.is_pooled
        ):
            choices[option.fqn, option.sharding_type] = option

    fixed = []
    places: dict[str, _Place] = {}
    for option in plan:
        if (option.fqn, option.sharding_type) in choices:
            ranks = tuple(shard.rank for shard in option.shards)
            places[option.fqn] = _Place(option.sharding_type, ranks)
        else:
            fixed.append(option)
    cost = _Cost(choices, fixed, topology, sharding_type_ms)
    if not places:
        return plan

    starts = [places]
    for sharding_type in REFINED:
        start = _of_one_type(sharding_type, list(places), cost)
        if start is not None:
            starts.append(start)
    ends = [_best_from(start, cost) for start in starts]
    places = min(ends, key=cost.step_ms)

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
    sharding_type: str,
    tables: list[str],
    cost: _Cost,
) -> dict[str, _Place] | None:
    """Returns places of one sharding type; None if the tables cannot have it.

    They must also fit into the memory.

    Table-wise tables are placed one by one, that with the longest lookups first, where
    the slowest rank is fastest.
    """
    for table in tables:
        if (table, sharding_type) not in cost.choices:
            return None
    if sharding_type == "row_wise":
        places = dict.fromkeys(tables, cost.everywhere)
        load = cost.load(places)
        return places if cost.fits(load) else None

    lookup_ms: dict[str, float] = {}
    for table in tables:
        first_rank = _Place(sharding_type, (0,))
        load = cost.load({table: first_rank})
        lookup_ms[table] = float(load[0, _LOOKUPS])

    places = {}
    longest_first = sorted(tables, key=lambda name: -lookup_ms[name])
    for table in longest_first:
        best: dict[str, _Place] | None = None
        best_ms = math.inf
        for rank in range(cost.ranks):
            place = _Place(sharding_type, (rank,))
            candidate = {**places, table: place}
            load = cost.load(candidate)
            if cost.fits(load):
                step_ms, _ = cost.slowest(candidate, load)
                if best is None or step_ms < best_ms:
                    best = candidate
                    best_ms = step_ms
        if best is None:
            return None
        places = best
    return places


def _best_from(places: dict[str, _Place], cost: _Cost) -> dict[str, _Place]:
    while True:
        improved = _improved(places, cost)
        if not improved:
            return places
        places = improved


def _improved(places: Mapping[str, _Place], cost: _Cost) -> dict[str, _Place]:
    """Returns the best of the changed plans.

    It has no places if no change makes the slowest rank faster.
    """
    load = cost.load(places)
    step_ms, slowest_rank = cost.slowest(places, load)
    best_ms = step_ms * (1 - _LEAST_GAIN)
    best: dict[str, _Place] = {}
    for changed in _changes(places, slowest_rank, cost):
        if not cost.has_choices(changed):
            continue
        replaced = {table: places[table] for table in changed}
        new_places = {**places, **changed}
        new_load = load + cost.load(changed) - cost.load(replaced)
        if cost.fits(new_load):
            new_ms, _ = cost.slowest(new_places, new_load)
            if new_ms < best_ms:
                best_ms = new_ms
                best = new_places
    return best


def _changes(
    places: Mapping[str, _Place],
    slowest: int,
    cost: _Cost,
) -> Iterator[dict[str, _Place]]:
    """Yields the other places of each table of a rank, and the swaps of two tables.

    The tables that are swapped are on two ranks.
    """
    new_places = [cost.everywhere]
    for rank in range(cost.ranks):
        new_places.append(_Place("table_wise", (rank,)))
    for table, place in places.items():
        if slowest not in place.ranks:
            continue
        for new_place in new_places:
            if new_place != place:
                yield {table: new_place}
        for partner, partner_place in places.items():
            if place != partner_place:
                yield {table: partner_place, partner: place}


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
        self.choices = choices
        self.ranks = int(topology.world_size)
        self.everywhere = _Place("row_wise", tuple(range(self.ranks)))
        self._type_ms = sharding_type_ms
        self._device = str(topology.compute_device)
        self._ms_per_byte = _ms_per_byte(topology)
        self._loads: dict[tuple[str, _Place], Tensor] = {}

        self._fixed_ms = torch.zeros(self.ranks, dtype=torch.float64)
        bytes_of_ranks = [_bytes_of(device.storage) for device in topology.devices]
        self._free_bytes = torch.stack(bytes_of_ranks)
        self._fixed_types: set[tuple[str, str]] = set()
        for option in fixed:
            # the path is the collection's
            self._fixed_types.add((option.path, option.sharding_type))
            for shard in option.shards:
                self._fixed_ms[shard.rank] += shard.perf.total
                self._free_bytes[shard.rank] -= _bytes_of(shard.storage)

    def has_choices(self, places: Mapping[str, _Place]) -> bool:
        """Returns whether each table can have the sharding type of its place."""
        return all(
            (table, place.sharding_type) in self.choices
            for table, place in places.items()
        )

    def step_ms(self, places: Mapping[str, _Place]) -> float:
        """Returns the milliseconds of the slowest rank."""
        load = self.load(places)
        milliseconds, _ = self.slowest(places, load)
        return milliseconds

    def slowest(self, places: Mapping[str, _Place], load: Tensor) -> tuple[float, int]:
        """Returns the milliseconds of the slowest rank, and the rank.

        ``load`` is that of the places.
        """
        # A rank sends and receives at the same time.
        exchanges_ms = load[:, _EXCHANGES].view(self.ranks, len(COLLECTIVES), 2)
        longer_ms = exchanges_ms.amax(dim=2)
        collectives_ms = longer_ms.sum(dim=1)
        rank_ms = self._fixed_ms + load[:, _LOOKUPS] + collectives_ms

        types = set(self._fixed_types)
        for table, place in places.items():
            option = self.choices[table, place.sharding_type]
            types.add((option.path, option.sharding_type))
        types_ms = 0.0
        for _, sharding_type in types:
            types_ms += self._type_ms.get(sharding_type, 0.0)

        slowest_ms = float(rank_ms.max()) + types_ms
        return slowest_ms, int(rank_ms.argmax())

    def fits(self, load: Tensor) -> bool:
        """Returns whether every rank has the memory."""
        has_memory = load[:, _MEMORY] <= self._free_bytes
        return bool(has_memory.all())

    def load(self, places: Mapping[str, _Place]) -> Tensor:
        """Returns what tables cost each rank together, (R, 1 + 2C + 2) float64.

        The columns are the milliseconds of lookups (``_LOOKUPS``), those of sending and
        of receiving with each of C collectives (``_EXCHANGES``), and the bytes of host
        and device memory (``_MEMORY``).
        """
        total = self._no_load()
        for table, place in places.items():
            total = total + self._table_load(table, place)
        return total

    def _no_load(self) -> Tensor:
        columns = 1 + 2 * len(COLLECTIVES) + 2
        return torch.zeros(self.ranks, columns, dtype=torch.float64)

    def _table_load(self, table: str, place: _Place) -> Tensor:
        if (table, place) in self._loads:
            return self._loads[table, place]
        option = self.choices[table, place.sharding_type]
        load = self._no_load()
        for shard, rank in zip(option.shards, place.ranks, strict=True):
            lookups_ms = shard.perf.fwd_compute + shard.perf.bwd_compute
            load[rank, _LOOKUPS] += lookups_ms
            load[rank, _MEMORY] += _bytes_of(shard.storage)
        self._add_exchanges(load, option, place)
        self._loads[table, place] = load
        return load

    def _add_exchanges(
        self,
        load: Tensor,
        option: ShardingOption,
        place: _Place,
    ) -> None:
        """Writes the milliseconds of the collectives of a table to its load."""
        placed = PlacedTable(
            place.sharding_type,
            place.ranks,
            dim=option.tensor.shape[1],
            features=len(option.input_lengths),
            ids_per_sample=sum(option.input_lengths),
            weighted=bool(option.is_weighted),
        )
        owner = place.ranks[0]
        peer = (owner + 1) % self.ranks

        # The milliseconds a byte: of each rank with all ranks that have a shard, and of
        # each rank that has a shard with all ranks.
        has_shard = torch.zeros(self.ranks, dtype=torch.float64)
        has_shard[list(place.ranks)] = 1
        to_shards = self._ms_per_byte @ has_shard
        from_shards = has_shard * self._ms_per_byte.sum(1)

        for number, name in enumerate(COLLECTIVES):
            # Each rank sends inputs and gradients to each rank with a shard, which
            # sends pooled rows back.
            if name in OUTPUTS:
                size = placed.message_bytes(name, owner, peer, option.batch_size)
                send_ms = from_shards
                receive_ms = to_shards
            else:
                size = placed.message_bytes(name, peer, owner, option.batch_size)
                send_ms = to_shards
                receive_ms = from_shards
            size *= library_factor(name, self._device)
            send_column = _EXCHANGES.start + 2 * number
            receive_column = send_column + 1
            load[:, send_column] = size * send_ms
            load[:, receive_column] = size * receive_ms


def _ms_per_byte(topology: Topology) -> Tensor:
    """Returns the milliseconds of a byte between two ranks, (R, R) float64."""
    ranks = int(topology.world_size)
    hosts = torch.arange(ranks) // int(topology.local_world_size)
    is_same_host = hosts[:, None] == hosts[None, :]
    bandwidths = topology.comms_bandwidths
    milliseconds = torch.where(
        is_same_host,
        1 / bandwidths.intra_host_bw,
        1 / bandwidths.inter_host_bw,
    ).double()
    return milliseconds.fill_diagonal_(0)


def _bytes_of(storage: Storage) -> Tensor:
    """Returns the bytes of host and device memory, (2,) float64."""
    return torch.tensor([storage.ddr, storage.hbm], dtype=torch.float64)
