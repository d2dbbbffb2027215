"""Tables go on, to the bit, as tables that never moved: each state on each road, and on
each pair of roads.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, cycle, pairwise, product
from pathlib import Path

import pytest

from torchrec_recstore.optim import Adam
from torchrec_recstore.utils import RecStoreWarning

from .groups import GROUPS, MOST_ROADS, Group, State, build, shards_of, train
from .journeys import Journey, Layout, travel
from .roads import ROADS

WORLDS = (1, 4, 4, 2, 1, 1, 2, 2, 4)
"""Numbers of ranks: each follows each of them in this circle."""
SHARDINGS = ("table_wise", "row_wise", "column_wise", "hash")
SAMPLE = (2, 1)
"""The numbers of ranks of the journeys that ``make test`` makes."""
WITH_BOUNDS = ("options", "half")
GROUPS_OF_OPTIMIZERS = [name for name in GROUPS if name != "options"]


def layouts(
    number: int, worlds: Sequence[int], roads: tuple[str, ...]
) -> tuple[Layout, ...]:
    """Returns the layouts of a journey.

    The shardings go round with ``number``; each differs from the one before. The
    numbers of ranks go round with the roads that lead to other processes.
    """
    numbers = cycle(worlds)
    found = [(next(numbers), SHARDINGS[number % 4])]
    for place, name in enumerate(roads):
        road, (world, sharding) = ROADS[name], found[-1]
        step = 1 + (number // 4 + place) % 3
        found.append(
            (
                world if road.same_process else next(numbers),
                (
                    sharding
                    if road.same_layout
                    else SHARDINGS[(SHARDINGS.index(sharding) + step) % 4]
                ),
            )
        )
    return tuple(found)


def roads_from(number: int, *steps: int) -> tuple[str, ...]:
    """Returns the road of a number, and further ones, each some steps after the road
    before it in the circle of all roads.
    """
    names = list(ROADS)
    places = accumulate(steps, initial=number)
    return tuple(names[place % len(names)] for place in places)


def parts_of(group: str, way: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Returns a way in parts that are as short as the bounds of a group's tables need."""
    return [way[:4], way[4:]] if group in WITH_BOUNDS else [way]


def journeys(road: str) -> list[Journey]:
    """Returns the journeys that begin with a road.

    Two of the options: their roads follow each other with each distance in the circle
    of the roads, so that those of all roads have each pair. The other groups, which
    differ by the optimizer, take all roads; servers run no code of clients, so that
    one group does not take theirs.
    """
    number = list(ROADS).index(road)
    # Found by trying, so that each road has each change of the number of ranks.
    first = 4 * number % len(WORLDS)
    worlds = WORLDS[first:] + WORLDS[:first]
    ways = [
        ("options", roads_from(number, 3, 0, 1, 2)),
        ("options", roads_from(number, 5, 6, 4)),
    ]
    for place, group in enumerate(GROUPS_OF_OPTIMIZERS[number :: len(ROADS)]):
        way = roads_from(number, *[2**place] * (len(ROADS) - 1))
        if group == "own":
            way = tuple(name for name in way if name != "servers")
        ways.extend((group, part) for part in parts_of(group, way))
    return [
        Journey(group, layouts(number + 5 * place, worlds, way), way)
        for place, (group, way) in enumerate(ways)
    ]


def test_a_sample(tmp_path: Path) -> None:
    """Each road once, with states of another type."""
    way = roads_from(3, *[1] * (len(ROADS) - 1))
    some = [
        Journey("half", layouts(place, SAMPLE, part), part)
        for place, part in enumerate(parts_of("half", way))
    ]
    travel(some, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("road", ROADS)
def test_all(road: str, tmp_path: Path) -> None:
    travel(journeys(road), tmp_path)


def test_the_journeys_have_each_pair_of_roads_and_each_group() -> None:
    every = [journey for road in ROADS for journey in journeys(road)]
    pairs = {
        pair
        for journey in every
        for pair in pairwise(journey.roads)
        if journey.group == "options"
    }
    assert pairs == set(product(ROADS, ROADS))
    each = {(journey.group, road) for journey in every for road in journey.roads}
    assert each == set(product(GROUPS, ROADS)) - {("own", "servers")}
    moves = [
        (road, before, after)
        for journey in every
        for road, (before, after) in zip(
            journey.roads, pairwise(journey.layouts), strict=True
        )
    ]
    assert {(road, before[0], after[0]) for road, before, after in moves} == {
        (road, before, after)
        for road, before, after in product(ROADS, set(WORLDS), set(WORLDS))
        if before == after or not ROADS[road].same_process
    }
    assert (
        len({(before[1], after[1]) for _, before, after in moves})
        == len(SHARDINGS) ** 2
    )


def test_the_longest_journey_with_bounds() -> None:
    every = [journey for road in ROADS for journey in journeys(road)]
    lengths = [len(journey.roads) for journey in every if journey.group in WITH_BOUNDS]
    assert max(lengths) == MOST_ROADS


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
