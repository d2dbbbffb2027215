"""The plan for a number of ranks, and what each of them has to do, to exchange and to
hold, without starting one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torchrec import EmbeddingBagCollection
from torchrec.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
)
from torchrec.distributed.planner.types import PlannerError, ShardingOption

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


@dataclass(frozen=True)
class RankForecast:
    """The work of a rank in a training step, and its memory now and after the growth.

    ``network_ms`` are those of the exchange with other ranks: of ``sent_bytes`` or
    ``received_bytes``, whichever takes longer, at the speeds of the network, and the
    latency of each collective. gloo sends partial sums twice. ``torchrec_ms`` are
    TorchRec's own work for the sharding types of the plan: the same on all ranks, and 0
    if there is one rank. ``sent_bytes`` are those before what a library adds. Memory is
    that of shards, and of their inputs and outputs.
    """

    rank: int
    lookups_ms: float
    network_ms: float
    torchrec_ms: float
    sent_bytes: float
    received_bytes: float
    memory_bytes: int
    memory_later_bytes: int

    @property
    def step_ms(self) -> float:
        """The milliseconds of the three parts, which do not overlap.

        The dense part is not counted.
        """
        return self.lookups_ms + self.network_ms + self.torchrec_ms

    @property
    def limit(self) -> Literal["lookups", "network", "torchrec"]:
        """The longest part of the step."""
        parts: list[Literal["lookups", "network", "torchrec"]] = [
            "lookups",
            "network",
            "torchrec",
        ]
        return max(parts, key=lambda part: getattr(self, f"{part}_ms"))


@dataclass(frozen=True)
class Forecast:
    """A plan, with its tables sorted by name, and what it means for each rank, in
    ascending order.

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
    def limit(self) -> Literal["memory", "lookups", "network", "torchrec"]:
        """What limits the speed: memory, if a plan for more memory is faster; otherwise
        that of the slowest rank.
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
    """Returns :class:`RecStorePlanner`'s plan of table-wise and row-wise tables, and
    its estimates for each rank.

    The planner plans with the memory that is needed after ``steps`` steps, and no
    process group is started. Of each table ``rows``, ``ids_per_sample`` and
    ``ns_per_id`` must be known, and ``rows_per_step`` if ``steps`` is above 0. A table
    of hot ids needs ``hottest_share``, which is 0 if None. ``batch_size`` is that of
    one rank.

    Raises ValueError, which names the table, if something is not known of it, if the
    tables have different optimizers or do not fit into the memory, or if the ranks do
    not fill their hosts.
    """
    if not tables:
        raise ValueError("there is no table to plan")
    for name in tables:
        check_name(name)
        for each in (
            "rows",
            "ids_per_sample",
            "ns_per_id",
            *(["rows_per_step"] if steps else []),
        ):
            if getattr(statistics.get(name), each, None) is None:
                raise ValueError(
                    f"table {name!r}: {each} is not known: {_SOURCES[each]}"
                )
    if len({table.optimizer for table in tables.values()}) > 1:
        theirs = ", ".join(
            f"{name!r} has {table.optimizer}" for name, table in tables.items()
        )
        raise ValueError(f"all tables must have the same optimizer, but {theirs}")
    now = {name: statistics[name] for name in tables}
    later = {name: each.after(steps) if steps else each for name, each in now.items()}
    job = _Job(tables, machines, ranks, batch_size)
    plan, found = job.planned(now, later)
    boundless = _Job(
        tables, replace(machines, memory_per_rank_bytes=_BOUNDLESS), ranks, batch_size
    )
    return Forecast(
        tables=tuple(
            TableForecast(
                name,
                *plan[name],
                *(job.rows(name, statistics[name]) for statistics in (now, later)),
            )
            for name in sorted(tables)
        ),
        ranks=tuple(found),
        boundless_step_ms=max(
            rank.step_ms for rank in boundless.planned(now, later)[1]
        ),
    )


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
        self._tables, self._machines, self._ranks, self._batch_size = (
            tables,
            machines,
            ranks,
            batch_size,
        )
        self._topology = machines.topology(ranks)
        self._sharders = [
            RecStoreSharder(optimizer=next(iter(tables.values())).optimizer)
        ]
        # The measured rows count. expected_rows, an estimate from before the training,
        # would count if it is larger.
        self._constraints = {
            name: RecStoreConstraints(
                sharding_types=list(REFINED),
                options=replace(table.options, expected_rows=None),
            )
            for name, table in tables.items()
        }

    def rows(self, name: str, statistics: TableStatistics) -> int:
        """Returns the number of rows of a table over all ranks."""
        return planned_rows(self._constraints[name].options, VIRTUAL_ROWS, statistics)

    def planned(
        self, now: Mapping[str, TableStatistics], later: Mapping[str, TableStatistics]
    ) -> tuple[dict[str, tuple[str, tuple[int, ...]]], list[RankForecast]]:
        """Returns the sharding type and the ranks of each table in the plan, and the
        forecast of each rank.

        The planner plans for the statistics after the growth, ``later``.
        """
        # of a sharding type in a step
        latency_ms = STEP_COLLECTIVES * self._machines.latency_ms
        planner = RecStorePlanner(
            topology=self._topology,
            batch_size=self._batch_size,
            constraints=self._constraints,
            storage_reservation=FixedPercentageStorageReservation(0.0),
            debug=False,
            statistics=later,
            sharding_type_ms={
                kind: ms + latency_ms
                for kind, ms in self._machines.sharding_type_ms.items()
            },
        )
        try:
            (module,) = planner.plan(self._model(later), self._sharders).plan.values()
        except PlannerError as error:
            raise ValueError(str(error).split("\n\n")[0]) from error
        plan = {
            name: (
                sharding.sharding_type,
                tuple(
                    shard.placement.rank() for shard in sharding.sharding_spec.shards
                ),
            )
            for name, sharding in module.items()
        }
        enumerator = planner.searched[0]
        assert isinstance(enumerator, RecStoreEnumerator)
        after = before = _by_type(enumerator.found)
        if now != later:
            enumerator = RecStoreEnumerator(
                self._topology, self._batch_size, self._constraints, statistics=now
            )
            before = _by_type(enumerator.enumerate(self._model(now), self._sharders))
        return plan, self._ranks_of(plan, now, before, after, latency_ms)

    def _ranks_of(
        self,
        plan: Mapping[str, tuple[str, tuple[int, ...]]],
        now: Mapping[str, TableStatistics],
        before: _Options,
        after: _Options,
        latency_ms: float,
    ) -> list[RankForecast]:
        lookups_ms, memory, memory_later = (Counter[int]() for _ in range(3))
        placed = []
        for name, (kind, ranks) in plan.items():
            per_feature = now[name].ids_per_sample or ()
            placed.append(
                PlacedTable(
                    kind,
                    ranks,
                    self._tables[name].dim,
                    len(per_feature),
                    sum(per_feature),
                )
            )
            for rank, shard, later in zip(
                ranks, before[name, kind].shards, after[name, kind].shards, strict=True
            ):
                lookups_ms[rank] += later.perf.fwd_compute + later.perf.bwd_compute
                memory[rank] += shard.storage.ddr
                memory_later[rank] += later.storage.ddr
        types = sorted({kind for kind, _ in plan.values()}) if self._ranks > 1 else []
        found = []
        for rank in range(self._ranks):
            traffic = rank_traffic(
                placed,
                rank,
                self._ranks,
                self._batch_size,
                self._topology.local_world_size,
            )
            bytes_ms = sum(
                milliseconds(each, *self._machines.bytes_per_ms, "cpu")
                for each in traffic
            )
            found.append(
                RankForecast(
                    rank=rank,
                    lookups_ms=lookups_ms[rank],
                    network_ms=len(types) * latency_ms + bytes_ms,
                    torchrec_ms=sum(
                        self._machines.sharding_type_ms[kind] for kind in types
                    ),
                    sent_bytes=sum(each.sent for each in traffic),
                    received_bytes=sum(each.received for each in traffic),
                    memory_bytes=memory[rank],
                    memory_later_bytes=memory_later[rank],
                )
            )
        return found

    def _model(
        self, statistics: Mapping[str, TableStatistics]
    ) -> EmbeddingBagCollection:
        configs = [
            table_config(
                name,
                table,
                [
                    f"{name}.{at}"
                    for at in range(len(statistics[name].ids_per_sample or ()))
                ],
            )
            for name, table in self._tables.items()
        ]
        return EmbeddingBagCollection(tables=configs, device=torch.device("meta"))


def _by_type(options: list[ShardingOption]) -> _Options:
    return {(option.name, option.sharding_type): option for option in options}
