"""Wheel and sdist, built and tried in clean environments: minutes, most of them pip's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .test_contents import ROOT, tracked


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_built_installed_and_run(tmp_path: Path) -> None:
    tracked()  # a checkout is what is built
    build = [sys.executable, "-m", "build", "--outdir", str(tmp_path)]
    subprocess.run([*build, str(ROOT)], check=True, capture_output=True)
    wheel, sdist = sorted(tmp_path.iterdir(), key=lambda path: path.suffix != ".whl")
    assert wheel.name.endswith("-cp310-abi3-linux_x86_64.whl")
    for artifact in (wheel, sdist):
        run = subprocess.run([ROOT / "tests/package/install.sh", artifact], capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
        for said in ("quickstart: three rows", "0 problems", "test AUC", "files good", "kernel "):
            assert said in run.stdout
