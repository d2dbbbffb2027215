"""After a killed save, a checkpoint is complete or does not exist, and the surviving
ranks raise an error.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import run_forked_command


@pytest.mark.slow
@pytest.mark.parametrize("what", ["one", "ranks"])
def test_killed_saves(what: str, tmp_path: Path) -> None:
    done = run_forked_command(["-m", "tests.checkpoint.crashing", what, str(tmp_path)])
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
