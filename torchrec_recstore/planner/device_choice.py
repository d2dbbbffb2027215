"""The planner's choice of tables with rows in the memory of a GPU.

Tests: tests/planner/test_device_rows.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    ShardingOption,
    Storage,
    Topology,
)
from torchrec.distributed.types import ModuleSharder

from torchrec_recstore.kernels.device_interface import unsupported
from torchrec_recstore.optim import Optimizer
from torchrec_recstore.planner.constraints import planned_options, planned_rows
from torchrec_recstore.planner.shard_estimators import (
    device_row_bytes,
    device_slot_bytes,
    dtype_of,
)
from torchrec_recstore.planner.statistics import HOT_PART, TableStatistics
from torchrec_recstore.sharders import RECSTORE_KERNEL
from torchrec_recstore.sharders.fused_params import (
    optimizer_from_fused_params,
    state_dtype,
)
from torchrec_recstore.sharders.plan_entries import with_marks
from torchrec_recstore.utils import ceil_div

LEAST_HOT_SHARE = 0.5
"""The least ``hot_share`` of a table that gets rows on the device."""
_PART_OF_FREE = 0.5
"""The part of the memory that the plan leaves, which is an estimate, for rows."""


@dataclass(frozen=True)
class _Candidate:
    option: ShardingOption
    rows: int  # over all ranks
    hot_share: float
    optimizer: Optimizer


def chosen_device_rows(
    plan: Sequence[ShardingOption],
    topology: Topology,
    constraints: Mapping[str, ParameterConstraints],
    statistics: Mapping[str, TableStatistics],
    sharders: Mapping[str, ModuleSharder[nn.Module]],
) -> dict[tuple[str, str], int]:
    """Returns the ``device_rows`` of the tables of a plan for GPUs whose options leave
    them open, by the path of the collection and the name of the table.

    A table gets one in ``HOT_PART`` of its rows if at least ``LEAST_HOT_SHARE`` of the
    ids of a batch were measured to be among them, if they have room for the distinct ids
    of a batch of all ranks, and if they fit into half of the memory that the plan leaves
    on each of its ranks. Tables with a larger share come first.
    The storage of the shards in the plan then has the rows.

    The sharders are by ``option.module_type_key``.
    """
    free = {device.rank: device.storage.hbm or 0 for device in topology.devices}
    for option in plan:
        for shard in option.shards:
            free[shard.rank] -= shard.storage.hbm
    for rank, size in free.items():
        free[rank] = int(size * _PART_OF_FREE)

    candidates = []
    for option in plan:
        candidate = _candidate(
            option,
            topology.world_size,
            constraints,
            statistics,
            sharders,
        )
        if candidate is not None:
            candidates.append(candidate)
    candidates.sort(key=lambda candidate: -candidate.hot_share)

    chosen = {}
    for candidate in candidates:
        if _placed(candidate, free):
            option = candidate.option
            chosen[option.path, option.name] = candidate.rows
    return chosen


def _candidate(
    option: ShardingOption,
    world_size: int,
    constraints: Mapping[str, ParameterConstraints],
    statistics: Mapping[str, TableStatistics],
    sharders: Mapping[str, ModuleSharder[nn.Module]],
) -> _Candidate | None:
    """Returns a table that can have rows on the device, or None."""
    measured = statistics.get(option.name)
    hot_share = 0.0
    if measured is not None and measured.hot_share is not None:
        hot_share = measured.hot_share
    if option.compute_kernel != RECSTORE_KERNEL or hot_share < LEAST_HOT_SHARE:
        return None

    num_embeddings = option.tensor.shape[0]
    options = planned_options(
        constraints,
        option.name,
        num_embeddings,
        measured,
    )
    is_read_only = options.frozen or not option.tensor.requires_grad
    if options.device_rows is not None or options.servers or is_read_only:
        return None

    sharder = sharders[option.module_type_key]
    fused_params = dict(sharder.fused_params or {})
    params = with_marks(fused_params, option.tensor)
    optimizer = optimizer_from_fused_params(params, [option.name])
    narrow_state = state_dtype(params, [option.name])
    if unsupported(dtype_of(option), narrow_state, optimizer) is not None:
        return None

    all_rows = planned_rows(options, num_embeddings, measured)
    rows = ceil_div(all_rows, HOT_PART)
    samples = world_size * option.batch_size
    if measured is not None and rows < measured.distinct_ids(samples):
        return None
    return _Candidate(option, rows, hot_share, optimizer)


def _placed(candidate: _Candidate, free: dict[int, int]) -> bool:
    """Takes the memory of a table's rows from what is free on its ranks, and adds it to
    the storage of its shards. Returns whether there is room.
    """
    option = candidate.option
    table_rows = option.tensor.shape[0]
    needed: dict[int, int] = {}
    storages = []
    for shard in option.shards:
        shard_rows, shard_columns = shard.size
        rows = ceil_div(candidate.rows * shard_rows, table_rows)
        row_bytes = device_row_bytes(
            option,
            shard_columns,
            candidate.optimizer,
        )
        hbm = rows * row_bytes
        ddr = device_slot_bytes(rows, rows * HOT_PART)
        needed_before = needed.get(shard.rank, 0)
        needed[shard.rank] = needed_before + hbm
        storages.append(Storage(hbm=hbm, ddr=ddr))

    for rank, size in needed.items():
        if size > free[rank]:
            return False
    for rank, size in needed.items():
        free[rank] -= size
    for shard, storage in zip(option.shards, storages, strict=True):
        shard.storage = shard.storage + storage
    return True
