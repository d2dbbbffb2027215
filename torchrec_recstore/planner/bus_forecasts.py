"""The bytes between a host and its GPUs in a step, with rows in the memory of the GPU.

Tests: tests/planner/test_bus_forecasts.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    ShardingOption,
    Topology,
)
from torchrec.distributed.types import ModuleSharder

from torchrec_recstore.optim import Optimizer
from torchrec_recstore.planner.shard_estimators import bus_bytes_of, device_row_bytes
from torchrec_recstore.planner.statistics import TableStatistics

_ID_BYTES = 8
_NUMBER_BYTES = 4
"""The bytes of the number of a row, an offset, a place of a row that moves, or a weight
of an id.
"""


@dataclass(frozen=True)
class BusForecast:
    """The bytes of one shard in a step, of both ways together."""

    copied: float
    copied_without_device_rows: float
    """Those that a step would copy if the table had no row on the GPU."""


def bus_forecasts(
    option: ShardingOption,
    topology: Topology,
    constraints: dict[str, ParameterConstraints] | None,
    sharders: Mapping[str, ModuleSharder[nn.Module]],
    measured: TableStatistics,
    device_rows: int,
    optimizer: Optimizer,
) -> list[BusForecast]:
    """Returns the bytes of a training step, for each shard of a pooled table without
    weights.

    Without ``device_rows`` they are those of the pooled rows and of their gradients.
    With ``device_rows`` a step copies the ids of the batch down, and the number of each
    id's row and the offsets up; the share of the distinct ids that ``hot_share`` does
    not have arrives, and as many rows leave.

    ``measured`` has ``ids_per_sample``. The sharders are by ``option.module_type_key``.
    """
    forecasts = []
    samples = topology.world_size * option.batch_size
    distinct_ids = measured.distinct_ids(samples)
    cold_share = 1 - (measured.hot_share or 0.0)
    table_rows = option.tensor.shape[0]
    shards_bytes = bus_bytes_of(option, topology, constraints, sharders)
    for shard, copied in zip(option.shards, shards_bytes, strict=True):
        without_device_rows = copied.up + copied.down
        if not device_rows:
            forecasts.append(BusForecast(without_device_rows, without_device_rows))
            continue

        shard_rows, shard_columns = shard.size
        moved = distinct_ids * cold_share
        moved *= shard_rows / table_rows
        row_bytes = device_row_bytes(option, shard_columns, optimizer)
        # the number of each id's row, and the offset of each bag, for 8 bytes each down
        up = copied.ids * _NUMBER_BYTES / _ID_BYTES
        up += moved * (row_bytes + 2 * _NUMBER_BYTES)
        down = copied.ids + moved * row_bytes
        forecasts.append(BusForecast(up + down, without_device_rows))
    return forecasts
