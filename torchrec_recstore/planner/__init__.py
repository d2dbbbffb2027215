"""Planning: constraints, enumeration and estimates for models with RecStore tables."""

from torchrec_recstore.planner.constraints import RecStoreConstraints
from torchrec_recstore.planner.planners import RecStoreEnumerator, RecStorePlanner
from torchrec_recstore.planner.shard_estimators import RecStoreStorageEstimator
from torchrec_recstore.planner.statistics import (
    TableStatistics,
    combined_statistics,
    measure_statistics,
    read_statistics,
    write_statistics,
)

__all__ = [
    "RecStoreConstraints",
    "RecStoreEnumerator",
    "RecStorePlanner",
    "RecStoreStorageEstimator",
    "TableStatistics",
    "combined_statistics",
    "measure_statistics",
    "read_statistics",
    "write_statistics",
]
