"""The planner of RecStore tables, its enumerator, its log and its errors.

Tests: tests/planner/test_planners.py, tests/planner/test_statistics.py.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from torch import nn
from torchrec.distributed.planner.constants import BATCH_SIZE
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.estimator import EmbeddingPerfEstimatorFactory
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner, SortBy
from torchrec.distributed.planner.stats import EmbeddingStats
from torchrec.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
    ShardEstimator,
    ShardingOption,
    Stats,
    Topology,
)
from torchrec.distributed.types import ModuleSharder, ShardingPlan, ShardingType

from torchrec_recstore.options import TableOptions
from torchrec_recstore.planner.constraints import (
    RecStoreConstraints,
    options_of,
    planned_options,
    planned_rows,
    with_statistics,
)
from torchrec_recstore.planner.device_choice import chosen_device_rows
from torchrec_recstore.planner.left_out import (
    check_sharders,
    rank_bytes,
    refuse_left_out,
)
from torchrec_recstore.planner.refining import (
    SHARDING_TYPE_MS,
    check_sharding_type_ms,
    refined,
)
from torchrec_recstore.planner.shard_estimators import (
    MeasuredPerfConfig,
    RecStoreStorageEstimator,
    bus_bytes_of,
    lookup_type,
)
from torchrec_recstore.planner.statistics import TableStatistics
from torchrec_recstore.sharders import (
    RECSTORE_KERNEL,
    RecStoreCollectionSharder,
    RecStoreFeatureProcessedEmbeddingBagCollectionSharder,
    RecStoreParameterSharding,
)
from torchrec_recstore.sharders.perf_config import MeasuredSpeed
from torchrec_recstore.sharders.plan_entries import (
    RecStoreModulePlan,
    asks_for_recstore,
    warn_of_overridden,
)
from torchrec_recstore.torchrec_seams.planning import (
    PlannerSeams,
    compute_device,
    constraints_of,
)

# TorchRec logs its statistics of the plan here (torchrec 1.8.0), so that both are shown
# or neither is.
logger = logging.getLogger("torchrec.distributed.planner.stats")

_NO_ROOM = (PlannerErrorType.INSUFFICIENT_STORAGE, PlannerErrorType.STRICT_CONSTRAINTS)
_MOST_NAMED = 5
_Sharder = (
    RecStoreCollectionSharder | RecStoreFeatureProcessedEmbeddingBagCollectionSharder
)


class RecStoreEnumerator(EmbeddingEnumerator):  # type: ignore[misc]
    """An enumerator that can place tables of a RecStore sharder on TorchRec's kernels.

    The sharding options of a table use RecStore's kernel unless the table's constraint
    names other kernels in ``compute_kernels``, or has ``data_parallel`` as its only
    sharding type.

    Args:
        topology: The device topology.
        batch_size: The batch size of one rank. Default: TorchRec's ``BATCH_SIZE``.
        constraints: The constraints, by table name. Default: None.
        estimator: The estimators of performance and storage. Default: TorchRec's for
            its own kernels, and RecStore's for RecStore tables.
        use_exact_enumerate_order: As in TorchRec's ``EmbeddingEnumerator``. Default:
            False.
        statistics: What was measured of tables, by table name. The measured rows and
            ids of a sample count in all estimates, and the measured times replace
            TorchRec's formulas for RecStore tables. Default: None.

    Raises:
        ValueError: The constraint of a table is for another number of features than was
            measured.
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
            estimator = self._measured_estimators(topology, constraints)
        super().__init__(
            topology,
            batch_size,
            constraints,
            estimator,
            use_exact_enumerate_order,
        )
        self._rank_bytes = rank_bytes(topology)
        self._offers: dict[int, _Sharder] = {}
        self.found: list[ShardingOption] = []
        """The options that the last call of :meth:`enumerate` has returned."""
        self.device_rows: dict[tuple[str, str], int] = {}
        """The ``device_rows`` that a planner has chosen, by the path of the collection
        and the name of the table.
        """

    def _measured_estimators(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints] | None,
    ) -> list[ShardEstimator]:
        """Returns the estimators of performance and storage with the statistics."""
        speeds = {}
        for name, table in self.statistics.items():
            if table.ns_per_id is not None:
                hottest_share = table.hottest_share or 0
                speeds[name] = MeasuredSpeed(table.ns_per_id, hottest_share)
        performance = EmbeddingPerfEstimatorFactory.create_with_config(
            MeasuredPerfConfig(speeds),
            topology=topology,
            constraints=constraints,
        )
        storage = RecStoreStorageEstimator(
            topology=topology,
            constraints=constraints,
            statistics=self.statistics,
        )
        return [performance, storage]

    def enumerate(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]],
    ) -> list[ShardingOption]:
        """Returns the sharding options of every table that a sharder can shard.

        Raises:
            TypeError: ``sharders`` is not a list of sharders.
            PlannerError: A constraint names a table that the model does not have, or
                the constraints leave no option for a table. Or no sharder takes a
                collection that RecStore can hold, and a table of the collection has
                constraints or is larger than the memory of a rank. Or the sharder of a
                table whose constraints ask for RecStore is not one of RecStore's.
        """
        constraints: Mapping[str, ParameterConstraints] = constraints_of(self)
        self.found = []
        self.device_rows = {}
        check_sharders(module, sharders, constraints)
        if any(isinstance(sharder, _Sharder) for sharder in sharders):
            described = {*constraints, *self.statistics}
            refuse_left_out(module, sharders, described, self._rank_bytes)
            warn_of_overridden(sharders, module, constraints)
        offered_sharders = [self._offer(sharder) for sharder in sharders]
        try:
            with _without_warnings_of_data_parallel():
                enumerated = super().enumerate(module, offered_sharders)
        except RuntimeError as error:
            # torchrec 1.8.0 raises this error if the constraints leave a table without
            # options.
            message = str(error)
            if not message.startswith("No available sharding type"):
                raise
            match = re.search(
                r" constraints for (.+)\. Module: (.+), sharder: ",
                message,
            )
            if match and match[1] in constraints:
                message = self._without_option(table=match[1], sharder_key=match[2])
            raise PlannerError(
                message,
                error_type=PlannerErrorType.STRICT_CONSTRAINTS,
            ) from error
        sharder_keys = {option.name: option.module_type_key for option in enumerated}
        model_tables = set(sharder_keys)
        device_groups = (None, "", compute_device(self))
        constrained_tables = set()
        for table, constraint in constraints.items():
            if constraint.device_group in device_groups:
                constrained_tables.add(table)
        _check_names("statistics of", model_tables, set(self.statistics))
        _check_names("constraints for", model_tables, constrained_tables)
        allowed = []
        for option in enumerated:
            sharder = self.sharder_map.get(option.module_type_key)
            constraint = constraints.get(option.name)
            if not isinstance(sharder, _Sharder) or _is_allowed(option, constraint):
                allowed.append(option)
        tables_with_options = {option.name for option in allowed}
        for table in sorted(model_tables - tables_with_options):
            message = self._without_option(table, sharder_keys[table])
            raise PlannerError(message, error_type=PlannerErrorType.STRICT_CONSTRAINTS)
        self.found = allowed
        return allowed

    def _without_option(self, table: str, sharder_key: str) -> str:
        """Returns the message for a table that its constraint leaves no option."""
        constraint = constraints_of(self)[table]
        sharder = self.sharder_map[sharder_key]
        device = compute_device(self)
        kernels = constraint.compute_kernels or [RECSTORE_KERNEL]
        problem = (
            f"no sharding option is left for table {table!r} with"
            f" sharding_types={constraint.sharding_types}, compute_kernels={kernels}"
        )
        if _on_servers(constraint):
            return (
                f"{problem}: servers distribute its rows, so that its sharding type"
                " must be table_wise"
            )
        # The kernels that the sharder has for each sharding type.
        offers = {}
        for sharding_type in sharder.sharding_types(device):
            offers[sharding_type] = sharder.compute_kernels(sharding_type, device)
        possible_types = []
        for sharding_type, offered_kernels in offers.items():
            if not set(kernels).isdisjoint(offered_kernels):
                possible_types.append(sharding_type)
        possible_kernels: set[str] = set()
        for sharding_type in constraint.sharding_types or offers:
            possible_kernels.update(offers.get(sharding_type, ()))
        fixes = []
        if possible_types:
            fixes.append(f"sharding_types to some of {possible_types}")
        if possible_kernels:
            fixes.append(f"compute_kernels to some of {sorted(possible_kernels)}")
        return f"{problem}: set {' or '.join(fixes)}"

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Estimates the options.

        The estimates of RecStore tables depend on the ``output_dtype`` of their
        lookups.

        If the constraint of a table has none, TorchRec takes the dtype of the rows, and
        not the one of ``fused_params`` (torchrec 1.8.0).
        """
        without_dtype = []
        for option in sharding_options:
            is_recstore = option.compute_kernel == RECSTORE_KERNEL
            if is_recstore and option.output_dtype is None:
                without_dtype.append(option)
                option.output_dtype = lookup_type(option, self.sharder_map)
        super().populate_estimates(sharding_options)
        # The plan does not fix the dtype: fused_params may differ when the model is
        # sharded.
        for option in without_dtype:
            option.output_dtype = None

    def _offer(self, sharder: ModuleSharder[nn.Module]) -> ModuleSharder[nn.Module]:
        if not isinstance(sharder, _Sharder):
            return sharder
        # Each sharder gets one copy only: the stock enumerator detects a repeated call
        # by the identity of the sharders.
        return self._offers.setdefault(id(sharder), sharder.with_stock_kernels())


def _check_names(
    subject: str,
    model_tables: set[str],
    tables: set[str],
) -> None:
    unknown = sorted(tables - model_tables)
    if unknown:
        raise PlannerError(
            f"{subject} unknown table(s) {', '.join(map(repr, unknown))}; the model's"
            f" tables are {', '.join(map(repr, sorted(model_tables)))}",
            error_type=PlannerErrorType.INPUT_VALIDATION,
        )


@contextmanager
def _without_warnings_of_data_parallel() -> Iterator[None]:
    """Drops the warning that RecStore's kernel has no data-parallel sharding.

    A RecStore sharder offers data_parallel to tables on TorchRec's kernels only, and
    TorchRec (1.7.0 to 1.9.2) warns of every sharding type that the kernels of a
    constraint leave out.
    """

    def is_shown(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        is_of_recstore = (
            f"Constrained compute kernels: ['{RECSTORE_KERNEL}']" in message
            and "data_parallel" in message
        )
        is_warning = message.startswith("No available compute kernels")
        return not (is_warning and is_of_recstore)

    logger = logging.getLogger(EmbeddingEnumerator.__module__)
    logger.addFilter(is_shown)
    try:
        yield
    finally:
        logger.removeFilter(is_shown)


def _on_servers(constraint: ParameterConstraints | None) -> bool:
    return (
        isinstance(constraint, RecStoreConstraints)
        and constraint.options.servers is not None
    )


def _is_allowed(
    option: ShardingOption,
    constraint: ParameterConstraints | None,
) -> bool:
    """Returns whether a table's constraint allows the option's kernel.

    The table has a RecStore sharder.
    """
    is_recstore = bool(option.compute_kernel == RECSTORE_KERNEL)
    is_table_wise = option.sharding_type == ShardingType.TABLE_WISE.value
    if is_recstore and _on_servers(constraint) and not is_table_wise:
        return False
    if constraint is None or not constraint.compute_kernels:
        return is_recstore or not asks_for_recstore(constraint)
    return bool(option.compute_kernel in constraint.compute_kernels)


class RecStorePlanner(PlannerSeams):
    """A planner that places tables in RecStore, and writes their options into the plan.

    Example::

        options = TableOptions(expected_rows=10_000_000)
        planner = RecStorePlanner(
            topology=Topology(world_size=2, compute_device="cpu"),
            constraints={"t_user": RecStoreConstraints(options=options)},
        )
        plan = planner.collective_plan(model, [RecStoreSharder()], dist.group.WORLD)

    If several collections of the model have RecStore tables with the same name, the
    constraint of that name applies to all of these tables. The initial rows of each of
    them also depend on the path of its collection in the model, so that the tables
    start with different rows.

    Args:
        topology: The device topology. Default: the topology of the process group.
        batch_size: The batch size of one rank. Default: TorchRec's ``BATCH_SIZE``.
        enumerator: The enumerator of the sharding options. Default: a
            :class:`RecStoreEnumerator`.
        args, kwargs: The other arguments of TorchRec's ``EmbeddingShardingPlanner``, in
            the same order. ``constraints`` maps table names to constraints; a
            :class:`RecStoreConstraints` has the options of a RecStore table.
        statistics: What was measured of tables, by table name; see
            :func:`read_statistics` and :func:`measure_statistics`. With statistics, the
            default ``partitioner`` places the tables that take most time first.
            Default: None.
        sharding_type_ms: With statistics, the milliseconds of a step that a sharding
            type of a collection takes on every rank of several, whatever its tables
            are, for ``"table_wise"`` and ``"row_wise"``. Default: None, which means
            measured numbers on CPUs, and 0 on accelerators.

    Raises:
        ValueError: ``statistics`` and ``enumerator`` are both set. The enumerator takes
            the statistics then. Or ``sharding_type_ms`` has another sharding type, or a
            negative number, or there are no statistics.
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
            raise ValueError(
                "statistics have no effect on the enumerator that is passed: pass them"
                " to the enumerator"
            )
        check_sharding_type_ms(sharding_type_ms or {})
        if sharding_type_ms is not None and not statistics and enumerator is None:
            raise ValueError(
                "sharding_type_ms has no effect without the statistics of tables: pass"
                " statistics, too"
            )
        self._sharding_type_ms = sharding_type_ms
        # TorchRec's constructor makes the enumerator
        self._statistics = dict(statistics or {})
        if statistics and len(args) < 6 and kwargs.get("partitioner") is None:
            # TorchRec's default places the largest tables first (torchrec 1.8.0),
            # whatever their time is.
            kwargs["partitioner"] = GreedyPerfPartitioner(sort_by=SortBy.PERF)
        super().__init__(*args, **kwargs)

    def make_enumerator(
        self,
        topology: Topology,
        batch_size: int,
        constraints: dict[str, ParameterConstraints] | None,
    ) -> RecStoreEnumerator:
        """Returns the enumerator of a planner whose argument ``enumerator`` is None."""
        return RecStoreEnumerator(
            topology,
            batch_size,
            constraints,
            statistics=self._statistics,
        )

    def replace_stats(self, stats: Stats) -> Stats:
        """Replaces TorchRec's default statistics.

        Any other statistics are the user's choice and stay.
        """
        return RecStoreStats() if type(stats) is EmbeddingStats else stats

    def refine(self, plan: list[ShardingOption]) -> list[ShardingOption]:
        """Returns the plan with measured tables moved while a step becomes shorter.

        The step is that of the slowest rank. For GPUs, the rows that are there are
        chosen then.
        """
        plan = self._refined(plan)
        enumerator, topology = self.searched
        is_for_gpus = topology.compute_device == "cuda"
        if isinstance(enumerator, RecStoreEnumerator) and is_for_gpus:
            enumerator.device_rows = chosen_device_rows(
                plan,
                topology,
                constraints_of(self),
                enumerator.statistics,
                enumerator.sharder_map,
            )
        return plan

    def _refined(self, plan: list[ShardingOption]) -> list[ShardingOption]:
        enumerator, topology = self.searched
        if not isinstance(enumerator, RecStoreEnumerator) or topology.world_size == 1:
            return plan
        measured_tables = set()
        for name, table in enumerator.statistics.items():
            if table.ns_per_id is not None:
                measured_tables.add(name)
        if not measured_tables:
            return plan
        sharding_type_ms = self._sharding_type_ms
        if sharding_type_ms is None:
            is_cpu = topology.compute_device == "cpu"
            sharding_type_ms = SHARDING_TYPE_MS if is_cpu else {}
        return refined(
            plan,
            enumerator.found,
            topology,
            measured_tables,
            sharding_type_ms,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(constraints={dict(constraints_of(self))})"

    def plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]],
    ) -> ShardingPlan:
        """Returns the plan of a model, before sharding.

        It is for the modules of ``sharders``.

        Raises:
            TypeError: ``sharders`` is not a list of sharders.
            ValueError: The rows of a table have no columns.
            PlannerError: No plan satisfies the constraints and the memory limits, or a
                constraint names a table that the model does not have. If memory is
                short, the message begins with the tables that do not fit, and with the
                memory, of the host or of the accelerator, that is too small for them.
                Or the sharder of a table whose constraints ask for RecStore is not one
                of RecStore's.
        """
        # The reservation of memory reads the sharders before the enumerator gets them.
        check_sharders(module, sharders, constraints_of(self))
        try:
            plan: ShardingPlan = super().plan(module, sharders)
        except PlannerError as error:
            enumerator, topology = self.searched
            # An enumerator of the user's class does not keep its options. TorchRec's
            # message is all there is then.
            options = []
            if isinstance(enumerator, RecStoreEnumerator):
                options = enumerator.found
            if not options or error.error_type not in _NO_ROOM:
                raise
            message = "\n".join([*_shortages(options, topology), "", str(error)])
            raise PlannerError(message, error_type=error.error_type) from None
        self._add_options(plan)
        return plan

    def _add_options(self, plan: ShardingPlan) -> None:
        """Replaces the entries of RecStore tables by entries with their options."""
        name_counts: Counter[str] = Counter()
        for module_plan in plan.plan.values():
            for name, sharding in module_plan.items():
                if sharding.compute_kernel == RECSTORE_KERNEL:
                    name_counts[name] += 1
        for path, module_plan in plan.plan.items():
            for name, sharding in module_plan.items():
                if sharding.compute_kernel != RECSTORE_KERNEL:
                    continue
                # Without a row name of their own, tables with the same name would make
                # the same initial rows and would share their rows in a shared cold
                # store.
                row_name = f"{path}.{name}" if name_counts[name] > 1 else None
                options = self._options_in_plan(path, name)
                module_plan[name] = RecStoreParameterSharding.of(
                    sharding,
                    options,
                    row_name,
                )
            plan.plan[path] = RecStoreModulePlan(module_plan)

    def _options_in_plan(self, path: str, name: str) -> TableOptions:
        """Returns the options of a table of the plan."""
        enumerator, _ = self.searched
        if isinstance(enumerator, RecStoreEnumerator):
            for option in enumerator.found:
                if option.name == name and option.path == path:
                    options = planned_options(
                        constraints_of(self),
                        name,
                        option.tensor.shape[0],
                        enumerator.statistics.get(name),
                    )
                    chosen = enumerator.device_rows.get((path, name))
                    if chosen is None:
                        return options
                    return replace(options, device_rows=chosen)
        return options_of(constraints_of(self), name)


