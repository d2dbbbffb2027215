"""Forecasts: what a plan means for each rank, against real tables and against all other
plans.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from torchrec_recstore import SGD, Adam, RowWiseAdagrad
from torchrec_recstore.options import TableOptions
from torchrec_recstore.planner import TableStatistics
from torchrec_recstore.planner.forecast_inputs import ForecastTable, Machines
from torchrec_recstore.planner.forecasts import Forecast, forecast
from torchrec_recstore.planner.traffic import PlacedTable, milliseconds, rank_traffic
from torchrec_recstore.store import Table

BATCH = 512
MACHINES = Machines(4, 10**11, 10**9, 10**8)
TABLE = ForecastTable(16, RowWiseAdagrad(lr=0.1))
MEASURED = TableStatistics(
    rows=20_000, rows_per_step=2.0, ids_per_sample=(1.0,), ns_per_id=200.0
)


def of_tables(
    machines: Machines, ranks: int, steps: int = 0, **tables: TableStatistics
) -> Forecast:
    return forecast(dict.fromkeys(tables, TABLE), tables, machines, ranks, BATCH, steps)


def test_one_rank() -> None:
    found = of_tables(MACHINES, 1, t=replace(MEASURED, ids_per_sample=(1.0, 3.0)))
    (rank,) = found.ranks
    assert rank.lookups_ms == pytest.approx(BATCH * 4 * 200e-6)
    assert (rank.network_ms, rank.sent_bytes, rank.received_bytes) == (0, 0, 0)
    assert (found.limit, rank.limit, found.step_ms) == (
        "lookups",
        "lookups",
        rank.step_ms,
    )
    assert rank.memory_bytes == rank.memory_later_bytes
    (table,) = found.tables
    assert (table.sharding_type, table.ranks, table.rows, table.rows_later) == (
        "table_wise",
        (0,),
        20_000,
        20_000,
    )


def test_memory_is_that_of_real_tables() -> None:
    """The memory of a real table is within 10 % of the forecast, now and after the
    growth.
    """
    config = replace(TABLE, dim=64)
    found = forecast({"t": config}, {"t": MEASURED}, MACHINES, 1, BATCH, steps=10_000)
    table = Table(64, optimizer=config.optimizer)
    for count, stated in (
        (20_000, found.ranks[0].memory_bytes),
        (40_000, found.ranks[0].memory_later_bytes),
    ):
        ids = torch.arange(count)
        table.update(ids, torch.ones(count, 64))
        assert table.stats().rows == count
        assert stated == pytest.approx(table.stats().bytes, rel=0.1)


def test_bytes_and_network() -> None:
    """The table is too large for one rank, and is therefore split by rows."""
    machines = replace(MACHINES, memory_per_rank_bytes=1_500_000)
    statistics = {"t": replace(MEASURED, ids_per_sample=(2.0, 1.0))}
    found = of_tables(machines, 2, **statistics)
    assert {table.sharding_type for table in found.tables} == {"row_wise"}
    placed = [PlacedTable("row_wise", (0, 1), 16, 2, 3.0)]
    for rank in found.ranks:
        traffic = rank_traffic(placed, rank.rank, 2, BATCH)
        assert rank.sent_bytes == sum(each.sent for each in traffic)
        assert rank.received_bytes == sum(each.received for each in traffic)
        (sums,) = (each.sent for each in traffic if each.collective == "partial sums")
        assert sums == 2 * BATCH * 16 * 4
        # gloo sends partial sums twice
        assert rank.network_ms == pytest.approx((rank.sent_bytes + sums) / 1e6)
    slow = of_tables(replace(machines, within_host_bytes_per_s=1e6), 2, **statistics)
    assert slow.ranks[0].network_ms == pytest.approx(1000 * found.ranks[0].network_ms)
    assert slow.ranks[0].limit == "network"


def test_memory_limits() -> None:
    """The fastest plan has one table on a rank.

    It does not fit there after the growth, and is split by rows.
    """
    machines = replace(
        MACHINES, memory_per_rank_bytes=2_700_000, within_host_bytes_per_s=1e7
    )
    now = of_tables(machines, 2, a=MEASURED, b=MEASURED)
    assert {table.sharding_type for table in now.tables} == {"table_wise"}
    assert now.limit == "network"
    grown = of_tables(
        machines, 2, steps=5_000, a=MEASURED, b=replace(MEASURED, rows_per_step=0.0)
    )
    assert [table.rows_later for table in grown.tables] == [30_000, 20_000]
    assert grown.limit == "memory"
    assert grown.boundless_step_ms == pytest.approx(now.step_ms)
    assert all(rank.memory_later_bytes <= 2_700_000 for rank in grown.ranks)
    with pytest.raises(ValueError, match=r"the tables need at least .* of host memory"):
        of_tables(machines, 2, steps=10_000, a=MEASURED, b=MEASURED)


def every_plan(
    tables: dict[str, ForecastTable], ranks: int
) -> Iterator[dict[str, tuple[int, ...]]]:
    """Every plan of table-wise and row-wise tables: the ranks of each table."""
    everywhere = tuple(range(ranks))
    for places in itertools.product(
        [*((rank,) for rank in everywhere), everywhere], repeat=len(tables)
    ):
        yield dict(zip(tables, places, strict=True))


def step_ms(
    places: dict[str, tuple[int, ...]],
    tables: dict[str, ForecastTable],
    statistics: dict[str, TableStatistics],
    machines: Machines,
    ranks: int,
) -> float:
    """The step of the slowest rank of a plan, from the statistics alone."""
    lookups = [0.0] * ranks
    placed = []
    for name, at in places.items():
        measured, ids = statistics[name], sum(statistics[name].ids_per_sample or ())
        of_all = ranks * BATCH * ids * (measured.ns_per_id or 0) / 1e6
        hottest = measured.hottest_share or 0
        for rank in at:
            lookups[rank] += of_all * (1 / len(at) + hottest * (1 - 1 / len(at)))
        features = len(measured.ids_per_sample or ())
        placed.append(
            PlacedTable(
                "table_wise" if len(at) == 1 else "row_wise",
                at,
                tables[name].dim,
                features,
                ids,
            )
        )
    on_host = min(ranks, machines.ranks_per_host)
    types = {table.sharding_type for table in placed}
    return sum(machines.sharding_type_ms[kind] for kind in types) + max(
        ms
        + sum(
            milliseconds(each, *machines.bytes_per_ms, "cpu")
            for each in rank_traffic(placed, rank, ranks, BATCH, on_host)
        )
        for rank, ms in enumerate(lookups)
    )


@pytest.mark.parametrize(
    ("ranks", "ranks_per_host", "bandwidth"),
    [
        (2, 2, 1e9),
        (2, 2, 1e10),
        (2, 1, 1e9),
        pytest.param(4, 4, 1e9, marks=pytest.mark.slow),
        pytest.param(4, 2, 3e9, marks=pytest.mark.slow),
    ],
)
def test_the_plan_is_near_the_best_of_all(
    ranks: int, ranks_per_host: int, bandwidth: float
) -> None:
    """The slowest rank is within 10 % of the best of all table-wise and row-wise plans,
    by the same estimates.
    """
    machines = Machines(ranks_per_host, 10**11, bandwidth, bandwidth / 8)
    for seed in range(6 if ranks == 2 else 3):
        random_ = random.Random(seed)
        tables, statistics = {}, {}
        for name in ("a", "b", "c", "d"):
            tables[name] = replace(TABLE, dim=random_.choice([16, 32, 64, 128]))
            statistics[name] = TableStatistics(
                rows=random_.randint(10**3, 10**6),
                ids_per_sample=tuple(
                    random_.choice([1.0, 1.0, 2.0, 10.0, 30.0])
                    for _ in range(random_.choice([1, 3]))
                ),
                ns_per_id=random_.uniform(80, 400),
                hottest_share=random_.choice([0, 0.05, 0.3]),
            )
        found = forecast(tables, statistics, machines, ranks, BATCH)
        chosen = {table.name: table.ranks for table in found.tables}
        best = min(
            step_ms(places, tables, statistics, machines, ranks)
            for places in every_plan(tables, ranks)
        )
        assert step_ms(chosen, tables, statistics, machines, ranks) <= 1.1 * best, seed


def test_the_time_of_a_sharding_type_counts_once() -> None:
    """One large and three small tables: a second sharding type pays off for the large
    one only if it takes little.
    """
    tables = {
        "large": replace(MEASURED, ids_per_sample=(40.0,)),
        **dict.fromkeys(("a", "b", "c"), MEASURED),
    }
    cheap = of_tables(
        replace(MACHINES, table_wise_ms=0.0, row_wise_ms=0.0), 2, **tables
    )
    assert {table.sharding_type for table in cheap.tables} == {"table_wise", "row_wise"}
    assert [rank.torchrec_ms for rank in cheap.ranks] == [0, 0]
    dear = of_tables(replace(MACHINES, table_wise_ms=3.0, row_wise_ms=2.0), 2, **tables)
    assert {table.sharding_type for table in dear.tables} == {"row_wise"}
    assert [rank.torchrec_ms for rank in dear.ranks] == [2, 2]
    assert [rank.torchrec_ms for rank in of_tables(MACHINES, 1, **tables).ranks] == [0]
    small = of_tables(
        replace(MACHINES, table_wise_ms=9.0, row_wise_ms=9.0), 2, a=MEASURED
    )
    assert (small.limit, small.ranks[0].limit) == ("torchrec", "torchrec")


def test_the_latency_counts_for_each_collective() -> None:
    """Each sharding type has five collectives, so that latency also decides against a
    second type.
    """
    machines = replace(MACHINES, table_wise_ms=0.0, row_wise_ms=0.0)
    tables = {
        "large": replace(MEASURED, ids_per_sample=(40.0,)),
        **dict.fromkeys(("a", "b", "c"), MEASURED),
    }
    near, far = (
        of_tables(replace(machines, latency_ms=ms), 2, **tables) for ms in (0.0, 0.6)
    )
    assert {table.sharding_type for table in near.tables} == {"table_wise", "row_wise"}
    assert {table.sharding_type for table in far.tables} == {"row_wise"}
    farther = of_tables(replace(machines, latency_ms=1.6), 2, **tables)
    for rank, later in zip(far.ranks, farther.ranks, strict=True):
        assert later.network_ms - rank.network_ms == pytest.approx(5 * 1.0)
    assert (
        of_tables(replace(machines, latency_ms=1.0), 1, **tables).ranks[0].network_ms
        == 0
    )


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ("rows", "table 't': rows is not known: pass a checkpoint"),
        (
            "ids_per_sample",
            "table 't': ids_per_sample is not known: pass statistics of batches",
        ),
        (
            "ns_per_id",
            "table 't': ns_per_id is not known: .* measured with the optimizer",
        ),
        (
            "rows_per_step",
            "table 't': rows_per_step is not known: pass the folder of a run",
        ),
    ],
)
def test_what_is_not_known(missing: str, says: str) -> None:
    unknown: Any = {missing: None}
    with pytest.raises(ValueError, match=says):
        of_tables(MACHINES, 2, steps=1, t=replace(MEASURED, **unknown))


def test_refusals() -> None:
    with pytest.raises(ValueError, match="there is no table to plan"):
        forecast({}, {}, MACHINES, 1, BATCH)
    with pytest.raises(ValueError, match="table 't': rows is not known"):
        forecast({"t": TABLE}, {}, MACHINES, 1, BATCH)
    with pytest.raises(
        ValueError,
        match=(
            r"table 'a\.t' cannot be planned: the name of a TorchRec table has no '\.'"
        ),
    ):
        forecast({"a.t": TABLE}, {"a.t": MEASURED}, MACHINES, 1, BATCH)
    two = {"a": TABLE, "b": replace(TABLE, optimizer=SGD(lr=0.1))}
    with pytest.raises(
        ValueError,
        match=r"the same optimizer, but 'a' has RowWiseAdagrad.*, 'b' has SGD",
    ):
        forecast(two, dict.fromkeys(two, MEASURED), MACHINES, 1, BATCH)
    with pytest.raises(ValueError, match="6 ranks do not fill hosts with 4 ranks each"):
        of_tables(MACHINES, 6, t=MEASURED)
    with pytest.raises(
        ValueError, match=r"table 't' needs at least 0\.002 GiB of host memory"
    ):
        of_tables(replace(MACHINES, memory_per_rank_bytes=1000), 1, t=MEASURED)


def test_other_optimizers_and_row_types() -> None:
    base = of_tables(MACHINES, 1, t=MEASURED).ranks[0].memory_bytes
    more = forecast(
        {"t": replace(TABLE, optimizer=Adam(lr=0.1))},
        {"t": MEASURED},
        MACHINES,
        1,
        BATCH,
    )
    less = forecast(
        {"t": replace(TABLE, dtype="float16")}, {"t": MEASURED}, MACHINES, 1, BATCH
    )
    bounded = replace(TABLE, options=TableOptions(max_rows=10_000))
    half = forecast({"t": bounded}, {"t": MEASURED}, MACHINES, 1, BATCH)
    assert more.ranks[0].memory_bytes - base == 20_000 * (2 * 16 - 1) * 4
    assert base - less.ranks[0].memory_bytes == 20_000 * 16 * 2
    assert half.ranks[0].memory_bytes < base
