from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 112 MB. A file named ``ballast`` takes 72 MB of it."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=112m", "tmpfs", str(path)]
    if (
        os.getuid() != 0
        or shutil.which("mount") is None
        or subprocess.run(mount, capture_output=True).returncode
    ):
        pytest.skip("a file system of its own cannot be mounted here: only root may")
    try:
        (path / "ballast").write_bytes(bytes(72 * 2**20))
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
