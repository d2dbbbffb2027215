"""The measurement `serving_stream` of benchmarks/serving.py runs, and its clicks are
served.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packages import ROOT
from tests.redis_server import needs_redis


@needs_redis
@pytest.mark.slow
def test_a_short_stream(tmp_path: Path) -> None:
    call = f"serving.stream(pathlib.Path({str(tmp_path)!r}), 3)"
    done = subprocess.run(
        [sys.executable, "-c", f"import pathlib, serving; {call}"],
        cwd=ROOT / "benchmarks",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout.splitlines()[-1])
    assert row["clicks"] > 100
    assert row["clicks_served"] == row["clicks"]
    assert 0 < row["click_to_served_s"]["median"] < 30
