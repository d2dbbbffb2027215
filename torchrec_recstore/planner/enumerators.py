"""The enumerator of the sharding options from which the planner chooses.

Tests: tests/planner/test_planners.py, tests/planner/test_statistics.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

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
from torchrec.distributed.types import ModuleSharder, ShardingType

from torchrec_recstore.planner.constraints import RecStoreConstraints, with_statistics
from torchrec_recstore.planner.shard_estimators import MeasuredPerfConfig, RecStoreStorageEstimator, lookup_type
from torchrec_recstore.planner.statistics import TableStatistics
from torchrec_recstore.sharders import (
    RECSTORE_KERNEL,
    RecStoreCollectionSharder,
    RecStoreFeatureProcessedEmbeddingBagCollectionSharder,
)
from torchrec_recstore.sharders.perf_config import MeasuredSpeed
from torchrec_recstore.sharders.plan_entries import asks_for_recstore
from torchrec_recstore.torchrec_seams.planning import compute_device, constraints_of

_Sharder = RecStoreCollectionSharder | RecStoreFeatureProcessedEmbeddingBagCollectionSharder

_SUPPORT = (
    f"RecStore (compute kernel {RECSTORE_KERNEL!r}) supports every sharding type but data_parallel for pooled tables, "
    "and table_wise, column_wise and row_wise for sequence tables. TorchRec's own kernels support data_parallel; on "
    "CPU, they do not shard pooled tables by rows."
)


class RecStoreEnumerator(EmbeddingEnumerator):  # type: ignore[misc]
    """An enumerator whose constraints can place single tables of a RecStore sharder on TorchRec's kernels.

    The sharding options of a table use RecStore's kernel unless the table's constraint names other kernels in
    ``compute_kernels``, or has ``data_parallel`` as its only sharding type.

    Args:
        topology: The device topology.
        batch_size: The batch size of one rank. Default: TorchRec's ``BATCH_SIZE``.
        constraints: The constraints, by table name. Default: None.
        estimator: The estimators of performance and storage. Default: TorchRec's for its own kernels, and RecStore's
            for RecStore tables.
        use_exact_enumerate_order: As in TorchRec's ``EmbeddingEnumerator``. Default: False.
        statistics: What was measured of tables, by table name. The measured rows and ids of a sample count in all
            estimates, and the measured times replace TorchRec's formulas for RecStore tables. Default: None.

    Raises:
        ValueError: The constraint of a table is for another number of features than was measured.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int = BATCH_SIZE,
        constraints: dict[str, ParameterConstraints] | None = None,
        estimator: ShardEstimator | list[ShardEstimator] | None = None,
        use_exact_enumerate_order: bool = False,
        *,
        statistics: Mapping[str, TableStatistics] | None = None,
    ) -> None:
        self.statistics = dict(statistics or {})
        if self.statistics:
            constraints = with_statistics(constraints, self.statistics)
        if estimator is None:
            measured = {
                name: MeasuredSpeed(each.ns_per_id, each.hottest_share or 0)
                for name, each in self.statistics.items()
                if each.ns_per_id is not None
            }
            estimator = [
                EmbeddingPerfEstimatorFactory.create_with_config(
                    MeasuredPerfConfig(measured), topology=topology, constraints=constraints
                ),
                RecStoreStorageEstimator(topology=topology, constraints=constraints, statistics=self.statistics),
            ]
        super().__init__(topology, batch_size, constraints, estimator, use_exact_enumerate_order)
        self._offers: dict[int, _Sharder] = {}
        self.found: list[ShardingOption] = []
        """The options that the last call of :meth:`enumerate` has returned."""

    def enumerate(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> list[ShardingOption]:
        """Returns the sharding options of every table that one of ``sharders`` can shard.

        Raises:
            PlannerError: A constraint names a table that the model does not have, or the constraints leave no option
                for a table.
        """
        constraints: Mapping[str, ParameterConstraints] = constraints_of(self)
        try:
            with _without_warnings_of_data_parallel():
                enumerated = super().enumerate(module, [self._offer(sharder) for sharder in sharders])
        except RuntimeError as error:
            # torchrec 1.8.0 raises this error if the constraints leave a table without options.
            if not str(error).startswith("No available sharding type"):
                raise
            raise PlannerError(f"{error}\n{_SUPPORT}", error_type=PlannerErrorType.STRICT_CONSTRAINTS) from error
        names = {option.name for option in enumerated}
        here = {name for name, c in constraints.items() if c.device_group in (None, "", compute_device(self))}
        _check_names("statistics of", names, set(self.statistics))
        _check_names("constraints for", names, here)
        mine = {key for key, sharder in self.sharder_map.items() if isinstance(sharder, _Sharder)}
        wanted = [o for o in enumerated if o.module_type_key not in mine or _wanted(o, constraints.get(o.name))]
        for name in names - {option.name for option in wanted}:
            if _on_servers(constraints.get(name)):
                raise PlannerError(
                    f"no sharding option is left for table {name!r}: servers distribute its rows, so that its sharding "
                    "type must be table_wise",
                    error_type=PlannerErrorType.STRICT_CONSTRAINTS,
                )
        self.found = wanted
        return wanted

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Estimates the options. The estimates of RecStore tables depend on the ``output_dtype`` of their lookups.

        If the constraint of a table has none, TorchRec takes the dtype of the rows, and not the one of ``fused_params``
        (torchrec 1.8.0).
        """
        unset = [o for o in sharding_options if o.compute_kernel == RECSTORE_KERNEL and o.output_dtype is None]
        for option in unset:
            option.output_dtype = lookup_type(option, self.sharder_map)
        super().populate_estimates(sharding_options)
        for option in unset:  # The plan does not fix the dtype: fused_params may differ when the model is sharded.
            option.output_dtype = None

    def _offer(self, sharder: ModuleSharder[nn.Module]) -> ModuleSharder[nn.Module]:
        if not isinstance(sharder, _Sharder):
            return sharder
        # Each sharder gets one copy only: the stock enumerator detects a repeated call by the identity of the sharders.
        return self._offers.setdefault(id(sharder), sharder.with_stock_kernels())


def _check_names(what: str, known: set[str], named: set[str]) -> None:
    if unknown := sorted(named - known):
        raise PlannerError(
            f"{what} unknown table(s) {', '.join(map(repr, unknown))}; the model's tables are "
            f"{', '.join(map(repr, sorted(known)))}",
            error_type=PlannerErrorType.INPUT_VALIDATION,
        )


@contextmanager
def _without_warnings_of_data_parallel() -> Iterator[None]:
    """Drops the stock enumerator's warning that RecStore's kernel has no data-parallel sharding.

    A RecStore sharder offers data_parallel to tables on TorchRec's kernels only, and TorchRec (1.7.0 to 1.9.2) warns of
    every sharding type that the kernels of a constraint leave out.
    """

    def wanted(record: logging.LogRecord) -> bool:
        said = record.getMessage()
        ours = f"Constrained compute kernels: ['{RECSTORE_KERNEL}']" in said and "data_parallel" in said
        return not (ours and said.startswith("No available compute kernels"))

    logger = logging.getLogger(EmbeddingEnumerator.__module__)
    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)


def _on_servers(constraint: ParameterConstraints | None) -> bool:
    return isinstance(constraint, RecStoreConstraints) and constraint.options.servers is not None


def _wanted(option: ShardingOption, constraint: ParameterConstraints | None) -> bool:
    """Returns whether the constraint of a RecStore sharder's table allows the option's kernel."""
    in_recstore = bool(option.compute_kernel == RECSTORE_KERNEL)
    if _on_servers(constraint) and in_recstore and option.sharding_type != ShardingType.TABLE_WISE.value:
        return False
    if constraint is None or not constraint.compute_kernels:
        return not asks_for_recstore(constraint) or in_recstore
    return bool(option.compute_kernel in constraint.compute_kernels)
