"""Runs an example's script the way a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_script(script: str, *flags: object, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """Runs ``examples/<script>`` in a process of its own, or under torchrun in several."""
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(ROOT / "examples" / script), *map(str, flags)]
    # One thread: tests share the machine, and spinning thread pools slow each other down without bound.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
