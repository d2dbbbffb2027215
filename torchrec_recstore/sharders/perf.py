"""The estimate of the speed of RecStore's kernel, for TorchRec's planner."""

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
"""The speed of RecStore's kernel divided by the speed of TorchRec's fused kernel on a CPU.

Measured for forward and backward with row-wise Adagrad, with malloc told to keep large blocks: 1.57 and 1.76
(benchmarks/results.json, cases big and criteo, 2026-11-21). With malloc's default settings the ratio is larger.
"""

_WITH_BLOCKS = [
    ShardingType.TABLE_WISE.value,
    ShardingType.COLUMN_WISE.value,
    ShardingType.TABLE_COLUMN_WISE.value,
]
"""The sharding types that TorchRec estimates with ``TableWiseEvaluator`` and its subclasses (torchrec 1.8.0)."""


class _WithoutBlocks(TableWiseEvaluator):  # type: ignore[misc]
    """TorchRec's table-wise estimate without the costs of FBGEMM's CUDA blocks, which RecStore's kernel does not use.

    TorchRec adds these costs for narrow rows, but not for row-wise sharding (torchrec 1.8.0). With these costs, the
    planner would choose row-wise sharding for a narrow RecStore table even on one rank.
    """

    def use_min_dim_for_lookup(self, config: EmbeddingPerfEstimatorConfig) -> bool:
        return False

    def use_block_usage_penalty(self, config: EmbeddingPerfEstimatorConfig) -> bool:
        return False


def _evaluator(context: ShardPerfContext) -> TableWiseEvaluator:
    return _WithoutBlocks() if context.compute_kernel == RECSTORE_KERNEL else TableWiseEvaluator()


class RecStorePerfConfig(EmbeddingPerfEstimatorConfig):  # type: ignore[misc]
    """The config of TorchRec's performance estimator with RecStore's kernel added.

    The estimates of TorchRec's own kernels do not change.
    """

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
        """Returns the bandwidth of a kernel's rows in bytes per millisecond.

        The rows of RecStore tables are in host memory. For a GPU, the bandwidth is that of the link between host memory
        and the GPU. The arguments are those of TorchRec's method.
        """
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
        """Returns the estimated milliseconds of a forward pass. The cost per row is that of row-wise sharding."""
        return default_forward_ms(_evaluator(context), context, self)

    @backward_compute(_WITH_BLOCKS)  # type: ignore[untyped-decorator]
    def backward_ms(self, context: ShardPerfContext) -> float:
        """Returns the estimated milliseconds of a backward pass. The cost per row is that of row-wise sharding."""
        return default_backward_ms(_evaluator(context), context, self)


def register_kernel() -> None:
    """Registers RecStore's kernel with TorchRec's stock planner, which ``DistributedModelParallel`` uses by default.

    The stock planner raises an error for kernels that its default estimator does not know. Registering a config under
    the estimator's name is TorchRec's way to extend it (torchrec 1.8.0).
    """
    EmbeddingPerfEstimatorFactory.register(DEFAULT_PERF_ESTIMATOR)(RecStorePerfConfig)
