"""Whatever kills a save: a checkpoint is whole or not there, and who lives knows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("what", [pytest.param("one", marks=pytest.mark.slow), "ranks"])
def test_killed_saves(what: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.crashing", what, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
