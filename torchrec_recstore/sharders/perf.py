"""What TorchRec's planner needs to know about the speed of RecStore's kernel."""

from __future__ import annotations

from torchrec.distributed.planner.constants import DEFAULT_PERF_ESTIMATOR
from torchrec.distributed.planner.estimator import EmbeddingPerfEstimatorConfig, EmbeddingPerfEstimatorFactory

from torchrec_recstore.sharders.parameter_sharding import RECSTORE_KERNEL

SPEED_OVER_FUSED = 1.5
"""RecStore's kernel over TorchRec's fused one on a CPU, forward and backward, row-wise Adagrad: 1.57 and 1.76 where
both keep their outputs' memory (benchmarks/results.json, cases big and criteo, 2026-11-21), more as TorchRec ships."""


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


def register_kernel() -> None:
    """Make the kernel known to TorchRec's stock planner, thereby to ``DistributedModelParallel`` without a plan.

    The stock planner refuses kernels that its default estimator does not know; registering a config under the
    estimator's name is the way TorchRec offers to extend it (torchrec 1.8.0).
    """
    EmbeddingPerfEstimatorFactory.register(DEFAULT_PERF_ESTIMATOR)(RecStorePerfConfig)
