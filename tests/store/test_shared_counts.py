"""What admission has counted in any number of shards is divided and merged id by id,
and admits nobody by mistake.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from torchrec_recstore.options import MinFrequency, TableOptions
from torchrec_recstore.store import Table, TableState


def tables(shards: int, counter_bytes: int) -> list[Table]:
    options = TableOptions(admission=MinFrequency(2, counter_bytes))
    return [Table(4, options=options, shard=shard) for shard in range(shards)]


def see(shards: Sequence[Table], ids: Tensor) -> None:
    for number, table in enumerate(shards):
        table.lookup(ids[ids % len(shards) == number], train=True)


def moved(shards: Sequence[Table], count: int, counter_bytes: int) -> list[Table]:
    """Returns other shards with the state and the rows of the shards."""
    state = TableState.merged(table.state() for table in shards)
    fresh = tables(count, counter_bytes)
    for number, table in enumerate(fresh):
        owned = lambda ids, number=number: ids % count == number  # noqa: E731
        table.set_state(state.owned(owned))
        for old in shards:
            for part in old.parts():
                table.write(part.owned(owned))
    return fresh


def rows(shards: Sequence[Table]) -> int:
    return sum(len(table) for table in shards)


@pytest.mark.parametrize(
    "shards",
    [
        1,
        pytest.param(2, marks=pytest.mark.slow),
        pytest.param(4, marks=pytest.mark.slow),
        7,
        pytest.param(16, marks=pytest.mark.slow),
    ],
)
def test_new_ids_that_are_seen_once_get_no_rows_after_a_merge(shards: int) -> None:
    """With counters that have room for a part of the ids, and with counters that have
    room for all of them.
    """
    for counter_bytes in (2**16, 2**23):
        before = tables(shards, counter_bytes)
        rng = torch.Generator().manual_seed(0)
        for _ in range(10):
            see(before, torch.randint(0, 2**62, (20_000,), generator=rng))
        assert rows(before) == 0
        (one,) = merged = moved(before, 1, counter_bytes)
        see(merged, torch.randint(-(2**62), 0, (100_000,), generator=rng))
        assert len(one) == 0


def test_from_1_to_16_to_1_to_7_shards_admission_goes_on_as_if_nothing_had_moved() -> (
    None
):
    counter_bytes = 2**22
    undisturbed, shards = tables(1, counter_bytes), tables(1, counter_bytes)
    rng = torch.Generator().manual_seed(0)
    admitted = []
    for count in (16, 1, 7):
        for _ in range(3):
            ids = torch.randint(0, 60_000, (8_000,), generator=rng)
            see(undisturbed, ids)
            see(shards, ids)
        admitted.append(rows(shards))
        assert admitted[-1] == len(undisturbed[0])
        shards = moved(shards, count, counter_bytes)
    assert 0 < admitted[0] < admitted[1] < admitted[2]
    see(undisturbed, torch.arange(60_000))
    see(shards, torch.arange(60_000))
    assert torch.equal(
        torch.cat([table.ids() for table in shards]).sort().values, undisturbed[0].ids()
    )


def test_a_counter_without_room_for_all_forgets_the_older_ones() -> None:
    """Of two full counters, the one that gets both remembers as many ids as it has room
    for, and the newest first.
    """
    counter_bytes = 2**12
    generation = counter_bytes // 128 * 6
    before = tables(2, counter_bytes)
    old, new = torch.arange(2 * generation), torch.arange(2 * generation) + 10**9
    see(before, old)
    see(before, new[: generation // 2])
    merged = moved(before, 1, counter_bytes)
    see(merged, torch.cat([old, new[: generation // 2]]))
    assert rows(merged) > generation // 2
    assert bool(merged[0].contains(new[: generation // 2]).all())
