"""The planner's log of the rows and bytes that it assumed for RecStore tables."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import nn
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.stats import EmbeddingStats
from torchrec.distributed.planner.types import Enumerator, ParameterConstraints, ShardingOption, Topology
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from torchrec_recstore.options import TableOptions
from torchrec_recstore.planner.bus import bus_bytes_of
from torchrec_recstore.planner.constraints import options_of, planned_rows
from torchrec_recstore.planner.enumerators import RecStoreEnumerator
from torchrec_recstore.planner.statistics import TableStatistics
from torchrec_recstore.sharders import RECSTORE_KERNEL

# TorchRec logs its statistics of the plan here (torchrec 1.8.0), so that both are shown or neither is.
logger = logging.getLogger("torchrec.distributed.planner.stats")


class RecStoreStats(EmbeddingStats):  # type: ignore[misc]
    """A logger of a plan's statistics that adds the rows and bytes assumed for the RecStore tables.

    If the topology has an accelerator, it also adds the bytes over the bus.
    """

    def log(
        self,
        sharding_plan: ShardingPlan,
        topology: Topology,
        *args: Any,
        best_plan: list[ShardingOption],
        constraints: dict[str, ParameterConstraints] | None = None,
        enumerator: Enumerator | None = None,
        **kwargs: Any,
    ) -> None:
        """Logs the statistics of a plan. See TorchRec's ``EmbeddingStats``; the arguments are the same."""
        super().log(
            sharding_plan,
            topology,
            *args,
            best_plan=best_plan,
            constraints=constraints,
            enumerator=enumerator,
            **kwargs,
        )
        statistics = enumerator.statistics if isinstance(enumerator, RecStoreEnumerator) else {}
        for line in assumed(best_plan, constraints, statistics):
            logger.info(line)
        if topology.compute_device != "cpu" and isinstance(enumerator, EmbeddingEnumerator):
            for line in copied(best_plan, topology, constraints, enumerator.sharder_map):
                logger.info(line)


def assumed(
    options: list[ShardingOption],
    constraints: dict[str, ParameterConstraints] | None,
    statistics: Mapping[str, TableStatistics] = MappingProxyType({}),
) -> list[str]:
    """Returns one line of text for each RecStore table.

    A line has the resident rows of the table over all ranks, and the GiB that the table takes on each rank. The bytes
    include the rows with their optimizer state, index and bookkeeping, the counter of sightings, and the table's inputs
    and outputs.
    """
    lines = []
    dynamic = [option for option in options if option.compute_kernel == RECSTORE_KERNEL]
    times = Counter(option.name for option in dynamic)
    for option in sorted(dynamic, key=lambda o: (o.name, o.path)):
        name = option.name if times[option.name] == 1 else f"{option.path}.{option.name}"
        asked = options_of(constraints, option.name)
        if asked.servers is not None:
            lines.append(f"RecStore table {name!r} is on the servers {', '.join(asked.servers.addresses)}")
            continue
        measured = statistics.get(option.name)
        rows = planned_rows(asked, option.tensor.shape[0], measured)
        ranks = ", ".join(f"rank {s.rank}: {s.storage.ddr / 2**30:.3f} GiB" for s in option.shards)
        lines.append(
            f"RecStore table {name!r}: {rows:,} resident rows assumed ({_source(asked, rows, measured)}); {ranks}"
        )
    return lines


def copied(
    options: list[ShardingOption],
    topology: Topology,
    constraints: dict[str, ParameterConstraints] | None,
    sharders: Mapping[str, ModuleSharder[nn.Module]],
) -> list[str]:
    """Returns one line of text for each rank with the bytes that its RecStore tables copy over the bus in a step.

    Args:
        options: The options of the plan.
        topology: The topology of the plan, with an accelerator.
        constraints: The constraints, by table name.
        sharders: The sharders, by ``module_type_key`` of the options.
    """
    down: Counter[int] = Counter()
    up: Counter[int] = Counter()
    for option in options:
        if option.compute_kernel == RECSTORE_KERNEL:
            for shard, each in zip(option.shards, bus_bytes_of(option, topology, constraints, sharders), strict=True):
                down[shard.rank] += round(each.down)
                up[shard.rank] += round(each.up)
    return [
        f"RecStore tables of rank {rank} copy in a step {down[rank] / 2**20:.3f} MiB to the host and "
        f"{up[rank] / 2**20:.3f} MiB to {topology.compute_device}"
        for rank in sorted(down)
    ]


def _source(options: TableOptions, rows: int, measured: TableStatistics | None) -> str:
    """Returns the option that the number of resident rows comes from."""
    if measured is not None and rows == measured.rows:
        return "measured"
    if rows == options.max_rows and rows != options.expected_rows:
        return "max_rows"
    return "expected_rows" if options.expected_rows is not None else "no expected_rows: num_embeddings, at most 2**20"
