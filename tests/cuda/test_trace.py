"""What is read from a trace of ``torch.profiler``, and from this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import device
from benchmarks.device import STEPS, Copies, timeline

ROOT = Path(__file__).parents[2]


def event(
    category: str, name: str, begin: float, long: float, size: int = 0
) -> dict[str, Any]:
    """An event as Kineto writes it."""
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": begin,
        "dur": long,
        "args": {"bytes": size},
    }


def test_copies_overlap_and_waits() -> None:
    seen = timeline(
        [
            {"ph": "M", "name": "process_name", "ts": 0},
            event("user_annotation", STEPS, 100, 100),
            event("user_annotation", "another", 0, 1000),
            # half of it under kernels
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 110, 10, 64),
            event("kernel", "gemm", 105, 8),
            event("kernel", "relu", 112, 3),
            # all of it
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 150, 20, 32),
            # none of it
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 180, 10, 16),
            event("kernel", "gemm", 140, 50 - 10),
            event("kernel", "ncclDevKernel_SendRecv", 180, 10),  # not computation
            # does not cross the bus
            event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 120, 10, 1000),
            event("cuda_runtime", "cudaEventSynchronize", 160, 5),
            event("cuda_runtime", "cudaEventSynchronize", 190, 5),
            # the host does not wait
            event("cuda_runtime", "cudaStreamWaitEvent", 161, 5),
            event("cuda_runtime", "cudaDeviceSynchronize", 210, 5),  # after the steps
        ]
    )
    assert seen.up == Copies([64], 0)
    assert seen.down == Copies([32, 16], 1)
    assert seen.overlap == pytest.approx((5 + 20 + 0) / 40)
    assert seen.waits == {"cudaEventSynchronize": 2}


def test_a_trace_of_this_machine() -> None:
    runs: list[torch.Tensor] = []
    seen = device.traced(lambda: runs.append(torch.ones(3) + 1), torch.device("cpu"))
    assert len(runs) == 1
    assert (seen.up, seen.down, seen.overlap, seen.waits) == (
        Copies([], 0),
        Copies([], 0),
        None,
        {},
    )


def test_the_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.no_device() == device.no_fbgemm() == "no CUDA device"
    if not torch.version.cuda:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert device.no_device() is None
        assert device.no_fbgemm() == "FBGEMM's CUDA build is not installed"


def test_the_benchmark_does_not_hide_nvidia_s_package(tmp_path: Path) -> None:
    """torch imports ``cuda.bindings``, and the folder of the benchmarks comes first on
    the path of each of them.
    """
    (tmp_path / "cuda" / "bindings").mkdir(parents=True)
    (tmp_path / "cuda" / "bindings" / "__init__.py").write_text("version = 13")
    command = [sys.executable, "-c", "import cuda.bindings as b; print(b.version)"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'benchmarks'}:{tmp_path}"}
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("13\n", "")
