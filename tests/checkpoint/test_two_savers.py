"""Two processes save to one path in several rounds. No save that a process has acknowledged is lost."""

from __future__ import annotations

import pytest

from tests.processes import run_forked_command


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rounds", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_two_savers(rounds: int) -> None:
    done = run_forked_command(["-m", "tests.checkpoint.two_savers", "--rounds", str(rounds)], timeout_s=3600)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert f"{rounds} rounds" in done.stdout
