"""The README's code runs and prints what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def test_code_blocks() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) == 9
    # gloo's teardown aborts now and then (torch 2.13): leave without it.
    code = "\n".join([*blocks, "import os, sys", "sys.stdout.flush()", "os._exit(0)"])
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    said = re.findall(r"print\(.*\)  # (.*)", "\n".join(blocks))
    assert run.stdout.splitlines() == said
