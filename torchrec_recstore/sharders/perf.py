"""What TorchRec's planner needs to know about the speed of RecStore's kernel."""

from __future__ import annotations

from torchrec.distributed.planner.constants import DEFAULT_PERF_ESTIMATOR
from torchrec.distributed.planner.estimator import EmbeddingPerfEstimatorConfig, EmbeddingPerfEstimatorFactory
from torchrec.distributed.planner.estimator.annotations import backward_compute, forward_compute
from torchrec.distributed.planner.estimator.estimator import TableWiseEvaluator
from torchrec.distributed.planner.estimator.types import ShardPerfContext
from torchrec.distributed.types import ShardingType

from torchrec_recstore.sharders.plan import RECSTORE_KERNEL
from torchrec_recstore.torchrec_seams import default_backward_ms, default_forward_ms

SPEED_OVER_FUSED = 1.5
"""RecStore's kernel over TorchRec's fused one on a CPU, forward and backward, row-wise Adagrad: 1.57 and 1.76 where
both keep their outputs' memory (benchmarks/results.json, cases big and criteo, 2026-11-21), more as TorchRec ships."""

_WITH_BLOCKS = [
    ShardingType.TABLE_WISE.value,
    ShardingType.COLUMN_WISE.value,
    ShardingType.TABLE_COLUMN_WISE.value,
]
"""The sharding types that ``TableWiseEvaluator`` and its subclasses estimate (torchrec 1.8.0)."""


class _WithoutBlocks(TableWiseEvaluator):  # type: ignore[misc]
    """TorchRec's table-wise estimate without the costs of FBGEMM's CUDA blocks, which RecStore's kernel does not have.

    TorchRec adds these costs for narrow rows, but not where a table is sharded row-wise (torchrec 1.8.0). With them, a
    narrow table of RecStore was planned row-wise even on one rank.
    """

    def use_min_dim_for_lookup(self, config: EmbeddingPerfEstimatorConfig) -> bool:
        return False

    def use_block_usage_penalty(self, config: EmbeddingPerfEstimatorConfig) -> bool:
        return False


def _evaluator(context: ShardPerfContext) -> TableWiseEvaluator:
    return _WithoutBlocks() if context.compute_kernel == RECSTORE_KERNEL else TableWiseEvaluator()


class RecStorePerfConfig(EmbeddingPerfEstimatorConfig):  # type: ignore[misc]
    """TorchRec's default estimates, and RecStore's kernel beside them. Stock kernels are estimated as before."""

    def get_device_bw(
        self,
        compute_device: str,
        compute_kernel: str,
        hbm_mem_bw: float,
        ddr_mem_bw: float,
        ssd_mem_bw: float,
        hbm_to_ddr_mem_bw: float,
        caching_ratio: float | None = None,
        prefetch_pipeline: bool = False,
    ) -> float | None:
        """Bytes a millisecond; the rows are in host memory, so from a GPU they come over the link between the two."""
        if compute_kernel == RECSTORE_KERNEL:
            return SPEED_OVER_FUSED * ddr_mem_bw if compute_device == "cpu" else hbm_to_ddr_mem_bw
        bandwidth: float | None = super().get_device_bw(
            compute_device,
            compute_kernel,
            hbm_mem_bw,
            ddr_mem_bw,
            ssd_mem_bw,
            hbm_to_ddr_mem_bw,
            caching_ratio,
            prefetch_pipeline,
        )
        return bandwidth

    @forward_compute(_WITH_BLOCKS)  # type: ignore[untyped-decorator]
    def forward_ms(self, context: ShardPerfContext) -> float:
        """Milliseconds of a forward; a row costs as much here as where its table is sharded row-wise."""
        return default_forward_ms(_evaluator(context), context, self)

    @backward_compute(_WITH_BLOCKS)  # type: ignore[untyped-decorator]
    def backward_ms(self, context: ShardPerfContext) -> float:
        """Milliseconds of a backward, likewise."""
        return default_backward_ms(_evaluator(context), context, self)


def register_kernel() -> None:
    """Make the kernel known to TorchRec's stock planner, thereby to ``DistributedModelParallel`` without a plan.

    The stock planner refuses kernels that its default estimator does not know; registering a config under the
    estimator's name is the way TorchRec offers to extend it (torchrec 1.8.0).
    """
    EmbeddingPerfEstimatorFactory.register(DEFAULT_PERF_ESTIMATOR)(RecStorePerfConfig)
