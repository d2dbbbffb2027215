"""Random and damaged messages. ``python -m tests.service.fuzz`` sends a million."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.service.fuzz import fuzz


@pytest.mark.parametrize(
    ("calls", "seed"), [(1_500, 0), pytest.param(8_000, 1, marks=pytest.mark.slow)]
)
def test_no_call_fails_in_the_server_or_changes_rows_that_it_is_not_for(
    tmp_path: Path, calls: int, seed: int
) -> None:
    statuses = fuzz(calls, seed, tmp_path)
    assert statuses.total() >= calls
    # Calls of each kind are made: those that succeed, and those that are refused for
    # each reason.
    assert {
        "OK",
        "INVALID_ARGUMENT",
        "FAILED_PRECONDITION",
        "NOT_FOUND",
    } <= statuses.keys()
