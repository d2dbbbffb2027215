"""``benchmarks/cuda.py`` on this machine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from tests.cuda.marks import WITH_FBGEMM, WITH_TORCH
from tests.processes import ROOT, run_forked_command

DEVICE_ROWS = ("device_1", "device_10", "device_100")
SCRIPT = str(ROOT / "benchmarks" / "cuda.py")
SMALL = (
    "--tables",
    "3",
    "--dim",
    "8",
    "--batch-size",
    "32",
    "--rows",
    "100",
    "--steps",
    "2",
    "--rounds",
    "2",
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_one_line_without_a_device() -> None:
    done = run_forked_command([SCRIPT])
    assert done.returncode == 1
    assert (done.stdout, done.stderr) == (
        "",
        "error: no CUDA device (--device cpu tests this script without one)\n",
    )


@pytest.mark.slow
def test_every_side_that_the_cpu_can_run() -> None:
    pytest.importorskip("torchrec", reason="TorchRec is not installed")
    done = run_forked_command([SCRIPT, "--device", "cpu", *SMALL])
    assert done.returncode == 0, done.stderr
    rows = [
        json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")
    ]
    assert {row["device"] for row in rows} == {"cpu: a test, not a measurement"}
    missing = {row["side"]: row.get("not_measured") for row in rows}
    assert missing == {
        "kernel": None,
        **dict.fromkeys(DEVICE_ROWS, "there is no device for the rows"),
        **dict.fromkeys(("eager", "recstore", "pipeline", "fused")),
        **dict.fromkeys(
            ("fused_uvm", "fused_uvm_caching"), "unified memory needs CUDA"
        ),
    }
    for row in rows:
        assert (
            "not_measured" in row
            or row["step_ms"]["median"] > 0 < row["step_over_dense_alone"]
        )
    table = [
        line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")
    ]
    assert [cells[0].strip("| ") for cells in table[2:]] == list(missing)


@pytest.mark.parametrize(
    "sides",
    [
        pytest.param("kernel,device_1,device_10,device_100,eager", marks=WITH_TORCH),
        pytest.param(
            "recstore,pipeline,fused,fused_uvm,fused_uvm_caching", marks=WITH_FBGEMM
        ),
    ],
)
def test_on_cuda(sides: str) -> None:
    # Not forked from a process that has imported TorchRec: CUDA does not survive a
    # fork.
    command = [sys.executable, SCRIPT, "--sides", sides, *SMALL]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [
        json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")
    ]
    assert [row["side"] for row in rows] == sides.split(",")
    for row in rows:
        assert row["up"]["bytes"] > 0
        assert row["down"]["bytes"] > 0 or row["side"].startswith(("fused", "device"))
        assert 0 <= row["overlap"] <= 1
