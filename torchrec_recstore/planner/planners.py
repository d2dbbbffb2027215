"""A planner that places tables in RecStore."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.stats import EmbeddingStats
from torchrec.distributed.planner.types import Enumerator, Stats, Topology
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from torchrec_recstore.planner.constraints import options_of
from torchrec_recstore.planner.enumerators import RecStoreEnumerator
from torchrec_recstore.planner.stats import RecStoreStats
from torchrec_recstore.sharders import RECSTORE_KERNEL, RecStoreParameterSharding
from torchrec_recstore.sharders.plan import RecStoreModulePlan


class RecStorePlanner(EmbeddingShardingPlanner):  # type: ignore[misc]
    """TorchRec's planner, whose plans take each RecStore table's options to every rank.

    Example::

        constraints = {"t_user": RecStoreConstraints(options=TableOptions(expected_rows=10_000_000))}
        planner = RecStorePlanner(topology=Topology(world_size=2, compute_device="cpu"), constraints=constraints)
        plan = planner.collective_plan(model, [RecStoreSharder()], dist.group.WORLD)

    Where several collections of the model have a RecStore table of one name, the constraint of that name is for each of
    them, and each makes its initial rows by the path of its collection too, so that they differ.

    Args:
        topology: device topology; by default that of the process group.
        batch_size: batch size a rank.
        enumerator: a :class:`RecStoreEnumerator` by default.
        args, kwargs: TorchRec's other arguments, in its order; ``constraints`` by table name, of which
            :class:`RecStoreConstraints` give RecStore tables their options.
    """

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        enumerator: Enumerator | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(topology, batch_size, enumerator, *args, **kwargs)
        if enumerator is None:
            # Only after the base class has found the topology; it offers no hook (torchrec 1.8.0).
            self._enumerator = RecStoreEnumerator(self._topology, self._batch_size, self._constraints)
        # The same for statistics; others than TorchRec's default are the user's own choice.
        self._stats: list[Stats] = [
            RecStoreStats() if type(stats) is EmbeddingStats else stats for stats in self._stats
        ]

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """The plan.

        Raises:
            PlannerError: no plan satisfies constraints and memory, or a constraint names an unknown table.
        """
        plan: ShardingPlan = super().plan(module, sharders)
        tables = [
            (path, module_plan, name)
            for path, module_plan in plan.plan.items()
            for name, sharding in module_plan.items()
            if sharding.compute_kernel == RECSTORE_KERNEL
        ]
        times = Counter(name for *_, name in tables)
        for path, module_plan, name in tables:
            options = options_of(self._constraints, name)
            # Tables of one name would make the same initial rows, and share rows in a shared cold store.
            row_name = f"{path}.{name}" if times[name] > 1 else None
            module_plan[name] = RecStoreParameterSharding.of(module_plan[name], options, row_name)
        plan.plan = {path: RecStoreModulePlan(module_plan) for path, module_plan in plan.plan.items()}
        return plan
