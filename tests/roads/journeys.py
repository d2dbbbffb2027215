"""Takes models along roads, and compares each of their shards with a table that never
moved.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import torch

from tests.distributed.workers import run_on_ranks
from torchrec_recstore.store import Table

from .groups import (
    GROUPS,
    LAST_STEPS,
    LEG_STEPS,
    Group,
    build,
    replay,
    shards_of,
    train,
    undisturbed,
)
from .roads import ROADS

Layout = tuple[int, str]
"""The number of ranks, and the sharding."""


@dataclass(frozen=True)
class Journey:
    """A group, the layouts that it has one after the other, and the roads between them.

    Args:
        group: The name of the group.
        layouts: The layouts, one more than roads.
        roads: The names of the roads.
    """

    group: str
    layouts: tuple[Layout, ...]
    roads: tuple[str, ...]

    def __str__(self) -> str:
        steps = [f"{world}x{sharding}" for world, sharding in self.layouts]
        way = "".join(
            f" -{road}-> {step}"
            for road, step in zip(self.roads, steps[1:], strict=True)
        )
        return f"{self.group}: {steps[0]}{way}"


def travel(journeys: Sequence[Journey], path: Path) -> None:
    """Makes the journeys. Legs on the same number of ranks run in the same processes.

    The tables are compared after each road, and after further steps at the end.

    Raises:
        AssertionError: A table differs from one that never moved. The message names the
            journey.
    """
    legs = []
    for number, journey in enumerate(journeys):
        first, stage = 0, 0
        for last, name in enumerate((*journey.roads, None)):
            if name is None or not ROADS[name].same_process:
                legs.append((stage, journey.layouts[first][0], number, first, last))
                first, stage = last + 1, stage + 1
    legs.sort()
    for (_, world), some in groupby(legs, key=lambda leg: leg[:2]):
        parts = [
            (journeys[number], number, first, last)
            for _, _, number, first, last in some
        ]
        run_on_ranks(world, partial(_legs, parts=parts, path=path))


def _legs(
    rank: int,
    world_size: int,
    *,
    parts: Sequence[tuple[Journey, int, int, int]],
    path: Path,
) -> None:
    failed = []
    for journey, number, first, last in parts:
        try:
            _leg(journey, first, last, path / str(number))
        except Exception:
            failed.append(f"{journey}, from layout {first}:\n{traceback.format_exc()}")
            break  # The other ranks of a failed collective would wait in the next one.
    assert not failed, "\n".join(failed)


def _leg(journey: Journey, first: int, last: int, path: Path) -> None:
    """Makes the part of a journey from one load to the next save."""
    group = GROUPS[journey.group]
    path.mkdir(parents=True, exist_ok=True)
    model = build(group, journey.layouts[first][1], str(path / "cold"))
    if first:
        # The rows that are there before a load must leave.
        train(model, group, range(900, 903))
        model = ROADS[journey.roads[first - 1]].arrive(
            model, path / f"road-{first - 1}", None
        )
        compare_now(model, group, first * LEG_STEPS)
    for place in range(first, last + 1):
        if place > first:
            fresh = build(group, journey.layouts[place][1], str(path / "cold"))
            train(fresh, group, range(900, 903))
            model = ROADS[journey.roads[place - 1]].arrive(fresh, path, model)
            compare_now(model, group, place * LEG_STEPS)
        if place < len(journey.roads):
            road = ROADS[journey.roads[place]]
            road.prepare(model, path / f"road-{place}")
            train(model, group, range(place * LEG_STEPS, (place + 1) * LEG_STEPS))
            road.leave(model, path / f"road-{place}")
    if last == len(journey.roads):
        compare(model, group, last * LEG_STEPS)


def compare_now(model: torch.nn.Module, group: Group, steps: int) -> list[Table]:
    """Compares the shards with tables that never moved, and returns these tables."""
    tables = []
    for name, shard in shards_of(model):
        table = undisturbed(shard, name, group.tables[name], range(steps))
        _assert_same(
            shard.table, table, f"{name}, {shard.table.columns}, after step {steps}"
        )
        tables.append(table)
    return tables


def compare(model: torch.nn.Module, group: Group, steps: int) -> None:
    """Compares the shards with tables that never moved, now and after further steps."""
    shards = shards_of(model)
    tables = compare_now(model, group, steps)
    before = [
        (shard.table.stats(), table.stats())
        for (_, shard), table in zip(shards, tables, strict=True)
    ]
    last = range(steps, steps + LAST_STEPS)
    train(model, group, last)
    for (name, shard), table, (old, its_old) in zip(
        shards, tables, before, strict=True
    ):
        for step in last:
            replay(table, shard, name, group.tables[name], step)
        what = f"{name}, {shard.table.columns}, {LAST_STEPS} steps after the last road"
        _assert_same(shard.table, table, what)
        now, its_now = shard.table.stats(), table.stats()
        counts = ["lookups", "inserts", "refused", "expired", "updates", "steps"]
        # Which rows of a table with a cold store are in memory depends on the order in
        # which they came.
        counts += ["evicted"] if shard.table.options.cold_store is None else []
        for count in counts if shard.table.options.cold_store is None else counts[:1]:
            difference = (
                getattr(now, count) - getattr(old, count),
                getattr(its_now, count) - getattr(its_old, count),
            )
            assert difference[0] == difference[1], (what, count, difference)


def _assert_same(table: Table, other: Table, what: str) -> None:
    ids = other.ids()
    assert torch.equal(table.ids(), ids), (what, len(table.ids()), len(ids))
    rows, wanted = table.read_rows(ids), other.read_rows(ids)
    for key, value in wanted.items():
        assert torch.equal(rows[key].view(torch.uint8), value.view(torch.uint8)), (
            what,
            key,
        )
    state, its_state = table.state(), other.state()
    assert (state.steps, state.optimizer_steps) == (
        its_state.steps,
        its_state.optimizer_steps,
    ), what
    assert (state.times or ())[:1] == (its_state.times or ())[:1], what
    assert (state.times or ())[1:] == (its_state.times or ())[1:], (
        what,
        state.times,
        its_state.times,
    )
    if its_state.sightings is not None:
        assert state.sightings is not None, what
        for key, found, value in zip(
            its_state.sightings._fields,
            state.sightings,
            its_state.sightings,
            strict=True,
        ):
            assert torch.equal(found, value), (what, key)
