"""The planner's constraints for one RecStore table.

Tests: tests/planner/test_bounds.py, tests/planner/test_planners.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torchrec.distributed.planner.constants import POOLING_FACTOR
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import KeyValueParams

from torchrec_recstore.display import set_fields
from torchrec_recstore.options import TableOptions, resident_rows
from torchrec_recstore.planner.statistics import TableStatistics
from torchrec_recstore.sharders import RECSTORE_KERNEL
from torchrec_recstore.sharders.plan_entries import (
    OptionsInPlan,
    stock_key_value_params,
    with_load_factor,
)
from torchrec_recstore.torchrec_seams.planning import ConstraintsSeams


@dataclass
class RecStoreConstraints(ConstraintsSeams):
    """The planner's constraints for a table in RecStore.

    The other fields are those of TorchRec's ``ParameterConstraints``.

    Args:
        compute_kernels: The names of the kernels that the planner may choose for the
            table. Default: RecStore's kernel only.
        options: The table's options. They have no effect if the table is planned on one
            of TorchRec's kernels. Default: ``TableOptions()``.

    Raises:
        TypeError: ``options`` is not a :class:`TableOptions`.
    """

    compute_kernels: list[str] | None = field(default_factory=lambda: [RECSTORE_KERNEL])
    options: TableOptions = field(default_factory=TableOptions)

    def __post_init__(self) -> None:
        if not isinstance(self.options, TableOptions):
            raise TypeError(
                "RecStoreConstraints.options must be TableOptions, got"
                f" {type(self.options).__name__}"
            )
        self._put_options_into_plan()

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        is_complete = "options" in vars(self)
        if is_complete and name in ("options", "key_value_params"):
            self._put_options_into_plan()

    def _put_options_into_plan(self) -> None:
        """Puts the options into the field that TorchRec's planner copies into its plan.

        It copies no field that it does not know.
        """
        params = self.stock_key_value_params()
        if self.options != TableOptions():
            params = OptionsInPlan.of(self.options, params)
        super().__setattr__("key_value_params", params)

    def __repr__(self) -> str:
        return set_fields(self._stock_part())

    def __hash__(self) -> int:
        # The hash is the same in every process, as TorchRec's is: the planner compares
        # it with that of a stored plan.
        return self.hash_with_own_fields()

    def own_fields(self) -> str:
        """Returns the options as text. They are part of the key of a stored plan."""
        return repr(self.options)

    def stock_key_value_params(self) -> KeyValueParams | None:
        """Returns the ``key_value_params`` of TorchRec's own kernels."""
        return stock_key_value_params(self.key_value_params)


def options_of(
    constraints: Mapping[str, ParameterConstraints] | None,
    table_name: str,
) -> TableOptions:
    """Returns the options of a table's constraint, or the default options."""
    constraint = (constraints or {}).get(table_name)
    return (
        constraint.options
        if isinstance(constraint, RecStoreConstraints)
        else TableOptions()
    )


def planned_options(
    constraints: Mapping[str, ParameterConstraints] | None,
    table_name: str,
    num_embeddings: int,
    measured: TableStatistics | None,
) -> TableOptions:
    """Returns the options of a table's constraint, with the ``device_rows`` of its
    ``CacheParams``.

    Raises:
        ValueError: The load factor is not from 0 to 1. The message names the table.
    """
    options = options_of(constraints, table_name)
    constraint = (constraints or {}).get(table_name)
    if constraint is None:
        return options
    rows = planned_rows(options, num_embeddings, measured)
    return with_load_factor(
        table_name,
        options,
        constraint.cache_params,
        rows,
    )


def planned_rows(
    options: TableOptions,
    num_embeddings: int,
    measured: TableStatistics | None,
) -> int:
    """Returns the number of resident rows that is planned for a table, over all ranks.

    A measured number replaces ``num_embeddings``, and counts if it is above
    ``expected_rows``. The number is at most ``max_rows``.
    """
    if measured is None or measured.rows is None:
        return resident_rows(options, num_embeddings)
    rows = max(measured.rows, options.expected_rows or 0)
    return rows if options.max_rows is None else min(rows, options.max_rows)


def with_statistics(
    constraints: Mapping[str, ParameterConstraints] | None,
    statistics: Mapping[str, TableStatistics],
) -> dict[str, ParameterConstraints]:
    """Returns the constraints with the measured numbers of ids.

    They become the ``pooling_factors`` where these are not set.

    Raises:
        ValueError: The constraint of a table is for another number of features than was
            measured.
    """
    with_factors = dict(constraints or {})
    for name, measured in statistics.items():
        per_feature = measured.ids_per_sample
        if per_feature is None:
            continue
        constraint = with_factors.get(name, RecStoreConstraints())
        if constraint.pooling_factors != [POOLING_FACTOR]:  # TorchRec's default
            continue
        for numbers in (constraint.num_poolings, constraint.batch_sizes):
            if numbers is not None and len(numbers) != len(per_feature):
                raise ValueError(
                    f"the statistics of table {name!r} are of {len(per_feature)}"
                    f" feature(s), and its constraint is for {len(numbers)}"
                )
        with_factors[name] = replace(constraint, pooling_factors=list(per_feature))
    return with_factors
