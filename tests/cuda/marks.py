"""Host tables below a CUDA device: ``pytest -m cuda``.

A test that also has a CPU case runs the same code there.

Without a device, or without FBGEMM's kernels for it, the tests are skipped, and the
reason is named.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.device import no_device, no_fbgemm

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def _case(reason: str | None, name: str) -> list[pytest.MarkDecorator]:
    return [
        pytest.mark.cuda,
        pytest.mark.skipif(reason is not None, reason=reason or name),
    ]


WITH_TORCH = _case(no_device(), "torch alone")
"""The marks of tests that need a CUDA device."""

WITH_FBGEMM = _case(no_fbgemm(), "FBGEMM")
"""The marks of tests that also need FBGEMM's CUDA build."""
