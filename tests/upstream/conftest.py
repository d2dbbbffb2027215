"""Applies the list of tests that do not apply, and limits the examples of TorchRec's
hypothesis tests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from .exceptions import Entry, entries
from .tables import STOCK

HERE = Path(__file__).parent
MOST_EXAMPLES = 3
"""The number of examples for each of TorchRec's hypothesis tests: each example starts
processes.
"""


@pytest.hookimpl(tryfirst=True)  # before -k and -m leave tests out
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    # faster for thousands of tests than is_relative_to()
    mine = [item for item in items if str(item.path).startswith(f"{HERE}{os.sep}")]
    listed = entries()
    found = {
        item: [entry for entry in listed if entry.matches(_name(item))] for item in mine
    }
    if not any("::" in arg for arg in config.args):
        _check_list(listed, found)
    for item, by in found.items():
        _bound_examples(item)
        for entry in by:
            item.add_marker(
                pytest.mark.xfail(reason=entry.reason, strict=True, run=entry.runs)
            )
    if STOCK:
        kept = {item for item, by in found.items() if any(entry.stock for entry in by)}
        items[:] = [item for item in items if item in kept]


def _name(item: pytest.Item) -> str:
    return f"{item.path.relative_to(HERE)}::{item.nodeid.partition('::')[2]}"


def _check_list(listed: list[Entry], found: dict[pytest.Item, list[Entry]]) -> None:
    files = {item.path.name for item in found}
    used = {entry.pattern for by in found.values() for entry in by}
    for entry in listed:
        if entry.file in files and entry.pattern not in used:
            raise pytest.UsageError(
                f"{entry.pattern} in tests/upstream/does_not_apply.txt names no test"
            )
    for item, by in found.items():
        if len(by) > 1:
            raise pytest.UsageError(
                "several entries of tests/upstream/does_not_apply.txt name"
                f" {_name(item)}"
            )


def _bound_examples(item: pytest.Item) -> None:
    # @settings stores this attribute (hypothesis 6). A profile would not replace the
    # settings of the tests.
    function = getattr(
        getattr(item, "function", None), "__func__", getattr(item, "function", None)
    )
    stored = getattr(function, "_hypothesis_internal_use_settings", None)
    if stored is None:
        return
    function._hypothesis_internal_use_settings = hypothesis.settings(
        stored,
        max_examples=min(stored.max_examples, MOST_EXAMPLES),
        verbosity=hypothesis.Verbosity.normal,
        derandomize=True,
        database=None,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    if (
        report.skipped
        and not hasattr(report, "wasxfail")
        and item.path.is_relative_to(HERE)
    ):
        report.outcome = "failed"
        report.longrepr = (
            "skipped without an entry in tests/upstream/does_not_apply.txt:"
            f" {report.longrepr}"
        )
