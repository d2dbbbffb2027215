"""Forecasts for ranks with GPUs: the bytes over the bus, with and without rows there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchrec_recstore import RowWiseAdagrad
from torchrec_recstore.options import TableOptions
from torchrec_recstore.planner import TableStatistics
from torchrec_recstore.planner.forecast_inputs import ForecastTable, Machines
from torchrec_recstore.planner.forecasts import Forecast, forecast

BATCH = 512
DIM = 16
BUS = 4e9
CPUS = Machines(2, 10**10, 1e9, 1e9)
GPUS = replace(CPUS, gpu_memory_per_rank_bytes=10**10, bus_bytes_per_s=BUS)
MEASURED = TableStatistics(
    rows=20_000,
    ids_per_sample=(1.0, 3.0),
    ns_per_id=200.0,
    unique_share=0.125,
    hot_share=0.75,
)
COLD = replace(MEASURED, hot_share=0.25)


def of_table(
    machines: Machines,
    statistics: TableStatistics = MEASURED,
    ranks: int = 1,
    options: TableOptions = TableOptions(),  # noqa: B008  (it is frozen)
) -> Forecast:
    table = ForecastTable(DIM, RowWiseAdagrad(lr=0.1), options=options)
    return forecast({"t": table}, {"t": statistics}, machines, ranks, BATCH)


def test_a_tenth_of_the_rows_is_on_the_gpu_with_its_measured_hits() -> None:
    (table,) = of_table(GPUS).tables
    assert (table.device_rows, table.hit_share) == (2000, 0.75)
    (table,) = of_table(GPUS, COLD).tables
    assert (table.device_rows, table.hit_share) == (0, None)
    (table,) = of_table(CPUS).tables
    assert (table.device_rows, table.hit_share) == (0, None)


def test_the_bytes_of_a_step_on_one_gpu() -> None:
    ids, bags = 4 * BATCH, 2 * BATCH
    (cold,) = of_table(GPUS, COLD).ranks
    pooled = bags * DIM * 4
    assert cold.bus_bytes == 8 * (ids + bags) + 2 * pooled
    (hot,) = of_table(GPUS).ranks
    arrivals = ids * 0.125 * 0.25
    row_bytes = 4 * DIM + 16  # with the state, padded to 16 bytes
    assert hot.bus_bytes == pytest.approx(
        (8 + 4) * (ids + bags) + arrivals * (2 * row_bytes + 8)
    )
    for rank in (cold, hot):
        assert rank.bus_ms == pytest.approx(rank.bus_bytes / BUS * 1e3)
        assert rank.step_ms == rank.lookups_ms + rank.bus_ms


def test_the_host_s_work_is_that_of_a_cpu() -> None:
    (on_cpu,) = of_table(CPUS).ranks
    assert (on_cpu.bus_bytes, on_cpu.bus_ms) == (0, 0)
    for statistics in (MEASURED, COLD):
        (rank,) = of_table(GPUS, statistics).ranks
        assert rank.lookups_ms == pytest.approx(on_cpu.lookups_ms)


def test_a_slow_bus_is_the_limit() -> None:
    assert of_table(replace(GPUS, bus_bytes_per_s=1e6), COLD).limit == "bus"


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_together_copy_the_batches_of_all(ranks: int) -> None:
    found = of_table(GPUS, ranks=ranks)
    (table,) = found.tables
    (alone,) = of_table(GPUS).ranks
    copied = sum(rank.bus_bytes for rank in found.ranks)
    if table.sharding_type == "table_wise":
        assert copied == pytest.approx(ranks * alone.bus_bytes)
    else:  # each rank has all bags
        bags = 2 * BATCH
        more = (ranks - 1) * ranks * bags * (8 + 4)
        assert copied == pytest.approx(ranks * alone.bus_bytes + more)


def test_numbers_of_a_gpu_come_together() -> None:
    for one in ({"gpu_memory_per_rank_bytes": 1}, {"bus_bytes_per_s": 1.0}):
        with pytest.raises(ValueError, match="must both be above 0, or both be 0"):
            replace(CPUS, **one)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gpu_memory_per_rank_bytes must be a whole"):
        replace(GPUS, gpu_memory_per_rank_bytes=-1)
