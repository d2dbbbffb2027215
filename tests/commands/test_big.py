"""The long benchmark of bounded memory, as a short run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packages import ROOT


@pytest.mark.slow
def test_a_run_that_is_killed_ends_as_the_undisturbed_one(tmp_path: Path) -> None:
    flags = (
        "--samples",
        200_000,
        "--ids",
        600_000,
        "--memory-mb",
        12,
        "--every",
        20_480,
    )
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "big.py"),
        str(tmp_path / "runs"),
        *map(str, flags),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (
        "rows, states and dense part of the killed run are equal to the bit"
        in done.stdout
    )
    document = json.loads((tmp_path / "runs" / "big.json").read_text())
    for name, run in document["runs"].items():
        assert run["kills"] == (name == "killed")
        # those of the last chain
        assert len(run["checkpoint_bytes"]) == (200_000 // 20_480 - 1) % 5 + 1
        points = run["points"]
        assert [each["samples"] for each in points] == sorted(
            {each["samples"] for each in points}
        )
        assert points[-1]["cold_rows"] > 10_000
        assert points[-1]["cold_rate"] > 0
        assert max(each["rows"] for each in points) <= document["size"]["max_rows"]
    assert (tmp_path / "runs" / "big.png").stat().st_size > 10_000
