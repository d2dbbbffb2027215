"""Tables go on, to the bit, as tables that never moved: each state on each road, and on
each pair of roads.
"""

from __future__ import annotations

from itertools import count, product
from pathlib import Path

import pytest

from torchrec_recstore.optim import Adam
from torchrec_recstore.utils import RecStoreWarning

from .groups import GROUPS, Group, State, build, shards_of, train
from .journeys import Journey, Layout, travel
from .roads import ROADS

WORLDS = (1, 2, 4)
SHARDINGS = ("table_wise", "row_wise", "column_wise", "hash")
SAMPLE = (2, 1, 2)
"""The numbers of ranks of the journeys that ``make test`` makes."""


def layouts(
    number: int, worlds: tuple[int, ...], roads: tuple[str, ...]
) -> tuple[Layout, ...]:
    """Returns the layouts of a journey.

    The shardings go round with ``number``; each differs from the one before.
    """
    found = [(worlds[0], SHARDINGS[number % 4])]
    for place, name in enumerate(roads):
        road, (world, sharding) = ROADS[name], found[-1]
        step = 1 + (number // 4 + place) % 3
        found.append(
            (
                world if road.same_process else worlds[place + 1],
                (
                    sharding
                    if road.same_layout
                    else SHARDINGS[(SHARDINGS.index(sharding) + step) % 4]
                ),
            )
        )
    return tuple(found)


def groups_of(road: str) -> list[str]:
    """Returns the groups that differ by the optimizer and can take a road: servers run
    no code of clients.
    """
    return [
        name
        for name in GROUPS
        if name != "options" and (name, road) != ("own", "servers")
    ]


def journeys(road: str) -> list[Journey]:
    """Returns the journeys that begin with a road.

    A road within a process has each number of ranks. Three other roads together have
    each change of it.
    """
    number = sorted(ROADS).index(road)
    numbers = count(number)
    found = [
        Journey(
            "options",
            layouts(next(numbers), (WORLDS[first], WORLDS[second]), (road,)),
            (road,),
        )
        for first, second in product(range(3), range(3))
        if (
            first == second
            if ROADS[road].same_process
            else (first + second) % 3 == number % 3
        )
    ]
    for group, worlds in zip(groups_of(road), product(WORLDS, repeat=3), strict=False):
        found.append(Journey(group, layouts(next(numbers), worlds, (road,)), (road,)))
    for other, worlds in zip(ROADS, product(WORLDS, repeat=3), strict=False):
        found.append(
            Journey(
                "options",
                layouts(next(numbers), worlds[::-1], (road, other)),
                (road, other),
            )
        )
    return found


@pytest.mark.parametrize("road", ROADS)
def test_a_sample(road: str, tmp_path: Path) -> None:
    """Each road with each state once; the group of the options goes on over another
    road.
    """
    numbers = count(sorted(ROADS).index(road))
    names = list(ROADS)
    pair = (road, names[(names.index(road) + 3) % len(names)])
    groups = groups_of(road)
    group = groups[2 * names.index(road) % len(groups)]
    some = [
        Journey("options", layouts(next(numbers), SAMPLE, pair), pair),
        Journey(group, layouts(next(numbers), SAMPLE, (road,)), (road,)),
    ]
    travel(some, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("road", ROADS)
def test_all(road: str, tmp_path: Path) -> None:
    travel(journeys(road), tmp_path)


def test_the_journeys_have_each_pair_of_roads_and_each_group() -> None:
    every = [journey for road in ROADS for journey in journeys(road)]
    assert {journey.roads for journey in every if len(journey.roads) == 2} == set(
        product(ROADS, ROADS)
    )
    each = {(group, road) for road in ROADS for group in ("options", *groups_of(road))}
    assert {(journey.group, journey.roads[0]) for journey in every} == each
    moves = {(journey.layouts[0], journey.layouts[1]) for journey in every}
    assert {(before[0], after[0]) for before, after in moves} == set(
        product(WORLDS, WORLDS)
    )
    assert (
        len({(before[1], after[1]) for before, after in moves}) == len(SHARDINGS) ** 2
    )


@pytest.mark.usefixtures("one_rank")
def test_accumulation_under_way(tmp_path: Path) -> None:
    """Gradients that wait for an update take no road: saves warn, a move in place is
    refused, a load drops them.
    """
    group = Group({"plain": State()}, Adam(lr=0.01))
    model, other = (
        build(group, "table_wise", "", accumulation_steps=3),
        build(group, "hash", ""),
    )
    train(model, group, range(4))
    saving = (
        "table 'plain': the gradients of 1 backward passes .* not saved: .* multiple of"
        " accumulation_steps"
    )
    for name in ("checkpoint", "dcp"):
        with pytest.warns(RecStoreWarning, match=saving):
            ROADS[name].leave(model, tmp_path / name)
    with pytest.raises(
        ValueError,
        match=r"'plain': the gradients of 1 .* after a multiple of accumulation_steps",
    ):
        ROADS["reshard"].arrive(other, tmp_path, model)
    ROADS["checkpoint"].arrive(model, tmp_path / "checkpoint", None)
    train(model, group, range(4, 7))  # one update, of these three passes
    (_, shard), *_ = shards_of(model)
    assert shard.table.optimizer_steps == 2
    ROADS["reshard"].arrive(other, tmp_path, model)
