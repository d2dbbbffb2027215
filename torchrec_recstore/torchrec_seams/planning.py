"""The private parts of TorchRec's planner.

Tests: tests/planner/test_planners.py, tests/planner/test_shard_estimators.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.estimator.types import ShardPerfContext
from torchrec.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    ShardEstimator,
    ShardingOption,
    Stats,
    Topology,
    hash_sha256_to_int,
)
from torchrec.distributed.types import KeyValueParams

compute_device: Callable[[Enumerator], str] = attrgetter("_compute_device")
# Of an estimator; EmbeddingStorageEstimator keeps it (torchrec 1.8.0).
topology_of: Callable[[ShardEstimator], Topology] = attrgetter("_topology")


class ConstraintsSeams(ParameterConstraints):  # type: ignore[misc]
    """A mixin for constraints with additional fields.

    The key of a stored plan depends on these fields, too.
    """

    key_value_params: KeyValueParams | None

    def own_fields(self) -> str:
        """Returns the fields that TorchRec's constraints do not have, as text.

        The text is the same in every process.
        """
        raise NotImplementedError

    def stock_key_value_params(self) -> KeyValueParams | None:
        """Returns ``key_value_params`` without what is in :meth:`own_fields`."""
        raise NotImplementedError

    def hash_with_own_fields(self) -> int:
        """Returns the hash of all fields.

        A dataclass sets its own ``__hash__``, which has to call this.
        """
        stock_hash = ParameterConstraints.__hash__(self._stock_part())
        return int(hash_sha256_to_int([stock_hash, self.own_fields()]))

    def _persistent_hash(self, cache_params_memo: object) -> int:
        # The key of a stored plan from torchrec 1.9 on; before, it was __hash__.
        stock_hash = ParameterConstraints._persistent_hash(
            self._stock_part(),
            cache_params_memo,
        )
        return int(hash_sha256_to_int([stock_hash, self.own_fields()]))

    def _stock_part(self) -> ConstraintsSeams:
        stock_part = copy.copy(self)
        # Not by the class's own __setattr__, which would put the options back.
        stock_params = self.stock_key_value_params()
        object.__setattr__(stock_part, "key_value_params", stock_params)
        return stock_part


def constraints_of(part: object) -> Mapping[str, ParameterConstraints]:
    """Returns the constraints of a planner, an enumerator or an estimator, by table."""
    return getattr(part, "_constraints", None) or {}


class PlannerSeams(EmbeddingShardingPlanner):  # type: ignore[misc]
    """A planner that chooses its enumerator and its statistics.

    It does so once TorchRec's constructor has found the topology.
    """

    def make_enumerator(
        self,
        topology: Topology,
        batch_size: int,
        constraints: dict[str, ParameterConstraints] | None,
    ) -> Enumerator:
        """Returns the enumerator of a planner whose caller passes no enumerator."""
        raise NotImplementedError

    def replace_stats(self, stats: Stats) -> Stats:
        """Returns the statistics to use instead of ``stats``."""
        raise NotImplementedError

    def refine(self, plan: list[ShardingOption]) -> list[ShardingOption]:
        """Returns the plan to use instead of the best plan of TorchRec's search."""
        raise NotImplementedError

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        enumerator: Enumerator | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            topology,
            batch_size,
            enumerator,
            *args,
            **kwargs,
        )
        if enumerator is None:
            self._enumerator = self.make_enumerator(
                self._topology,
                self._batch_size,
                self._constraints,
            )
        # TorchRec calls the callbacks with its best plan, before it makes a plan of it
        # (torchrec 1.7.0 to 1.9.2).
        callbacks: list[Callable[[list[ShardingOption]], list[ShardingOption]]] = (
            getattr(self, "_callbacks", [])
        )
        self._callbacks = [self.refine, *callbacks]
        self._stats: list[Stats] = [self.replace_stats(stats) for stats in self._stats]

    @property
    def searched(self) -> tuple[Enumerator, Topology]:
        """The enumerator, and the topology without the memory for the dense part."""
        return (
            self._enumerator,
            self._storage_reservation.last_reserved_topology or self._topology,
        )


def _estimate(method: str) -> Callable[[Any, ShardPerfContext, object], float]:
    def estimate(
        evaluator: Any,
        context: ShardPerfContext,
        config: object,
    ) -> float:
        return float(getattr(evaluator, method)(context, config))

    return estimate


# TorchRec's estimates of a forward, a backward and their collectives, for a config
# without annotated methods.
default_forward_ms = _estimate("_default_fwd_comp")
default_backward_ms = _estimate("_default_bwd_comp")
default_forward_comms_ms = _estimate("_default_fwd_comms")
default_backward_comms_ms = _estimate("_default_bwd_comms")
