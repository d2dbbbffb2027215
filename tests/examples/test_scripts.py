"""The scripts find their own modules, whatever else Python finds under those names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .commands import ROOT

SCRIPTS = ["trainers/accelerate_loop.py", "dlrm/train.py", "online/worker.py"]
PACKAGES = ("common", "dlrm", "online")


@pytest.mark.parametrize("script", SCRIPTS)
def test_other_modules_with_their_names_are_not_taken(
    script: str, tmp_path: Path
) -> None:
    """A module that is installed under the name of one of their folders stands later
    on the path, and wins over a folder that is no package.
    """
    for name in PACKAGES:
        (tmp_path / f"{name}.py").write_text("")
    path = ROOT / "examples" / script
    # The script's own first lines, up to the one that changes the path.
    begin = "import sys\nfrom pathlib import Path\n" + next(
        line for line in path.read_text().splitlines() if line.startswith("sys.path")
    )
    code = f"__file__ = {str(path)!r}\n{begin}\n" + (
        "from importlib.util import find_spec\n"
        f"print(*[find_spec(name).origin for name in {PACKAGES}])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    examples = ROOT / "examples"
    assert done.stdout.split() == [
        str(examples / name / "__init__.py") for name in PACKAGES
    ]
