"""The plan for a number of ranks, and what each of them has to do, to exchange and to hold, without starting one."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError, ShardingOption

from torchrec_recstore.checkpoint.info import CheckpointInfo
from torchrec_recstore.encoding import check_fields
from torchrec_recstore.optim import Optimizer
from torchrec_recstore.options import TableOptions
from torchrec_recstore.planner.constraints import RecStoreConstraints, planned_rows
from torchrec_recstore.planner.enumerators import RecStoreEnumerator
from torchrec_recstore.planner.perf import milliseconds
from torchrec_recstore.planner.planners import RecStorePlanner
from torchrec_recstore.planner.refining import REFINED, SHARDING_TYPE_MS
from torchrec_recstore.planner.statistics import TableStatistics
from torchrec_recstore.planner.traffic import STEP_COLLECTIVES, PlacedTable, rank_traffic
from torchrec_recstore.sharders import RecStoreSharder
from torchrec_recstore.table_configs import ROW_DTYPES

DTYPES = tuple(str(dtype).removeprefix("torch.") for dtype in ROW_DTYPES.values())
"""The data types of rows."""

_VIRTUAL_ROWS = 2**40  # The measured rows count, and not this number.
_BOUNDLESS = 2**60
_SOURCES = {
    "rows": "pass a checkpoint or a Parquet sample, or state rows in the file of tables",
    "ids_per_sample": "pass statistics of batches, or a Parquet sample and the features of the table",
    "ns_per_id": "pass statistics of batches that were measured with the optimizer, or a Parquet sample",
    "rows_per_step": "pass the folder of a run with several checkpoints, or state rows_per_day in the file of tables",
}


@dataclass(frozen=True)
class Machines:
    """The hosts and the network of a job.

    Args:
        ranks_per_host: The number of ranks of each host.
        memory_per_rank_bytes: The bytes of memory that the tables of a rank may use.
        within_host_bytes_per_s: The bytes a second that a rank sends to ranks of its host.
        between_hosts_bytes_per_s: The bytes a second that a rank sends to ranks of other hosts.
        table_wise_ms: The milliseconds of a step that table-wise sharding takes on every rank of several, whatever the
            tables are. The default was measured: see ``SHARDING_TYPE_MS``.
        row_wise_ms: The same of row-wise sharding.
        latency_ms: The milliseconds that a collective takes besides the time of its bytes. Default: 0.

    Raises:
        ValueError: A number is not finite, or not above 0; milliseconds may be 0. The message names it.
    """

    ranks_per_host: int
    memory_per_rank_bytes: int
    within_host_bytes_per_s: float
    between_hosts_bytes_per_s: float
    table_wise_ms: float = SHARDING_TYPE_MS["table_wise"]
    row_wise_ms: float = SHARDING_TYPE_MS["row_wise"]
    latency_ms: float = 0.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            kinds = (int,) if each.type == "int" else (int, float)
            zero = each.name.endswith("_ms")  # may be 0
            number = isinstance(value, kinds) and not isinstance(value, bool)
            if not number or not (0 < value < math.inf or (zero and value == 0)):
                what = f"a {'whole' if each.type == 'int' else 'finite'} number {'of at least' if zero else 'above'} 0"
                raise ValueError(f"{each.name} must be {what}, got {value!r}")

    @property
    def bytes_per_ms(self) -> tuple[float, float]:
        """The bytes per millisecond within a host and between hosts."""
        return self.within_host_bytes_per_s / 1000, self.between_hosts_bytes_per_s / 1000

    @property
    def sharding_type_ms(self) -> dict[str, float]:
        """The milliseconds of a step by sharding type."""
        return {"table_wise": self.table_wise_ms, "row_wise": self.row_wise_ms}

    @property
    def type_latency_ms(self) -> float:
        """The milliseconds that the collectives of a sharding type wait in a step."""
        return STEP_COLLECTIVES * self.latency_ms

    def topology(self, ranks: int) -> Topology:
        """Returns TorchRec's topology of a number of ranks.

        Raises:
            ValueError: The ranks do not fill their hosts.
        """
        on_host = min(self.ranks_per_host, ranks)
        if ranks % on_host:
            raise ValueError(
                f"{ranks} ranks do not fill hosts with {on_host} ranks each: change ranks or ranks_per_host"
            )
        within_host, between_hosts = self.bytes_per_ms
        return Topology(
            world_size=ranks,
            local_world_size=on_host,
            compute_device="cpu",
            ddr_cap=self.memory_per_rank_bytes,
            intra_host_bw=within_host,
            inter_host_bw=between_hosts,
        )


def read_machines(path: str | os.PathLike[str]) -> Machines:
    """Reads a topology file, a JSON object with the fields of :class:`Machines`.

    Raises:
        OSError: The file cannot be read.
        ValueError: A field is missing, unknown or not valid. The message names the file and the field.
    """
    names = [each.name for each in fields(Machines)]
    optional = [each.name for each in fields(Machines) if each.default is not MISSING]
    try:
        document: Any = json.loads(Path(path).read_bytes())
        if not isinstance(document, dict):
            raise ValueError("it is not a JSON object")
        check_fields("it", document, names, optional)
        return Machines(**document)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


@dataclass(frozen=True)
class ForecastTable:
    """A pooled table that is to be planned.

    Args:
        dim: The number of columns.
        optimizer: The optimizer. All tables have the same.
        dtype: The data type of the rows: ``"float32"``, ``"float16"``, ``"bfloat16"`` or ``"int8"``.
        options: The options of the table. ``expected_rows`` has no effect, because the rows were measured.
    """

    dim: int
    optimizer: Optimizer
    dtype: str = "float32"
    options: TableOptions = field(default_factory=TableOptions)


def table_config(name: str, table: ForecastTable, features: Sequence[str]) -> EmbeddingBagConfig:
    """Returns TorchRec's config of a table.

    Raises:
        ValueError: The name has a point.
    """
    _check_name(name)
    types = dict(zip(DTYPES, ROW_DTYPES, strict=True))
    return EmbeddingBagConfig(
        name=name,
        embedding_dim=table.dim,
        num_embeddings=_VIRTUAL_ROWS,
        feature_names=list(features),
        data_type=types[table.dtype],
    )


def tables_of(info: CheckpointInfo) -> dict[str, ForecastTable]:
    """Returns the tables of a checkpoint by name."""
    return {
        name: ForecastTable(table.dim, table.optimizer, table.dtype, table.options)
        for name, table in info.tables.items()
    }


@dataclass(frozen=True)
class TableForecast:
    """The place of a table in a plan.

    Args:
        name: The name of the table.
        sharding_type: ``"table_wise"`` or ``"row_wise"``.
        ranks: The ranks of its shards.
        rows: The number of its rows now, over all ranks, at most ``max_rows``.
        rows_later: The number of its rows after the growth, at most ``max_rows``.
    """

    name: str
    sharding_type: str
    ranks: tuple[int, ...]
    rows: int
    rows_later: int


@dataclass(frozen=True)
class RankForecast:
    """The work of a rank in a training step, and its memory.

    Args:
        rank: The rank.
        lookups_ms: The milliseconds of lookups and updates.
        network_ms: The milliseconds of the exchange with other ranks: the larger of ``sent_bytes`` and
            ``received_bytes`` within the host, and between hosts, at the speeds of the network, and the latency of each
            collective. gloo sends partial sums twice.
        torchrec_ms: The milliseconds of TorchRec's own work for the sharding types of the plan. It is the same on all
            ranks, and 0 if there is one rank.
        sent_bytes: The bytes to other ranks in a step, before what a library adds.
        received_bytes: The bytes of other ranks in a step.
        memory_bytes: The bytes of the rank's shards, and of their inputs and outputs, now.
        memory_later_bytes: These bytes after the growth.
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
        """The milliseconds of the three parts, which do not overlap. The dense part is not counted."""
        return self.lookups_ms + self.network_ms + self.torchrec_ms

    @property
    def limit(self) -> Literal["lookups", "network", "torchrec"]:
        """The longest part of the step."""
        parts: dict[Literal["lookups", "network", "torchrec"], float] = {
            "lookups": self.lookups_ms,
            "network": self.network_ms,
            "torchrec": self.torchrec_ms,
        }
        return max(parts, key=lambda part: parts[part])


