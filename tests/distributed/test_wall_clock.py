"""Expiry after a time on several ranks: all read one clock, so that the column shards
of a row expire together.
"""

from __future__ import annotations

import itertools
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor

from torchrec_recstore import (
    Expiry,
    RecStoreConstraints,
    RecStoreWarning,
    TableOptions,
    load_checkpoint,
    read_info,
    save_checkpoint,
    set_time,
    table_stats,
)
from torchrec_recstore.checkpoint.save import async_save
from torchrec_recstore.sharders import agreed_clock
from torchrec_recstore.sharders.agreed_clock import AgreedClock

from .reference import Case
from .test_bounded_tables import (
    COLUMN,
    GRID,
    ROW,
    TABLE,
    bags,
    batch_of,
    build,
    check_shards,
    describe,
    gathered,
    planned,
    rows,
)
from .test_bounded_tables import train_step as step_of
from .workers import run_on_ranks

START, DAY = 1_700_000_000.0, 86_400.0
NONE = KeyedJaggedTensor.from_lengths_sync(
    ["t0", "t1"], torch.empty(0, dtype=torch.int64), torch.zeros(2).int()
)


def expiring(seconds: float) -> TableOptions:
    return TableOptions(expiry=Expiry(seconds=seconds))


def by_the_events(rank: int, world_size: int, directory: Path) -> None:
    """The ranks read different parts of a log.

    The latest time of all counts, and a restored run is the same.
    """
    for config, sharding_type in ((bags(), COLUMN), (bags(), GRID), (rows(), ROW)):
        model, shards = build(config, sharding_type, expiring(6), world_size)
        resumed, fresh = build(config, sharding_type, expiring(6), world_size)
        last_seen: dict[int, float] = {}
        for step in range(30):
            now = START + step + (0.25 if rank else 0.0) - (3 if step % 7 == 3 else 0)
            for each in (model, resumed):
                set_time(each, now)
                step_of(each, batch_of(config, step, rank))
            if step in (4, 17):
                path = directory / f"{sharding_type}-{step}"
                save_checkpoint(resumed, path)
                resumed, fresh = build(config, sharding_type, expiring(6), world_size)
                load_checkpoint(resumed, path)
            times = gathered(
                [shard.state().times or () for shard in shards], world_size
            )
            assert len({tuple(each) for of_rank in times for each in of_rank}) == 1
            for one, other in zip(shards, fresh, strict=True):
                assert one.state().times == other.state().times
                assert torch.equal(one.ids(), other.ids())
                found = one.read_rows(one.ids()), other.read_rows(other.ids())
                assert all(
                    torch.equal(found[0][key], found[1][key]) for key in found[0]
                )
            for r in range(world_size):
                last_seen.update(
                    dict.fromkeys(
                        batch_of(config, step, r).values().tolist(), START + step + 0.25
                    )
                )
            stats = table_stats(model)["t"]
            at = times[0][0][1] / 1e6
            assert sum(at - then <= 6 for then in last_seen.values()) <= stats.rows
            assert stats.rows <= sum(at - then <= 9 for then in last_seen.values())
            check_shards(
                gathered([describe(shard) for shard in shards], world_size),
                sharding_type,
                stats,
            )
        assert stats.expired > 50


