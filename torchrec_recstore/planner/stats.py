"""What the planner assumed of RecStore tables, for people to read."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from torchrec.distributed.planner.stats import EmbeddingStats
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption
from torchrec.distributed.types import ShardingPlan

from torchrec_recstore.options import TableOptions, resident_rows
from torchrec_recstore.planner.constraints import options_of
from torchrec_recstore.sharders import RECSTORE_KERNEL

# Where TorchRec's own table of the plan goes, so that both are shown or neither is (torchrec 1.8.0).
logger = logging.getLogger("torchrec.distributed.planner.stats")


class RecStoreStats(EmbeddingStats):  # type: ignore[misc]
    """TorchRec's statistics of a plan, and after them the rows and bytes that RecStore tables were planned with."""

    def log(
        self,
        sharding_plan: ShardingPlan,
        *args: Any,
        best_plan: list[ShardingOption],
        constraints: dict[str, ParameterConstraints] | None = None,
        **kwargs: Any,
    ) -> None:
        """Logs both, with TorchRec's arguments."""
        super().log(sharding_plan, *args, best_plan=best_plan, constraints=constraints, **kwargs)
        for line in assumed(best_plan, constraints):
            logger.info(line)


def assumed(options: list[ShardingOption], constraints: dict[str, ParameterConstraints] | None) -> list[str]:
    """A line a RecStore table: resident rows over all ranks and, on each rank, bytes in GiB; empty where there is none.

    The bytes count the rows with their optimizer state, index and bookkeeping, the counter of sightings, and the
    table's inputs and outputs.
    """
    lines = []
    dynamic = [option for option in options if option.compute_kernel == RECSTORE_KERNEL]
    times = Counter(option.name for option in dynamic)
    for option in sorted(dynamic, key=lambda o: (o.name, o.path)):
        name = option.name if times[option.name] == 1 else f"{option.path}.{option.name}"
        asked = options_of(constraints, option.name)
        rows = resident_rows(asked, option.tensor.shape[0])
        ranks = ", ".join(f"rank {s.rank}: {s.storage.ddr / 2**30:.3f} GiB" for s in option.shards)
        lines.append(f"RecStore table {name!r}: {rows:,} resident rows assumed ({_source(asked, rows)}); {ranks}")
    return lines


def _source(options: TableOptions, rows: int) -> str:
    """Which option the resident rows come from."""
    if rows == options.max_rows and rows != options.expected_rows:
        return "max_rows"
    return "expected_rows" if options.expected_rows is not None else "no expected_rows: num_embeddings, at most 2**20"
