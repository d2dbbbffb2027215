"""The speed of RecStore's kernel and of its copies, for TorchRec's planner.

Tests: tests/planner/test_accelerators.py, tests/planner/test_shard_estimators.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torchrec.distributed.planner.constants import DEFAULT_PERF_ESTIMATOR
from torchrec.distributed.planner.estimator import (
    EmbeddingPerfEstimatorConfig,
    EmbeddingPerfEstimatorFactory,
)
from torchrec.distributed.planner.estimator.annotations import (
    backward_compute,
    forward_compute,
)
from torchrec.distributed.planner.estimator.estimator import (
    EmbeddingShardingPerfEvaluator,
    TableWiseEvaluator,
    get_embedding_perf_sharding_evaluator,
)
from torchrec.distributed.planner.estimator.types import ShardPerfContext
from torchrec.distributed.types import ShardingType

from torchrec_recstore.sharders.kernel import IN_NODE
from torchrec_recstore.sharders.plan_entries import RECSTORE_KERNEL, SHARDING_TYPES
from torchrec_recstore.torchrec_seams.planning import (
    default_backward_ms,
    default_forward_ms,
)

# The speed of RecStore's kernel over that of TorchRec's fused kernel on a CPU, with
# malloc told to keep large blocks. Measured with row-wise Adagrad: 1.57 and 1.76
# (benchmarks/results.json, cases big and criteo, 2026-11-21).
SPEED_OVER_FUSED = 1.5

# The sharding types that TorchRec estimates with TableWiseEvaluator and its subclasses
# (torchrec 1.8.0).
_WITH_BLOCKS = ("table_wise", "column_wise", "table_column_wise")

_ID_BYTES = _OFFSET_BYTES = 8
_WEIGHT_BYTES = _FLOAT_BYTES = 4


@dataclass(frozen=True)
class BusBytes:
    """The bytes that a RecStore table on one rank copies over the bus in a step.

    The bus is between the host and an accelerator.
    """

    ids: float  # With the offsets of bags and the weights of ids, to the host.
    rows: float  # To the accelerator.
    gradients: float  # Of these rows, to the host.
    # Of the weights that a feature processor has computed, to the accelerator.
    weight_gradients: float

    @property
    def down(self) -> float:
        """The bytes to the host."""
        return self.ids + self.gradients

    @property
    def up(self) -> float:
        """The bytes to the accelerator."""
        return self.rows + self.weight_gradients


def bus_bytes(context: ShardPerfContext) -> BusBytes:
    """Returns the estimated bytes of a RecStore shard over the bus in a step."""
    ids = context.batch_inputs * context.world_size / _split(context)
    batch_bytes = ids * _ID_BYTES
    row_count = ids
    weight_bytes = 0.0
    if context.is_pooled:
        bags_of_rank = 0.0
        for poolings, batch_size in zip(
            context.num_poolings,
            context.batch_sizes,
            strict=True,
        ):
            bags_of_rank += poolings * batch_size
        bags = bags_of_rank * context.world_size
        batch_bytes += bags * _OFFSET_BYTES
        row_count = bags
        if context.is_weighted:
            weight_bytes = ids * _WEIGHT_BYTES
    row_bytes = row_count * context.emb_dim * context.output_data_type_size
    return BusBytes(
        ids=batch_bytes + weight_bytes,
        rows=row_bytes,
        gradients=row_bytes,
        weight_gradients=weight_bytes if context.has_feature_processor else 0.0,
    )


class _WithoutBlocks(TableWiseEvaluator):  # type: ignore[misc]
    """TorchRec's table-wise estimate without the costs of FBGEMM's CUDA blocks.

    TorchRec adds them for narrow rows, but not for row-wise sharding (torchrec 1.8.0),
    which the planner would then choose even on one rank.
    """

    def use_min_dim_for_lookup(self, config: EmbeddingPerfEstimatorConfig) -> bool:
        return False

    use_block_usage_penalty = use_min_dim_for_lookup


def evaluator_of(context: ShardPerfContext) -> EmbeddingShardingPerfEvaluator:
    """Returns the formulas of a shard.

    Those of a RecStore table have no costs of CUDA blocks.
    """
    is_ours = context.compute_kernel == RECSTORE_KERNEL
    if is_ours and context.sharding_type in _WITH_BLOCKS:
        return _WithoutBlocks()
    return get_embedding_perf_sharding_evaluator(context.sharding_type)


def _split(context: ShardPerfContext) -> int:
    """Returns the number of ranks that share the rows of a table."""
    if context.sharding_type == ShardingType.ROW_WISE.value:
        return int(context.world_size)
    if context.sharding_type in IN_NODE:
        return int(context.intra_group_size)
    return 1


@dataclass(frozen=True)
class MeasuredSpeed:
    """The measured cost of a table's lookups and updates."""

    ns_per_id: float  # The nanoseconds of a forward and a backward for each id.
    hottest_share: float  # The share of the ids that are equal to the most frequent id.


