"""The disk fails with EIO at each call of an SSDStore, and a process dies in each write
of a compaction.

The real library writes and reads; a preloaded library has single calls fail:
tests/failing_disk.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.failing_disk import environment_with_shim


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return environment_with_shim(tmp_path)


def _run(environment: dict[str, str], *command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_disk_that_fails_at_each_call(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """No row is missing or old, every error names the file, and a new process has all
    acknowledged rows.
    """
    print(_run(environment, "tests.store.failing_ssd", str(tmp_path / "store"), "20"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kills_in_the_writes_of_a_compaction(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    print(_run(environment, "tests.store.killed_compaction", str(tmp_path), "60"))
