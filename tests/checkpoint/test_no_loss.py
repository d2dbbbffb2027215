"""A killed run with a cold store that is resumed from its checkpoint ends with the rows
of an unbounded run.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_every_row_is_that_of_a_run_without_a_bound(tmp_path: Path) -> None:
    ids, max_rows = 400_000, 40_000

    def run(phase: str) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "tests.checkpoint.no_loss",
            phase,
            str(tmp_path),
        ]
        sizes = [f"--ids={ids}", f"--max-rows={max_rows}"]
        return subprocess.run(
            [*command, *sizes], capture_output=True, text=True, check=False
        )

    killed = run("train")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    cold = re.search(r"cold_rows=(\d+)", killed.stdout)
    assert cold is not None
    assert int(cold[1]) > 4 * max_rows
    resumed = run("resume")
    assert resumed.returncode == 0, resumed.stderr
    assert f"{ids} rows" in resumed.stdout
    print(killed.stdout, resumed.stdout)
