"""mypy finds the types of the installed packages in a program of a user."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packages import PROJECTS, ROOT
from tests.project.docs.pages import blocks

SETTINGS = """
[mypy]
follow_imports = silent
[mypy-torch.*,torchrec.*,fbgemm_gpu.*,numpy.*,pyarrow.*]
follow_imports = skip
ignore_missing_imports = True
"""
"""Without the types of torch, which take mypy a minute."""

ASKED = """
import torchrec_recstore_service
import torchrec_recstore_serving

reveal_type(RecStoreSharder())
"""


@pytest.mark.slow
def test_mypy_finds_the_types_of_the_installed_packages(tmp_path: Path) -> None:
    """A hook of an editable installation is not seen by mypy, but a path is."""
    codes = [
        block.text for block in blocks(ROOT / "README.md") if block.kind == "python"
    ]
    (tmp_path / "program.py").write_text("\n".join(codes) + ASKED)
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    # The sources of the checkout are found by the installation only.
    hidden = ("PYTHONPATH", "MYPYPATH")
    environment = {
        name: value for name, value in os.environ.items() if name not in hidden
    }
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "program.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert 'Revealed type is "torchrec_recstore.' in done.stdout, done.stdout
    for package in PROJECTS:
        assert f'"{package}"' not in done.stdout, done.stdout
