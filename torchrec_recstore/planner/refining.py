"""Moves tables of a plan between ranks and sharding types while the step of the slowest rank becomes shorter."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.distributed.planner.types import ShardingOption, Topology

from torchrec_recstore.planner.traffic import COLLECTIVES, OUTPUTS, PlacedTable, library_factor
from torchrec_recstore.sharders import RECSTORE_KERNEL

REFINED = ("table_wise", "row_wise")
"""The sharding types between which tables are moved."""

_LEAST_GAIN = 1e-3  # A change for less is not worth another plan.


def refined(
    plan: list[ShardingOption], found: list[ShardingOption], topology: Topology, measured: set[str]
) -> list[ShardingOption]:
    """Returns a plan whose slowest rank takes no longer.

    TorchRec's planner adds up the times of a rank's shards. This search also counts what a rank sends to and receives
    from the shards of other ranks. Only tables on the slowest rank are moved, or swapped with a table of another rank.

    Args:
        plan: The options of the plan, with the ranks of their shards.
        found: All options from which the plan was chosen.
        topology: The memory of each rank, and the network.
        measured: The names of the tables that may be moved.
    """
    choices = {
        (option.fqn, option.sharding_type): option
        for option in found
        if option.name in measured
        and option.sharding_type in REFINED
        and option.compute_kernel == RECSTORE_KERNEL
        and option.is_pooled
    }
    cost = _Cost(choices, topology)
    fixed = [option for option in plan if (option.fqn, option.sharding_type) not in choices]
    cost.add_fixed(fixed)
    places = {
        option.fqn: _Place(option.sharding_type, tuple(shard.rank for shard in option.shards))
        for option in plan
        if (option.fqn, option.sharding_type) in choices
    }
    while (better := _improved(places, cost)) is not None:
        places = better
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


def _improved(places: Mapping[str, _Place], cost: _Cost) -> dict[str, _Place] | None:
    """Returns the best of the changed plans, or None if no change makes the slowest rank faster."""
    now, rank = cost.slowest(places)
    best: tuple[float, dict[str, _Place]] = (now * (1 - _LEAST_GAIN), {})
    for changed in _changes(places, rank, cost.ranks):
        after = {**places, **changed}
        if all((table, place.sharding_type) in cost.choices for table, place in changed.items()) and cost.fits(after):
            best = min(best, (cost.slowest(after)[0], after), key=lambda each: each[0])
    return best[1] or None


def _changes(places: Mapping[str, _Place], slowest: int, ranks: int) -> Iterator[dict[str, _Place]]:
    """Returns the other places of each table of a rank, and the swaps of two tables of two ranks."""
    everywhere = _Place("row_wise", tuple(range(ranks)))
    for table, place in places.items():
        if slowest not in place.ranks:
            continue
        for other in (everywhere, *(_Place("table_wise", (rank,)) for rank in range(ranks))):
            if other != place:
                yield {table: other}
        for partner, its_place in places.items():
            if place != its_place:
                yield {table: its_place, partner: place}


class _Cost:
    """The step of each rank and its memory, for any places of the tables."""

    def __init__(self, choices: Mapping[tuple[str, str], ShardingOption], topology: Topology) -> None:
        self.choices, self.ranks = choices, int(topology.world_size)
        self._device = str(topology.compute_device)
        hosts = torch.arange(self.ranks) // int(topology.local_world_size)
        bandwidths = topology.comms_bandwidths
        same_host = hosts[:, None] == hosts[None, :]
        self._ms_per_byte = torch.where(same_host, 1 / bandwidths.intra_host_bw, 1 / bandwidths.inter_host_bw).double()
        self._ms_per_byte.fill_diagonal_(0)
        self._fixed_ms = torch.zeros(self.ranks, dtype=torch.float64)
        self._free = torch.tensor([[d.storage.ddr, d.storage.hbm] for d in topology.devices], dtype=torch.float64)
        self._known: dict[tuple[str, _Place], tuple[Tensor, Tensor, Tensor]] = {}

    def add_fixed(self, options: list[ShardingOption]) -> None:
        """Adds the tables that are not moved."""
        for option in options:
            for shard in option.shards:
                self._fixed_ms[shard.rank] += shard.perf.total
                self._free[shard.rank] -= torch.tensor([shard.storage.ddr, shard.storage.hbm], dtype=torch.float64)

    def slowest(self, places: Mapping[str, _Place]) -> tuple[float, int]:
        """Returns the milliseconds of the slowest rank, and the rank."""
        each = [self._of(table, place) for table, place in places.items()]
        if not each:
            return float(self._fixed_ms.max()), int(self._fixed_ms.argmax())
        exchanged = torch.stack([exchanged for _, exchanged, _ in each]).sum(0)
        step = self._fixed_ms + torch.stack([lookups for lookups, _, _ in each]).sum(0) + exchanged.amax(2).sum(1)
        return float(step.max()), int(step.argmax())

    def fits(self, places: Mapping[str, _Place]) -> bool:
        """Returns whether every rank has the memory."""
        used = torch.stack([memory for *_, memory in (self._of(*each) for each in places.items())]).sum(0)
        return bool((used <= self._free).all())

    def _of(self, table: str, place: _Place) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what a table costs each rank.

        Returns:
            (R,), the milliseconds of lookups; (R, C, 2), the milliseconds of sending and of receiving with each
            collective; and (R, 2), the bytes of host and device memory. All float64.
        """
        if (table, place) in self._known:
            return self._known[table, place]
        option = self.choices[table, place.sharding_type]
        lookups = torch.zeros(self.ranks, dtype=torch.float64)
        memory = torch.zeros(self.ranks, 2, dtype=torch.float64)
        for shard, rank in zip(option.shards, place.ranks, strict=True):
            lookups[rank] += shard.perf.fwd_compute + shard.perf.bwd_compute
            memory[rank] += torch.tensor([shard.storage.ddr, shard.storage.hbm], dtype=torch.float64)
        placed = placed_table(option, place.ranks)
        held = torch.zeros(self.ranks, dtype=torch.float64)
        held[list(place.ranks)] = 1
        owner = place.ranks[0]
        other = (owner + 1) % self.ranks
        exchanged = torch.zeros(self.ranks, len(COLLECTIVES), 2, dtype=torch.float64)
        for at, name in enumerate(COLLECTIVES):
            # Each rank sends inputs and gradients to each rank with a shard, which sends pooled rows back.
            source, to = (owner, other) if name in OUTPUTS else (other, owner)
            size = placed.message_bytes(name, source, to, option.batch_size, 4) * library_factor(name, self._device)
            sends, receives = size * (self._ms_per_byte @ held), size * held * self._ms_per_byte.sum(1)
            outward = (receives, sends) if name in OUTPUTS else (sends, receives)
            exchanged[:, at, 0], exchanged[:, at, 1] = outward
        self._known[table, place] = (lookups, exchanged, memory)
        return self._known[table, place]


def placed_table(option: ShardingOption, ranks: tuple[int, ...]) -> PlacedTable:
    """Returns the table of an option for :func:`rank_traffic`.

    Args:
        option: An option of a pooled table, table-wise or row-wise.
        ranks: The rank of each shard.
    """
    return PlacedTable(
        sharding_type=option.sharding_type,
        ranks=ranks,
        dim=option.tensor.shape[1],
        features=len(option.input_lengths),
        ids_per_sample=sum(option.input_lengths),
        weighted=bool(option.is_weighted),
    )
