"""Which shardings the planner may choose from."""

from __future__ import annotations

from torch import nn
from torchrec.distributed.planner.constants import BATCH_SIZE
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.estimator import EmbeddingPerfEstimatorFactory
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
    ShardEstimator,
    ShardingOption,
    Topology,
)
from torchrec.distributed.types import ModuleSharder

from torchrec_recstore.planner.shard_estimators import RecStoreStorageEstimator
from torchrec_recstore.sharders import (
    RECSTORE_KERNEL,
    RecStoreCollectionSharder,
    RecStoreFeatureProcessedEmbeddingBagCollectionSharder,
)
from torchrec_recstore.sharders.perf import RecStorePerfConfig
from torchrec_recstore.sharders.plan import asks_for_recstore

_Sharder = RecStoreCollectionSharder | RecStoreFeatureProcessedEmbeddingBagCollectionSharder


class RecStoreEnumerator(EmbeddingEnumerator):  # type: ignore[misc]
    """TorchRec's enumerator, which lets constraints move single tables of a RecStore sharder to TorchRec's kernels.

    A table is enumerated in RecStore unless its constraint names other kernels; naming ``data_parallel`` alone as its
    sharding type also does. Constraints for tables that no module has are refused.

    Args:
        topology: device topology.
        batch_size: batch size a rank.
        constraints: by table name.
        estimator: TorchRec's estimates with RecStore's by default.
        use_exact_enumerate_order: as TorchRec's.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int = BATCH_SIZE,
        constraints: dict[str, ParameterConstraints] | None = None,
        estimator: ShardEstimator | list[ShardEstimator] | None = None,
        use_exact_enumerate_order: bool = False,
    ) -> None:
        if estimator is None:
            estimator = [
                EmbeddingPerfEstimatorFactory.create_with_config(
                    RecStorePerfConfig(), topology=topology, constraints=constraints
                ),
                RecStoreStorageEstimator(topology=topology, constraints=constraints),
            ]
        super().__init__(topology, batch_size, constraints, estimator, use_exact_enumerate_order)
        self._offers: dict[int, _Sharder] = {}

    def enumerate(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> list[ShardingOption]:
        """The options of every table.

        Raises:
            PlannerError: constraints for an unknown table, or ones that leave a table without options.
        """
        constraints: dict[str, ParameterConstraints] = self._constraints or {}
        try:
            enumerated = super().enumerate(module, [self._offer(sharder) for sharder in sharders])
        except RuntimeError as error:
            # How torchrec 1.8.0 says that constraints leave a table without options.
            if not str(error).startswith("No available sharding type"):
                raise
            raise PlannerError(f"{error}\n{_WHAT_GOES}", error_type=PlannerErrorType.STRICT_CONSTRAINTS) from error
        self._check_names({option.name for option in enumerated}, constraints)
        mine = {key for key, sharder in self.sharder_map.items() if isinstance(sharder, _Sharder)}
        return [o for o in enumerated if o.module_type_key not in mine or _wanted(o, constraints.get(o.name))]

    def _offer(self, sharder: ModuleSharder[nn.Module]) -> ModuleSharder[nn.Module]:
        if not isinstance(sharder, _Sharder):
            return sharder
        # One copy a sharder: the stock enumerator recognises a repeated call by the identity of the sharders.
        return self._offers.setdefault(id(sharder), sharder.with_stock_kernels())

    def _check_names(self, known: set[str], constraints: dict[str, ParameterConstraints]) -> None:
        elsewhere = {n for n, c in constraints.items() if c.device_group and c.device_group != self._compute_device}
        unknown = sorted(set(constraints) - known - elsewhere)
        if unknown:
            raise PlannerError(
                f"constraints for unknown table(s) {', '.join(map(repr, unknown))}; the model's tables are "
                f"{', '.join(map(repr, sorted(known)))}",
                error_type=PlannerErrorType.INPUT_VALIDATION,
            )


_WHAT_GOES = (
    f"RecStore (compute kernel {RECSTORE_KERNEL!r}) shards by tables, columns and rows, sequence tables only "
    "table-, column- and row-wise; TorchRec's own pooled kernels do not shard by rows on CPU, and only they are "
    "data-parallel."
)


def _wanted(option: ShardingOption, constraint: ParameterConstraints | None) -> bool:
    """Whether an option for a table of a RecStore sharder is one that its constraint asks for."""
    if constraint is None or not constraint.compute_kernels:
        return not asks_for_recstore(constraint) or bool(option.compute_kernel == RECSTORE_KERNEL)
    kernels: list[str] = constraint.compute_kernels
    return option.compute_kernel in kernels
