"""The number of TorchRec's tests that ran, for the end of pytest's output."""

from __future__ import annotations

import pytest

FOLDER = "tests/upstream/"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the numbers if any test of this directory ran."""
    counts = {
        outcome: sum(
            report.nodeid.startswith(FOLDER)
            for report in terminalreporter.stats.get(outcome, ())
        )
        for outcome in ("passed", "failed", "xfailed")
    }
    if any(counts.values()):
        ran = counts["passed"] + counts["failed"]
        terminalreporter.write_line(
            f"upstream: {ran} ran, {counts['xfailed']} do not apply"
        )