class RecStorePerfConfig(EmbeddingPerfEstimatorConfig):  # type: ignore[misc]
    """The config of TorchRec's performance estimator with RecStore's kernel added.

    If the topology's ``compute_device`` is an accelerator, the bytes of
    :func:`bus_bytes` cross the bus at its ``hbm_to_ddr_mem_bw``. TorchRec's formulas
    estimate the tables whose speed is not in ``measured``.
    """

    def __init__(self, measured: Mapping[str, MeasuredSpeed] | None = None) -> None:
        super().__init__()
        self._measured = dict(measured or {})

    _over_bus = False
    """Whether the topology has an accelerator.

    TorchRec names the device only to :meth:`get_device_bw`, which it calls for each
    table before the methods below (torchrec 1.7.0, 1.8.0 and 1.9.2).
    """

    def get_device_bw(
        self,
        compute_device: str,
        compute_kernel: str,
        hbm_mem_bw: float,
        ddr_mem_bw: float,
        *args: Any,
        **kwargs: Any,
    ) -> float | None:
        """Returns the bandwidth of a kernel's rows in bytes per millisecond.

        RecStore's rows are in host memory.
        """
        self._over_bus = compute_device != "cpu"
        if compute_kernel == RECSTORE_KERNEL:
            return SPEED_OVER_FUSED * ddr_mem_bw
        return super().get_device_bw(  # type: ignore[no-any-return]
            compute_device,
            compute_kernel,
            hbm_mem_bw,
            ddr_mem_bw,
            *args,
            **kwargs,
        )

    @forward_compute(SHARDING_TYPES)  # type: ignore[untyped-decorator]
    def forward_ms(self, context: ShardPerfContext) -> float:
        """Returns the estimated milliseconds of a forward pass.

        The cost per row is that of row-wise sharding.
        """
        copies = self._copied(context)
        share = 1 / (1 + context.bwd_compute_multiplier)
        copied = copies.ids + copies.rows
        return self._pass_ms(context, default_forward_ms, share, copied)

    @backward_compute(SHARDING_TYPES)  # type: ignore[untyped-decorator]
    def backward_ms(self, context: ShardPerfContext) -> float:
        """Returns the estimated milliseconds of a backward pass.

        The cost per row is that of row-wise sharding.
        """
        copies = self._copied(context)
        share = 1 - 1 / (1 + context.bwd_compute_multiplier)
        copied = copies.gradients + copies.weight_gradients
        return self._pass_ms(context, default_backward_ms, share, copied)

    def _pass_ms(
        self,
        context: ShardPerfContext,
        default: Callable[..., float],
        share: float,
        copied: float,
    ) -> float:
        """Returns the milliseconds of a pass and of its copies over the bus.

        ``share`` is the pass's share of the measured time, and ``copied`` are bytes.
        """
        measured_ms = self._measured_ms(context)
        if measured_ms is None:
            evaluator = evaluator_of(context)
            ms = default(evaluator, context, self)
        else:
            ms = measured_ms * share
        if copied:
            ms += copied / context.hbm_to_ddr_mem_bw
        return float(ms)

    def _measured_ms(self, context: ShardPerfContext) -> float | None:
        """Returns the measured milliseconds on the rank with most ids, or None.

        They are of a forward and a backward.
        """
        # A shard of columns is taken to cost as much for each id as the whole row,
        # since it finds each id, too.
        measured = self._measured.get(context.table_name)
        if measured is None or context.compute_kernel != RECSTORE_KERNEL:
            return None

        split = _split(context)
        ids_of_all_ranks = float(context.batch_inputs * context.world_size)
        share_of_others = 1 - 1 / split
        share_of_ids = 1 / split + measured.hottest_share * share_of_others
        ids = ids_of_all_ranks * share_of_ids
        ids_ms = ids * measured.ns_per_id / 1e6

        # Ranks that split rows write a partial sum of each bag, and read its gradient.
        sums = 0
        if context.is_pooled:
            sums = context.batch_outputs * context.world_size * share_of_others
        sum_bytes = 2 * sums * context.emb_dim * _FLOAT_BYTES
        return float(ids_ms + sum_bytes / context.device_bw)

    def _copied(self, context: ShardPerfContext) -> BusBytes:
        over_bus = self._over_bus and context.compute_kernel == RECSTORE_KERNEL
        return bus_bytes(context) if over_bus else BusBytes(0, 0, 0, 0)


def register_kernel() -> None:
    """Registers RecStore's kernel with TorchRec's stock planner.

    ``DistributedModelParallel`` uses this planner by default.
    """
    # The planner refuses kernels that its estimator does not know, and a config extends
    # the estimator (torchrec 1.8.0).
    EmbeddingPerfEstimatorFactory.register(DEFAULT_PERF_ESTIMATOR)(RecStorePerfConfig)
