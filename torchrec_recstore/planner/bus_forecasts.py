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
    """The bytes of a step of one shard, and the time of those of a step on the host."""

    up: float
    """To the GPU."""
    down: float
    """To the host."""
    on_host: float
    """The bytes of both ways if the table has no row on the GPU."""

    @property
    def bytes(self) -> float:
        """The bytes of both ways."""
        return self.up + self.down


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
    shards_bytes = bus_bytes_of(option, topology, constraints, sharders)
    for shard, copied in zip(option.shards, shards_bytes, strict=True):
        up, down = copied.up, copied.down
        if device_rows:
            # the bytes of the ids and of the offsets of bags, which are 8 bytes each
            up = copied.ids * _NUMBER_BYTES / _ID_BYTES
            row_bytes = device_row_bytes(option, shard.size[1], optimizer)
            moved = _arrivals(option, topology, measured)
            moved *= shard.size[0] / option.tensor.shape[0]
            up += moved * (row_bytes + 2 * _NUMBER_BYTES)
            down = copied.ids + moved * row_bytes
        forecasts.append(BusForecast(up, down, copied.up + copied.down))
    return forecasts


def _arrivals(
    option: ShardingOption, topology: Topology, measured: TableStatistics
) -> float:
    """Returns the rows of a batch of all ranks that are not on the GPU before it."""
    ids = topology.world_size * option.batch_size * sum(measured.ids_per_sample or ())
    unique_share = 1.0 if measured.unique_share is None else measured.unique_share
    hot_share = measured.hot_share or 0.0
    return float(ids * unique_share * (1 - hot_share))
