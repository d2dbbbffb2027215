"""Two processes save to one path in several rounds.

No save that a process has acknowledged is lost.
"""

from __future__ import annotations

import pytest

from tests.processes import run_forked_command


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_savers() -> None:
    done = run_forked_command(
        ["-m", "tests.checkpoint.two_savers", "--rounds", "16"], timeout_s=3600
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "16 rounds" in done.stdout
