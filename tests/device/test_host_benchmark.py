"""benchmarks/device_host.py runs, and its steps are on the device."""

from __future__ import annotations

import json

from tests.packages import ROOT
from tests.processes import run_forked_command


def test_a_small_run() -> None:
    sizes = ["--rows", "20000", "--device-rows", "9000", "--steps", "2"]
    done = run_forked_command(
        [str(ROOT / "benchmarks" / "device_host.py"), *sizes, "--warm-up", "1"]
    )
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout.splitlines()[-1])
    assert row["passes_on_device"] == 3 + 7  # those of one thread have a warm-up of 5
    for side in ("host", "device", "resolve", "device_one_thread"):
        assert row[side]["total_ms"]
