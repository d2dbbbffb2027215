"""``tests/cuda/lease.py`` on this machine."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.cuda.marks import WITH_TORCH
from tests.processes import ROOT


def run_lease(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in a process of its own: Triton reads an environment variable
    when it is imported.
    """
    return subprocess.run(
        [sys.executable, "-m", "tests.cuda.lease", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=280,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_one_line_without_a_device() -> None:
    done = run_lease()
    assert done.returncode == 1
    assert (done.stdout, done.stderr) == (
        "",
        "error: no CUDA device (--dry-run tries this command without one)\n",
    )


@pytest.mark.slow
def test_a_dry_run() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    done = run_lease("--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kernels: 0 cases are different from the reference" in done.stdout
    equal = [line for line in done.stdout.splitlines() if line.startswith("equal: ")]
    assert len(equal) == 5, done.stdout
    assert "there is no device for the rows" in done.stdout


@pytest.mark.parametrize("arguments", [pytest.param((), marks=WITH_TORCH)])
def test_on_cuda(arguments: tuple[str, ...]) -> None:
    done = run_lease(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
