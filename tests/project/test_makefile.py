from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_commands_of_make_write_bytecode() -> None:
    """An image that sets PYTHONDONTWRITEBYTECODE does not make each process of the
    tests compile TorchRec.
    """
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "RECSTORE_PROBE": "1"}
    variables = subprocess.run(
        ["make", "--silent", "--eval", "probe: ; @env", "probe"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "RECSTORE_PROBE=1" in variables
    assert "PYTHONDONTWRITEBYTECODE" not in variables