class RecStoreStats(EmbeddingStats):  # type: ignore[misc]
    """A logger of a plan's statistics, with the rows and bytes of RecStore tables.

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
        """Logs the statistics of a plan.

        See TorchRec's ``EmbeddingStats``; the arguments are the same.
        """
        super().log(
            sharding_plan,
            topology,
            *args,
            best_plan=best_plan,
            constraints=constraints,
            enumerator=enumerator,
            **kwargs,
        )
        statistics = {}
        chosen = {}
        if isinstance(enumerator, RecStoreEnumerator):
            statistics = enumerator.statistics
            chosen = enumerator.device_rows
        device = topology.compute_device
        lines = assumed(best_plan, constraints, statistics, device, chosen)
        has_bus = topology.compute_device != "cpu"
        if has_bus and isinstance(enumerator, EmbeddingEnumerator):
            lines += _copied(
                best_plan,
                topology,
                constraints,
                enumerator.sharder_map,
            )
        for line in lines:
            logger.info(line)


def assumed(
    options: list[ShardingOption],
    constraints: dict[str, ParameterConstraints] | None,
    statistics: Mapping[str, TableStatistics] = MappingProxyType({}),
    device: str = "cpu",
    chosen: Mapping[tuple[str, str], int] = MappingProxyType({}),
) -> list[str]:
    """Returns a line for each RecStore table with its rows and its GiB on each rank.

    The rows are the resident ones, over all ranks, and, of them, the ``device_rows`` if
    ``device`` is an accelerator. ``chosen`` are those of the planner's choice.

    The bytes include the rows with their optimizer state, index and bookkeeping, the
    counter of sightings, and the table's inputs and outputs.
    """
    lines = []
    on_device = "" if device == "cpu" else f" on {device}"
    in_recstore = [
        option for option in options if option.compute_kernel == RECSTORE_KERNEL
    ]
    in_recstore.sort(key=lambda option: (option.name, option.path))
    name_counts = Counter(option.name for option in in_recstore)
    for option in in_recstore:
        name = option.name
        if name_counts[name] > 1:
            name = f"{option.path}.{name}"
        table_options = options_of(constraints, option.name)
        if table_options.servers is not None:
            addresses = ", ".join(table_options.servers.addresses)
            lines.append(f"RecStore table {name!r} is on the servers {addresses}")
            continue

        measured = statistics.get(option.name)
        num_embeddings = option.tensor.shape[0]
        rows = planned_rows(table_options, num_embeddings, measured)
        source = _source(table_options, rows, measured)
        planned = planned_options(constraints, option.name, num_embeddings, measured)
        device_rows = ""
        chosen_rows = chosen.get((option.path, option.name))
        if chosen_rows is not None:
            assert measured is not None
            device_rows = (
                f", {chosen_rows:,} of them chosen to be{on_device}, where"
                f" {measured.hot_share:.0%} of the distinct ids of a batch were measured"
            )
        elif on_device and planned.device_rows:
            device_rows = f", {planned.device_rows:,} of them{on_device}"

        sizes = []
        for shard in option.shards:
            size_gib = shard.storage.ddr / 2**30
            sizes.append(f"rank {shard.rank}: {size_gib:.3f} GiB")
        listed_sizes = ", ".join(sizes)
        lines.append(
            f"RecStore table {name!r}: {rows:,} resident rows assumed ({source})"
            f"{device_rows}; {listed_sizes}"
        )
    return lines


def _source(
    options: TableOptions,
    rows: int,
    measured: TableStatistics | None,
) -> str:
    """Returns the option that the number of resident rows comes from."""
    if measured is not None and rows == measured.rows:
        return "measured"
    if rows == options.max_rows and rows != options.expected_rows:
        return "max_rows"
    if options.expected_rows is not None:
        return "expected_rows"
    return "no expected_rows: num_embeddings, at most 2**20"


def _copied(
    options: list[ShardingOption],
    topology: Topology,
    constraints: dict[str, ParameterConstraints] | None,
    sharders: Mapping[str, ModuleSharder[nn.Module]],
) -> list[str]:
    """Returns a line for each rank with the bytes over the bus in a step.

    They are those of its RecStore tables.
    """
    down: Counter[int] = Counter()
    up: Counter[int] = Counter()
    for option in options:
        if option.compute_kernel == RECSTORE_KERNEL:
            shard_bytes = bus_bytes_of(option, topology, constraints, sharders)
            for shard, bus_bytes in zip(option.shards, shard_bytes, strict=True):
                down[shard.rank] += round(bus_bytes.down)
                up[shard.rank] += round(bus_bytes.up)
    lines = []
    for rank in sorted(down):
        down_mib = down[rank] / 2**20
        up_mib = up[rank] / 2**20
        lines.append(
            f"RecStore tables of rank {rank} copy in a step {down_mib:.3f} MiB to the"
            f" host and {up_mib:.3f} MiB to {topology.compute_device}"
        )
    return lines


def _shortages(options: list[ShardingOption], topology: Topology) -> list[str]:
    """Returns lines that name the tables that do not fit, and the memory.

    The host memory (DDR) and, under an accelerator, its memory (HBM) are compared
    apart.
    """
    kinds = {"ddr": "host memory (DDR)"}
    if topology.compute_device != "cpu":
        kinds["hbm"] = f"memory of {topology.compute_device} (HBM)"
    options_by_table: dict[str, list[ShardingOption]] = {}
    for option in options:
        table = option.fqn.lstrip(".")
        options_by_table.setdefault(table, []).append(option)
    lines: list[str] = []
    fullest = 0.0
    fullest_line = ""
    for kind, memory in kinds.items():
        rank_sizes = [getattr(device.storage, kind) for device in topology.devices]
        rank_size = max(rank_sizes)
        total_size = sum(rank_sizes)

        shard_sizes = _least_shard_bytes(options_by_table, kind)
        needed = _least_bytes(options_by_table, kind)
        largest = sorted(shard_sizes.items(), key=lambda item: -item[1])
        too_large = [(table, size) for table, size in largest if size > rank_size]
        for table, size in too_large[:_MOST_NAMED]:
            lines.append(
                f"table {table!r} needs at least {_gib(size)} of {memory} on a rank,"
                f" and a rank has {_gib(rank_size)}"
            )
        unnamed = len(too_large) - _MOST_NAMED
        if unnamed > 0:
            lines.append(f"{unnamed} more tables need more {memory} than a rank has")

        named_shards = largest[:_MOST_NAMED]
        shards = ", ".join(f"{table!r} {_gib(size)}" for table, size in named_shards)
        if not too_large and needed > total_size:
            lines.append(
                f"the tables need at least {_gib(needed)} of {memory}, and all"
                f" {len(rank_sizes)} rank(s) together have {_gib(total_size)}; largest"
                f" shards: {shards}"
            )
        fill = needed / max(total_size, 1)
        if fill >= fullest:
            fullest = fill
            fullest_line = (
                "each table fits, but the shards do not fit next to each other into"
                f" the {memory} of {len(rank_sizes)} rank(s) with {_gib(rank_size)}"
                f" each; largest shards: {shards}"
            )
    return lines or [fullest_line]


def _least_shard_bytes(
    options_by_table: Mapping[str, list[ShardingOption]],
    kind: str,
) -> dict[str, int]:
    """Returns the least bytes of each table on the rank with its largest shard.

    They are the least over the options of the table.
    """
    least_bytes = {}
    for table, options in options_by_table.items():
        option_bytes = []
        for option in options:
            shard_bytes = [getattr(shard.storage, kind) for shard in option.shards]
            option_bytes.append(max(shard_bytes))
        least_bytes[table] = min(option_bytes)
    return least_bytes


def _least_bytes(
    options_by_table: Mapping[str, list[ShardingOption]],
    kind: str,
) -> int:
    """Returns the bytes that all tables need at least, over their options."""
    needed = 0
    for options in options_by_table.values():
        needed += min(getattr(option.total_storage, kind) for option in options)
    return needed


def _gib(size: int) -> str:
    return f"{size / 2**30:,.3f} GiB"
