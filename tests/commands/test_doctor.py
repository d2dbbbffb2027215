"""Tests of ``recstore doctor`` on this machine, unchanged and with a torch that cannot
be imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def doctor(*flags: str, path: str = str(ROOT)) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torchrec_recstore.cli", "doctor", *flags]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=200,
    )


@pytest.mark.slow
def test_this_machine(tmp_path: Path) -> None:
    run = doctor("--data", str(tmp_path), "--json")
    assert run.stderr == ""
    told = json.loads(run.stdout)
    findings = {finding["name"]: finding for finding in told["findings"]}
    # Tests run with the packages that requirements/ pins, which fit each other on every
    # machine.
    for finding in told["findings"]:
        assert finding["section"] != "packages" or finding["status"] == "ok", finding
        assert finding["status"] == "ok" or finding["fix"], finding
    sections = dict.fromkeys(finding["section"] for finding in told["findings"])
    assert list(sections) == ["packages", "processor", "memory", "threads", "files"]
    assert findings["disk"]["found"].endswith(f"free at {tmp_path}")
    assert run.returncode == (1 if told["problems"] else 0)


def test_a_torch_that_does_not_load(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "raise ImportError('libtorch_cpu.so: undefined symbol')\n"
    )
    run = doctor(path=f"{tmp_path}:{ROOT}")
    assert run.returncode == 1
    lines = [line.rstrip() for line in run.stdout.splitlines()]
    at = next(i for i, line in enumerate(lines) if line.startswith("  problem torch "))
    assert (
        "cannot be imported: ImportError: libtorch_cpu.so: undefined symbol"
        in lines[at]
    )
    assert (
        lines[at + 1].strip()
        == f"pip install torch=={version('torch').partition('+')[0]} --force-reinstall"
    )
    assert lines[-1].split(" problem")[0].isdigit()
    assert (run.stderr, "files" in lines) == ("", True)
