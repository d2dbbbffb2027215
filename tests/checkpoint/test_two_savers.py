"""Two processes on one path, in rounds: nothing that either of them acknowledges is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rounds", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_two_savers(rounds: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.two_savers", "--rounds", str(rounds)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert f"{rounds} rounds" in done.stdout
