"""The planner that places tables in RecStore."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner, SortBy
from torchrec.distributed.planner.stats import EmbeddingStats
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
    ShardingOption,
    Stats,
    Topology,
)
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from torchrec_recstore.planner.constraints import options_of
from torchrec_recstore.planner.enumerators import RecStoreEnumerator
from torchrec_recstore.planner.refining import SHARDING_TYPE_MS, check_sharding_type_ms, refined
from torchrec_recstore.planner.shortages import shortages
from torchrec_recstore.planner.statistics import TableStatistics
from torchrec_recstore.planner.stats import RecStoreStats
from torchrec_recstore.sharders import RECSTORE_KERNEL, RecStoreParameterSharding
from torchrec_recstore.sharders.plan import RecStoreModulePlan
from torchrec_recstore.torchrec_seams.planning import PlannerSeams, constraints_of

_NO_ROOM = (PlannerErrorType.INSUFFICIENT_STORAGE, PlannerErrorType.STRICT_CONSTRAINTS)


class RecStorePlanner(PlannerSeams):
    """A planner that places tables in RecStore and writes the options of each of these tables into the plan.

    Example::

        constraints = {"t_user": RecStoreConstraints(options=TableOptions(expected_rows=10_000_000))}
        planner = RecStorePlanner(topology=Topology(world_size=2, compute_device="cpu"), constraints=constraints)
        plan = planner.collective_plan(model, [RecStoreSharder()], dist.group.WORLD)

    If several collections of the model have RecStore tables with the same name, the constraint of that name applies to
    all of these tables. The initial rows of each of them also depend on the path of its collection in the model, so
    that the tables start with different rows.

    Args:
        topology: The device topology. Default: the topology of the process group.
        batch_size: The batch size of one rank. Default: TorchRec's ``BATCH_SIZE``.
        enumerator: The enumerator of the sharding options. Default: a :class:`RecStoreEnumerator`.
        args, kwargs: The other arguments of TorchRec's ``EmbeddingShardingPlanner``, in the same order. ``constraints``
            maps table names to constraints; a :class:`RecStoreConstraints` has the options of a RecStore table.
        statistics: What was measured of tables, by table name; see :func:`read_statistics` and
            :func:`measure_statistics`. With statistics, the default ``partitioner`` places the tables that take most
            time first. Default: None.
        sharding_type_ms: With statistics, the milliseconds of a step that a sharding type of a collection takes on
            every rank of several, whatever its tables are, for ``"table_wise"`` and ``"row_wise"``. Default: None,
            which means measured numbers on CPUs, and 0 on accelerators.

    Raises:
        ValueError: ``statistics`` and ``enumerator`` are both set. The enumerator takes the statistics then. Or
            ``sharding_type_ms`` has another sharding type, or a negative number, or there are no statistics.
    """

    def __init__(
        self,
        *args: Any,
        statistics: Mapping[str, TableStatistics] | None = None,
        sharding_type_ms: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        enumerator = kwargs.get("enumerator", args[2] if len(args) > 2 else None)
        if statistics and enumerator is not None:
            raise ValueError("statistics have no effect on the enumerator that is passed: pass them to the enumerator")
        check_sharding_type_ms(sharding_type_ms or {})
        if sharding_type_ms is not None and not statistics and enumerator is None:
            raise ValueError("sharding_type_ms has no effect without the statistics of tables: pass statistics, too")
        self._sharding_type_ms = sharding_type_ms
        self._statistics = dict(statistics or {})  # TorchRec's constructor makes the enumerator
        if statistics and len(args) < 6 and kwargs.get("partitioner") is None:
            # TorchRec's default places the largest tables first (torchrec 1.8.0), whatever their time is.
            kwargs["partitioner"] = GreedyPerfPartitioner(sort_by=SortBy.PERF)
        super().__init__(*args, **kwargs)

    def make_enumerator(
        self, topology: Topology, batch_size: int, constraints: dict[str, ParameterConstraints] | None
    ) -> RecStoreEnumerator:
        """Returns the enumerator of a planner whose argument ``enumerator`` is None."""
        return RecStoreEnumerator(topology, batch_size, constraints, statistics=self._statistics)

    def replace_stats(self, stats: Stats) -> Stats:
        """Replaces TorchRec's default statistics; any other statistics are the user's choice and stay."""
        return RecStoreStats() if type(stats) is EmbeddingStats else stats

    def refine(self, plan: list[ShardingOption]) -> list[ShardingOption]:
        """Returns the plan with tables of measured times moved while the step of the slowest rank becomes shorter."""
        enumerator, topology = self.searched
        if not isinstance(enumerator, RecStoreEnumerator) or topology.world_size == 1:
            return plan
        measured = {name for name, each in enumerator.statistics.items() if each.ns_per_id is not None}
        if not measured:
            return plan
        types_ms = self._sharding_type_ms
        if types_ms is None:
            types_ms = SHARDING_TYPE_MS if topology.compute_device == "cpu" else {}
        return refined(plan, enumerator.found, topology, measured, types_ms)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(constraints={dict(constraints_of(self))})"

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """Returns the plan.

        Args:
            module: The model, before sharding.
            sharders: The sharders whose modules are planned.

        Raises:
            PlannerError: No plan satisfies the constraints and the memory limits, or a constraint names a table that
                the model does not have. If memory is short, the message begins with the tables that do not fit, and
                with the memory, of the host or of the accelerator, that is too small for them.
        """
        try:
            plan: ShardingPlan = super().plan(module, sharders)
        except PlannerError as error:
            lines = self._shortages()
            if not lines or error.error_type not in _NO_ROOM:
                raise
            raise PlannerError("\n".join([*lines, "", str(error)]), error_type=error.error_type) from None
        tables = [
            (path, module_plan, name)
            for path, module_plan in plan.plan.items()
            for name, sharding in module_plan.items()
            if sharding.compute_kernel == RECSTORE_KERNEL
        ]
        times = Counter(name for *_, name in tables)
        for path, module_plan, name in tables:
            options = options_of(constraints_of(self), name)
            # Without a row name of their own, tables with the same name would make the same initial rows and would
            # share their rows in a shared cold store.
            row_name = f"{path}.{name}" if times[name] > 1 else None
            module_plan[name] = RecStoreParameterSharding.of(module_plan[name], options, row_name)
        plan.plan = {path: RecStoreModulePlan(module_plan) for path, module_plan in plan.plan.items()}
        return plan

    def _shortages(self) -> list[str]:
        enumerator, topology = self.searched
        # An enumerator of the user's class does not keep its options. TorchRec's message is all there is then.
        return shortages(enumerator.found, topology) if isinstance(enumerator, RecStoreEnumerator) else []