@dataclass(frozen=True)
class Forecast:
    """A plan and what it means for each rank.

    Args:
        tables: The tables, sorted by name.
        ranks: The ranks in ascending order.
        boundless_step_ms: The step of the slowest rank in the plan for ranks with any amount of memory.
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
        """What limits the speed: memory, if a plan for more memory is faster; otherwise that of the slowest rank."""
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
    """Returns :class:`RecStorePlanner`'s plan of table-wise and row-wise tables, and its estimates for each rank.

    The planner plans with the memory that is needed after ``steps`` steps, and no process group is started.

    Args:
        tables: The tables by name.
        statistics: The statistics of these tables. ``rows``, ``ids_per_sample`` and ``ns_per_id`` must be known, and
            ``rows_per_step`` if ``steps`` is above 0. A table of hot ids needs ``hottest_share``, which is 0 if None.
        machines: The hosts and the network.
        ranks: The number of ranks.
        batch_size: The number of samples of one rank in a step.
        steps: The number of steps in which the tables grow as they were measured to. Default: 0.

    Raises:
        ValueError: Something is not known of a table; the tables have different optimizers; the ranks do not fill
            their hosts; or the tables do not fit into the memory. The message names the table.
    """
    if not tables:
        raise ValueError("there is no table to plan")
    for name in tables:
        _check_name(name)
        _check_known(name, statistics.get(name), steps)
    if len({table.optimizer for table in tables.values()}) > 1:
        each = ", ".join(f"{name!r} has {table.optimizer}" for name, table in tables.items())
        raise ValueError(f"all tables must have the same optimizer, but {each}")
    now = {name: statistics[name] for name in tables}
    later = {name: each.after(steps) if steps else each for name, each in now.items()}
    planned = _Planned.of(tables, later, machines, ranks, batch_size)
    boundless = _Planned.of(tables, later, replace(machines, memory_per_rank_bytes=_BOUNDLESS), ranks, batch_size)
    found = planned.rank_forecasts(now, machines, batch_size)
    constraints = _constraints(tables)
    return Forecast(
        tables=tuple(
            TableForecast(
                name,
                planned.types[name],
                planned.places[name],
                *(planned_rows(constraints[name].options, _VIRTUAL_ROWS, each[name]) for each in (now, later)),
            )
            for name in sorted(tables)
        ),
        ranks=tuple(found),
        boundless_step_ms=max(rank.step_ms for rank in boundless.rank_forecasts(now, machines, batch_size)),
    )


def _check_name(name: str) -> None:
    if "." in name:
        raise ValueError(
            f"table {name!r} cannot be planned: the name of a TorchRec table has no '.', and a checkpoint has it in "
            "the names of tables whose names are equal in several collections"
        )


def _check_known(name: str, known: TableStatistics | None, steps: int) -> None:
    needed = ["rows", "ids_per_sample", "ns_per_id", *(["rows_per_step"] if steps else [])]
    for each in needed:
        if known is None or getattr(known, each) is None:
            raise ValueError(f"table {name!r}: {each} is not known: {_SOURCES[each]}")


@dataclass(frozen=True)
class _Planned:
    """The planner's choice, with the options that it chose from."""

    tables: Mapping[str, ForecastTable]
    statistics: Mapping[str, TableStatistics]
    topology: Topology
    types: dict[str, str]  # by table
    places: dict[str, tuple[int, ...]]  # the rank of each shard, by table
    options: dict[tuple[str, str], ShardingOption]  # by table and sharding type

    @classmethod
    def of(
        cls,
        tables: Mapping[str, ForecastTable],
        statistics: Mapping[str, TableStatistics],
        machines: Machines,
        ranks: int,
        batch_size: int,
    ) -> _Planned:
        topology = machines.topology(ranks)
        planner = RecStorePlanner(
            topology=topology,
            batch_size=batch_size,
            constraints=_constraints(tables),
            storage_reservation=FixedPercentageStorageReservation(0.0),
            debug=False,
            statistics=statistics,
            sharding_type_ms={kind: ms + machines.type_latency_ms for kind, ms in machines.sharding_type_ms.items()},
        )
        try:
            plan = planner.plan(_model(tables, statistics), [_sharder(tables)])
        except PlannerError as error:
            raise ValueError(str(error).split("\n\n")[0]) from error
        (module,) = plan.plan.values()
        enumerator = planner.searched[0]
        assert isinstance(enumerator, RecStoreEnumerator)
        return cls(
            tables,
            statistics,
            topology,
            {name: sharding.sharding_type for name, sharding in module.items()},
            {
                name: tuple(shard.placement.rank() for shard in sharding.sharding_spec.shards)
                for name, sharding in module.items()
            },
            {(option.name, option.sharding_type): option for option in enumerator.found},
        )

    def rank_forecasts(
        self, now: Mapping[str, TableStatistics], machines: Machines, batch_size: int
    ) -> list[RankForecast]:
        """Returns the forecast of each rank. ``now`` are the statistics before the growth."""
        before = self.options
        if now != self.statistics:
            enumerator = RecStoreEnumerator(self.topology, batch_size, _constraints(self.tables), statistics=now)
            options = enumerator.enumerate(_model(self.tables, now), [_sharder(self.tables)])
            before = {(option.name, option.sharding_type): option for option in options}
        lookups_ms: Counter[int] = Counter()
        memory: Counter[int] = Counter()
        memory_later: Counter[int] = Counter()
        placed = []
        for name, kind in self.types.items():
            per_feature = now[name].ids_per_sample or ()
            placed.append(
                PlacedTable(kind, self.places[name], self.tables[name].dim, len(per_feature), sum(per_feature))
            )
            shards = zip(self.places[name], before[name, kind].shards, self.options[name, kind].shards, strict=True)
            for rank, shard, later in shards:
                lookups_ms[rank] += later.perf.fwd_compute + later.perf.bwd_compute
                memory[rank] += shard.storage.ddr
                memory_later[rank] += later.storage.ddr
        types = set(self.types.values()) if self.topology.world_size > 1 else set()
        latency_ms = len(types) * machines.type_latency_ms
        torchrec_ms = sum(machines.sharding_type_ms[kind] for kind in sorted(types))
        found = []
        for rank in range(self.topology.world_size):
            exchanged = rank_traffic(placed, rank, self.topology.world_size, batch_size, self.topology.local_world_size)
            found.append(
                RankForecast(
                    rank=rank,
                    lookups_ms=lookups_ms[rank],
                    network_ms=latency_ms
                    + sum(milliseconds(each, *machines.bytes_per_ms, "cpu") for each in exchanged),
                    torchrec_ms=torchrec_ms,
                    sent_bytes=sum(each.sent for each in exchanged),
                    received_bytes=sum(each.received for each in exchanged),
                    memory_bytes=memory[rank],
                    memory_later_bytes=memory_later[rank],
                )
            )
        return found


def _constraints(tables: Mapping[str, ForecastTable]) -> dict[str, RecStoreConstraints]:
    # The measured rows count. expected_rows, an estimate from before the training, would count if it is larger.
    return {
        name: RecStoreConstraints(sharding_types=list(REFINED), options=replace(table.options, expected_rows=None))
        for name, table in tables.items()
    }


def _sharder(tables: Mapping[str, ForecastTable]) -> RecStoreSharder:
    return RecStoreSharder(optimizer=next(iter(tables.values())).optimizer)


def _model(tables: Mapping[str, ForecastTable], statistics: Mapping[str, TableStatistics]) -> EmbeddingBagCollection:
    configs = [
        table_config(name, table, [f"{name}.{at}" for at in range(len(statistics[name].ids_per_sample or ()))])
        for name, table in tables.items()
    ]
    return EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