def by_the_system(rank: int, world_size: int, directory: Path) -> None:
    """The clocks of the ranks differ by hours, and all read the clock of the first
    rank.
    """
    passed = 0.0
    exchanges = []

    def clock() -> float:
        exchanges.append(passed)
        return START + passed + 5000 * rank

    real, agreed_clock.time = (
        agreed_clock.time,
        type("Clock", (), {"time": staticmethod(clock)}),
    )
    try:
        model, shards = build(bags(), COLUMN, expiring(60), world_size)
        for step in range(600):
            passed += 0.25 if step < 400 else 2.0  # the steps become slower
            step_of(
                model, batch_of(bags(), step // 50, rank) if step % 50 == 0 else NONE
            )
            if step % 40 == 7:
                times = gathered(
                    [shard.state().times or () for shard in shards], world_size
                )
                ticks = {(each[0], *each[2:]) for of_rank in times for each in of_rank}
                assert len(ticks) == 1
                assert all(
                    START <= tick / 1e6 <= START + passed
                    for tick in next(iter(ticks))[7::2]
                )
                of_ranks = gathered([describe(shard) for shard in shards], world_size)
                check_shards(of_ranks, COLUMN, table_stats(model)["t"])
        assert table_stats(model)["t"].expired > 50
        # The first 400 steps exchange the time about every eighth step, and the slower
        # ones in each step.
        assert 200 <= len(exchanges) < 300
    finally:
        agreed_clock.time = real
    info = save_checkpoint(model, directory / "by-the-system")
    saved = read_info(info.path).tables["t"].times
    assert saved is not None
    assert saved[0] == 0  # the times are not those of the events
    wide, _ = build(bags(), TABLE, expiring(60), world_size)
    load_checkpoint(wide, info.path)
    assert table_stats(wide)["t"].rows == table_stats(model)["t"].rows
    step_of(wide, NONE)  # The clock of the system is years ahead.
    step_of(wide, NONE)
    assert table_stats(wide)["t"].rows == 0


def one_bad_rank(rank: int, world_size: int, directory: Path) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", RecStoreWarning)
        names = with_one_bad_rank(rank, world_size, directory)
    found = [
        re.match(
            r"table '(\w)': set_time has refused the time .* \((\d+) refused",
            str(w.message),
        )
        for w in told
    ]
    # Both of the models warn. 't' has its tenth refusal after the jump.
    wanted = sorted([(name, "1") for name in names] + [("t", "10")] * ("t" in names))
    assert sorted(match.groups() for match in found if match) == sorted(2 * wanted)


def with_one_bad_rank(rank: int, world_size: int, directory: Path) -> set[str]:
    """The times of one rank are wrong, and later all times jump.

    The clocks are the same on all ranks in each step.
    """
    constraints = {
        name: RecStoreConstraints(
            sharding_types=[kind],
            options=TableOptions(expiry=Expiry(seconds=6, max_jump_s=max_jump_s)),
        )
        for name, kind, max_jump_s in (("t", ROW, None), ("u", TABLE, 100.0))
    }
    configs = [bags("t"), bags("u")]
    model, shards = planned(
        Case(configs).collection(configs, "meta"), constraints, world_size
    )
    resumed, fresh = planned(
        Case(configs).collection(configs, "meta"), constraints, world_size
    )
    last = world_size - 1
    for step in range(60):
        good = START + step / 2 + 50.0 * (step >= 45)
        away = {5: -30 * DAY, 20: 30 * DAY, 21: 30 * DAY, 22: 30 * DAY}.get(step, 0.0)
        batch = KeyedJaggedTensor.concat(
            [batch_of(config, step, rank) for config in configs]
        )
        for each in (model, resumed):
            set_time(each, good + (away if rank == last else 0.25))
            step_of(each, batch)
        if step in (21, 50):  # The tenth time in a row is still to come.
            save_checkpoint(resumed, directory / f"refused-{step}")
            resumed, fresh = planned(
                Case(configs).collection(configs, "meta"), constraints, world_size
            )
            load_checkpoint(resumed, directory / f"refused-{step}")
        assert [shard.state().times or () for shard in shards] == [
            shard.state().times or () for shard in fresh
        ]
        assert all(
            torch.equal(one.ids(), other.ids())
            for one, other in zip(shards, fresh, strict=True)
        )
        of_ranks = gathered(
            {shard.name: shard.state().times or () for shard in shards}, world_size
        )
        for name in constraints:
            found = {tuple(times[name]) for times in of_ranks if name in times}
            assert len(found) == 1
            _, now, _, ahead, *_ = found.pop()
            stands = name == "t" and 45 <= step < 54
            if world_size > 1 or step not in (5, 20, 21, 22):
                # The clock has the latest time. It jumps to the nearest one.
                latest = 0.25 if world_size > 1 and (step, name) != (54, "t") else 0.0
                assert (now - ahead) / 1e6 == (
                    START + 44 / 2 if stands else good
                ) + latest, (step, name)
    stats = table_stats(model)
    assert {name: each.refused_times for name, each in stats.items()} == {
        "t": 4 + 9,
        "u": 4,
    }
    assert stats["t"].expired > 50
    return {shard.name for shard in shards}


def refused_on_every_rank(rank: int, world_size: int) -> None:
    model, shards = build(bags(), ROW, expiring(60), world_size)
    with pytest.raises(TypeError, match="unix_seconds must be a number, got str"):
        set_time(model, "now" if rank == 1 else START)  # type: ignore[arg-type]
    assert not any((shard.state().times or (1,))[0] for shard in shards)
    step_of(model, batch_of(bags(), 0, rank))
    set_time(model, START + rank)  # years before the time of the system
    last = START + world_size - 1
    times = [shard.state().times or () for shard in shards]
    assert all((now - ahead) / 1e6 == last for _, now, _, ahead, *_ in times)


def all_of_it(rank: int, world_size: int) -> None:
    directories = [tempfile.mkdtemp()]
    dist.broadcast_object_list(directories)
    by_the_events(rank, world_size, Path(directories[0]))
    by_the_system(rank, world_size, Path(directories[0]))
    one_bad_rank(rank, world_size, Path(directories[0]))
    refused_on_every_rank(rank, world_size)


@pytest.mark.slow
def test_two_ranks() -> None:
    run_on_ranks(2, all_of_it)


@pytest.mark.usefixtures("one_rank")
def test_one_rank(tmp_path: Path) -> None:
    by_the_events(0, 1, tmp_path)
    one_bad_rank(0, 1, tmp_path)


@pytest.mark.usefixtures("one_rank")
def test_checkpoints_have_times_only_where_rows_expire_by_them(tmp_path: Path) -> None:
    for name, options in (
        ("steps", TableOptions(expiry=Expiry(5))),
        ("seconds", expiring(5)),
    ):
        model, _ = build(bags(), TABLE, options, 1)
        set_time(model, START)
        step_of(model, batch_of(bags(), 0, 0))
        async_save(model, tmp_path / name).wait()
        micros = int(START * 1e6)
        times = (1, micros, 0, 0, 0, 0, 0, 1, micros) if name == "seconds" else None
        assert read_info(tmp_path / name).tables["t"].times == times
    for one, other in (("steps", "seconds"), ("seconds", "steps")):
        options = expiring(5) if other == "seconds" else TableOptions(expiry=Expiry(5))
        model, shards = build(bags(), TABLE, options, 1)
        load_checkpoint(model, tmp_path / one)
        assert len(shards[0]) > 0
        # the age of the rows counts from the load
        times = shards[0].state().times or ()
        assert len(times) == (7 if other == "seconds" else 0)


def test_the_exchanges_are_as_rare_as_the_time_allows() -> None:
    """Whatever the pace of the steps is, the exchanges are close enough, and the steps
    between them grow slowly.
    """

    class Clock(AgreedClock):
        now = START

        def agree(self) -> None:
            last = self._pace._last
            super().agree()
            if self._pace._last is not last:
                agreed.append(self.now)

    for pace in (0.0001, 0.01, 1.0, 500.0):
        agreed: list[float] = []
        clock = Clock(_env(), 320, ())
        real, agreed_clock.time = (
            agreed_clock.time,
            type("Now", (), {"time": staticmethod(lambda: Clock.now)}),
        )  # type: ignore[assignment]
        try:
            Clock.now = START
            for _ in range(3000):
                Clock.now += pace
                clock.begin_step()
        finally:
            agreed_clock.time = real
        gaps = [after - before for before, after in itertools.pairwise(agreed)]
        assert max(gaps) <= max(20.0, pace)
        assert len(agreed) <= 3000 * pace / 10 + 15 or pace > 10


def _env() -> Any:
    from torchrec.distributed.types import ShardingEnv

    return ShardingEnv.from_local(world_size=1, rank=0)
