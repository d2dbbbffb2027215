"""The plan for a number of ranks, and the work of each, without starting one."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torchrec import EmbeddingBagCollection
from torchrec.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
)
from torchrec.distributed.planner.types import PlannerError, ShardingOption

from torchrec_recstore.planner.bus_forecasts import BusForecast, bus_forecasts
from torchrec_recstore.planner.constraints import RecStoreConstraints, planned_rows
from torchrec_recstore.planner.forecast_inputs import (
    VIRTUAL_ROWS,
    ForecastTable,
    Machines,
    check_name,
    table_config,
)
from torchrec_recstore.planner.planners import RecStoreEnumerator, RecStorePlanner
from torchrec_recstore.planner.refining import REFINED
from torchrec_recstore.planner.statistics import TableStatistics
from torchrec_recstore.planner.traffic import (
    STEP_COLLECTIVES,
    PlacedTable,
    milliseconds,
    rank_traffic,
)
from torchrec_recstore.sharders import RecStoreSharder

_BOUNDLESS = 2**60
_SOURCES = {
    "rows": (
        "pass a checkpoint or a Parquet sample, or state rows in the file of tables"
    ),
    "ids_per_sample": (
        "pass statistics of batches, or a Parquet sample and the features of the table"
    ),
    "ns_per_id": (
        "pass statistics of batches that were measured with the optimizer, or a Parquet"
        " sample"
    ),
    "rows_per_step": (
        "pass the folder of a run with several checkpoints, or state rows_per_day in"
        " the file of tables"
    ),
}


_Part = Literal["lookups", "bus", "network", "torchrec"]


@dataclass(frozen=True)
class TableForecast:
    """The place of a table in a plan.

    Its rows are those of all ranks, at most ``max_rows``.
    """

    name: str
    sharding_type: str  # "table_wise" or "row_wise"
    ranks: tuple[int, ...]  # of its shards
    rows: int  # now
    rows_later: int  # after the growth
    device_rows: int  # on GPUs, over all ranks
    hit_share: float | None  # of a batch's distinct ids that are there; None without


@dataclass(frozen=True)
class RankForecast:
    """The work of a rank in a training step, and its memory now and after the growth.

    ``network_ms`` are those of the exchange with other ranks: of ``sent_bytes`` or
    ``received_bytes``, whichever takes longer, at the speeds of the network, and the
    latency of each collective. gloo sends partial sums twice. ``torchrec_ms`` are
    TorchRec's own work for the sharding types of the plan: the same on all ranks, and 0
    if there is one rank. ``sent_bytes`` are those before what a library adds. Memory is
    that of shards, and of their inputs and outputs. ``bus_ms`` are those of the copies
    between the host and the GPU, and 0 without one; the host does less work than
    ``lookups_ms`` for tables with rows on the GPU, which were measured without.
    """

    rank: int
    lookups_ms: float
    network_ms: float
    torchrec_ms: float
    sent_bytes: float
    received_bytes: float
    memory_bytes: int
    memory_later_bytes: int
    bus_ms: float
    bus_bytes: float

    @property
    def step_ms(self) -> float:
        """The milliseconds of the four parts, which do not overlap.

        The dense part is not counted.
        """
        return self.lookups_ms + self.bus_ms + self.network_ms + self.torchrec_ms

    @property
    def limit(self) -> _Part:
        """The longest part of the step."""
        parts: dict[_Part, float] = {
            "lookups": self.lookups_ms,
            "bus": self.bus_ms,
            "network": self.network_ms,
            "torchrec": self.torchrec_ms,
        }
        return max(parts, key=lambda part: parts[part])


@dataclass(frozen=True)
class Forecast:
    """A plan, and what it means for each rank.

    The tables are sorted by name, and the ranks are in ascending order.

    ``boundless_step_ms`` is the step of the slowest rank in the plan for ranks with any
    amount of memory.
    """

    tables: tuple[TableForecast, ...]
    ranks: tuple[RankForecast, ...]
    boundless_step_ms: float

    @property
    def step_ms(self) -> float:
        """The milliseconds of a step of the slowest rank."""
        return max(rank.step_ms for rank in self.ranks)

    @property
    def limit(self) -> _Part | Literal["memory"]:
        """The cause of the speed: memory, or the longest part of the slowest rank.

        It is memory if a plan for more memory is faster.
        """
        if self.boundless_step_ms < self.step_ms:
            return "memory"
        return max(self.ranks, key=lambda rank: rank.step_ms).limit


def forecast(
    tables: Mapping[str, ForecastTable],
    statistics: Mapping[str, TableStatistics],
    machines: Machines,
    ranks: int,
    batch_size: int,
    steps: int = 0,
) -> Forecast:
    """Returns the plan of :class:`RecStorePlanner`, and its estimates for each rank.

    The tables are table-wise or row-wise.

    The planner plans with the memory that is needed after ``steps`` steps, and no
    process group is started. Of each table ``rows``, ``ids_per_sample`` and
    ``ns_per_id`` must be known, and ``rows_per_step`` if ``steps`` is above 0. A table
    of hot ids needs ``hottest_share``, which is 0 if None. ``batch_size`` is that of
    one rank.

    Raises ValueError, which names the table, if something is not known of it, if the
    tables have different optimizers or do not fit into the memory, or if the ranks do
    not fill their hosts.
    """
    _check_tables(tables, statistics, steps)
    present = {name: statistics[name] for name in tables}
    later = dict(present)
    if steps:
        later = {name: table.after(steps) for name, table in present.items()}
    job = _Job(tables, machines, ranks, batch_size)
    plan, rank_forecasts = job.planned(present, later)
    table_forecasts = []
    for name in sorted(tables):
        device_rows = plan[name].device_rows
        table_forecasts.append(
            TableForecast(
                name=name,
                sharding_type=plan[name].sharding_type,
                ranks=plan[name].ranks,
                rows=job.rows(name, present[name]),
                rows_later=job.rows(name, later[name]),
                device_rows=device_rows,
                hit_share=statistics[name].hot_share if device_rows else None,
            )
        )
    boundless_machines = replace(machines, memory_per_rank_bytes=_BOUNDLESS)
    boundless_job = _Job(tables, boundless_machines, ranks, batch_size)
    _, boundless_ranks = boundless_job.planned(present, later)
    return Forecast(
        tables=tuple(table_forecasts),
        ranks=tuple(rank_forecasts),
        boundless_step_ms=max(rank.step_ms for rank in boundless_ranks),
    )


def _check_tables(
    tables: Mapping[str, ForecastTable],
    statistics: Mapping[str, TableStatistics],
    steps: int,
) -> None:
    """Refuses tables of which something is not known, or with different optimizers."""
    if not tables:
        raise ValueError("there is no table to plan")
    needed = ["rows", "ids_per_sample", "ns_per_id"]
    if steps:
        needed.append("rows_per_step")
    for name in tables:
        check_name(name)
        for measured_field in needed:
            if getattr(statistics.get(name), measured_field, None) is None:
                raise ValueError(
                    f"table {name!r}: {measured_field} is not known:"
                    f" {_SOURCES[measured_field]}"
                )
    if len({table.optimizer for table in tables.values()}) > 1:
        optimizers = []
        for name, table in tables.items():
            optimizers.append(f"{name!r} has {table.optimizer}")
        raise ValueError(
            f"all tables must have the same optimizer, but {', '.join(optimizers)}"
        )


@dataclass(frozen=True)
class _Place:
    """The place of a table in a plan."""

    sharding_type: str
    ranks: tuple[int, ...]  # of its shards
    device_rows: int


# by the name of the table and the sharding type
_Options = dict[tuple[str, str], ShardingOption]


class _Job:
    """Plans tables of one optimizer for ranks."""

    def __init__(
        self,
        tables: Mapping[str, ForecastTable],
        machines: Machines,
        ranks: int,
        batch_size: int,
    ) -> None:
        self._tables = tables
        self._machines = machines
        self._ranks = ranks
        self._batch_size = batch_size
        self._topology = machines.topology(ranks)
        first_table = next(iter(tables.values()))
        self._sharders = [RecStoreSharder(optimizer=first_table.optimizer)]
        self._constraints = {}
        for name, table in tables.items():
            # The measured rows count. expected_rows, an estimate from before the
            # training, would count if it is larger.
            options = replace(table.options, expected_rows=None)
            self._constraints[name] = RecStoreConstraints(
                sharding_types=list(REFINED),
                options=options,
            )

    def rows(self, name: str, statistics: TableStatistics) -> int:
        """Returns the number of rows of a table over all ranks."""
        return planned_rows(
            self._constraints[name].options,
            VIRTUAL_ROWS,
            statistics,
        )

    def planned(
        self,
        present: Mapping[str, TableStatistics],
        later: Mapping[str, TableStatistics],
    ) -> tuple[dict[str, _Place], list[RankForecast]]:
        """Returns the place of each table in the plan, and the forecast of each rank.

        The planner plans for the statistics after the growth, ``later``.
        """
        # of a sharding type in a step
        latency_ms = STEP_COLLECTIVES * self._machines.latency_ms
        sharding_type_ms = {}
        for sharding_type, type_ms in self._machines.sharding_type_ms.items():
            sharding_type_ms[sharding_type] = type_ms + latency_ms
        planner = RecStorePlanner(
            topology=self._topology,
            batch_size=self._batch_size,
            constraints=self._constraints,
            storage_reservation=FixedPercentageStorageReservation(0.0),
            debug=False,
            statistics=later,
            sharding_type_ms=sharding_type_ms,
        )
        try:
            (module,) = planner.plan(self._model(later), self._sharders).plan.values()
        except PlannerError as error:
            raise ValueError(str(error).split("\n\n")[0]) from error
        plan = {}
        for name, sharding in module.items():
            shards = sharding.sharding_spec.shards
            shard_ranks = tuple(shard.placement.rank() for shard in shards)
            device_rows = sharding.options.device_rows or 0
            plan[name] = _Place(sharding.sharding_type, shard_ranks, device_rows)
        enumerator, _ = planner.searched
        assert isinstance(enumerator, RecStoreEnumerator)
        later_options = _by_type(enumerator.found)
        present_options = later_options
        if present != later:
            enumerator = RecStoreEnumerator(
                self._topology,
                self._batch_size,
                self._constraints,
                statistics=present,
            )
            options = enumerator.enumerate(self._model(present), self._sharders)
            present_options = _by_type(options)
        rank_forecasts = self._rank_forecasts(
            plan,
            present,
            present_options,
            later_options,
            self._bus_forecasts(plan, later, later_options, enumerator),
            latency_ms,
        )
        return plan, rank_forecasts

    def _bus_forecasts(
        self,
        plan: Mapping[str, _Place],
        statistics: Mapping[str, TableStatistics],
        options: _Options,
        enumerator: RecStoreEnumerator,
    ) -> dict[str, list[BusForecast]]:
        """Returns the bytes over the bus of the shards of each table; none without
        GPUs.
        """
        forecasts: dict[str, list[BusForecast]] = {}
        if self._machines.compute_device == "cpu":
            return forecasts
        for name, place in plan.items():
            forecasts[name] = bus_forecasts(
                options[name, place.sharding_type],
                self._topology,
                dict(self._constraints),
                enumerator.sharder_map,
                statistics[name],
                place.device_rows,
                self._tables[name].optimizer,
            )
        return forecasts

    def _rank_forecasts(
        self,
        plan: Mapping[str, _Place],
        statistics: Mapping[str, TableStatistics],
        present_options: _Options,
        later_options: _Options,
        buses: Mapping[str, list[BusForecast]],
        latency_ms: float,
    ) -> list[RankForecast]:
        lookups_ms: dict[int, float] = defaultdict(float)
        bus_bytes: dict[int, float] = defaultdict(float)
        memory_bytes = Counter[int]()
        memory_later_bytes = Counter[int]()
        for name, place in plan.items():
            present = present_options[name, place.sharding_type]
            later = later_options[name, place.sharding_type]
            for rank, shard in zip(place.ranks, present.shards, strict=True):
                memory_bytes[rank] += shard.storage.ddr
            for rank, shard in zip(place.ranks, later.shards, strict=True):
                lookups_ms[rank] += shard.perf.fwd_compute + shard.perf.bwd_compute
                memory_later_bytes[rank] += shard.storage.ddr
            if name not in buses:
                continue
            for rank, bus in zip(place.ranks, buses[name], strict=True):
                # The planner's time of the lookups has the copies of a table without
                # rows on the GPU.
                copies_ms = bus.copied_without_device_rows / self._bus_bytes_per_ms
                lookups_ms[rank] -= copies_ms
                bus_bytes[rank] += bus.copied
        placed_tables = self._placed_tables(plan, statistics)
        types: list[str] = []
        if self._ranks > 1:
            types = sorted({place.sharding_type for place in plan.values()})
        types_ms = sum(self._machines.sharding_type_ms[name] for name in types)
        within_host, between_hosts = self._machines.bytes_per_ms
        forecasts = []
        for rank in range(self._ranks):
            traffic = rank_traffic(
                placed_tables,
                rank,
                self._ranks,
                self._batch_size,
                self._topology.local_world_size,
            )
            bytes_ms = 0.0
            for collective in traffic:
                bytes_ms += milliseconds(
                    collective,
                    within_host,
                    between_hosts,
                    self._machines.compute_device,
                )
            forecasts.append(
                RankForecast(
                    rank=rank,
                    lookups_ms=lookups_ms[rank],
                    network_ms=len(types) * latency_ms + bytes_ms,
                    torchrec_ms=types_ms,
                    sent_bytes=sum(collective.sent for collective in traffic),
                    received_bytes=sum(collective.received for collective in traffic),
                    memory_bytes=memory_bytes[rank],
                    memory_later_bytes=memory_later_bytes[rank],
                    bus_ms=bus_bytes[rank] / self._bus_bytes_per_ms,
                    bus_bytes=bus_bytes[rank],
                )
            )
        return forecasts

    @property
    def _bus_bytes_per_ms(self) -> float:
        return self._machines.bus_bytes_per_s / 1000 or math.inf

    def _placed_tables(
        self,
        plan: Mapping[str, _Place],
        statistics: Mapping[str, TableStatistics],
    ) -> list[PlacedTable]:
        placed_tables = []
        for name, place in plan.items():
            per_feature = statistics[name].ids_per_sample or ()
            placed_tables.append(
                PlacedTable(
                    place.sharding_type,
                    place.ranks,
                    dim=self._tables[name].dim,
                    features=len(per_feature),
                    ids_per_sample=sum(per_feature),
                )
            )
        return placed_tables

    def _model(
        self,
        statistics: Mapping[str, TableStatistics],
    ) -> EmbeddingBagCollection:
        configs = []
        for name, table in self._tables.items():
            ids_per_sample = statistics[name].ids_per_sample or ()
            features = []
            for number in range(len(ids_per_sample)):
                features.append(f"{name}.{number}")
            configs.append(table_config(name, table, features))
        return EmbeddingBagCollection(tables=configs, device=torch.device("meta"))


def _by_type(options: list[ShardingOption]) -> _Options:
    return {(option.name, option.sharding_type): option for option in options}
