"""TorchRec's own suites, from the checkout that ``TORCHREC_SOURCE`` names."""

from __future__ import annotations

import unittest
from importlib import import_module

import pytest

from . import adapted  # noqa: F401, before TorchRec's test modules
from .substitutes import SOURCE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# Those that shard tables: the others in these packages test TorchRec's own classes by
# mocks.
SUITES = {
    "torchrec.distributed.tests": (
        "test_model_parallel_gloo",
        "test_sequence_model_parallel",
        "test_sequence_model_parallel_single_rank",
        "test_fp_embeddingbag",
        "test_fp_embeddingbag_single_rank",
        "test_apply_optim_per_param",
        "test_init_parameters",
    ),
    "torchrec.distributed.composable.tests": (
        "test_fused_optim",
        "test_fused_optim_nccl",
    ),
    "torchrec.distributed.train_pipeline.tests": (
        "test_backward_injection",
        "test_postproc",
        "test_train_pipeline_prefetch_sparse_dist",
        "test_train_pipelines",
        "test_train_pipelines_utils",
    ),
}


def _suites() -> dict[str, type[unittest.TestCase]]:
    """Every suite by its module and name."""
    found = {}
    for package, modules in SUITES.items():
        for name in modules:
            module = import_module(f"{package}.{name}")
            for kind in list(vars(module).values()):
                own = isinstance(kind, type) and kind.__module__ == module.__name__
                if own and issubclass(kind, unittest.TestCase):
                    found[f"{name}.{kind.__name__}"] = kind
    return found


if SOURCE:
    globals().update(_suites())
