"""Saves while the disk is full or fails, at each call in turn: failing_saves.py, with
the library of failing_disk.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.failing_disk import environment_with_shim


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("ranks", "step"), [(1, 4), (2, 12)])
def test_saves_while_the_disk_fails(tmp_path: Path, ranks: int, step: int) -> None:
    """The error names the file, the last checkpoint loads, no file is left, training
    goes on, and the next save works.

    The saves are a full one, ``async_save``, a delta and one that overwrites.
    """
    command = [
        sys.executable,
        "-m",
        "tests.checkpoint.failing_saves",
        str(tmp_path),
        str(ranks),
        str(step),
    ]
    environment = environment_with_shim(tmp_path)
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    print(done.stdout)
