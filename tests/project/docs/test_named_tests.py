"""docs/dynamicemb.md names tests that exist, and each row of its tables has a test or a
reason.
"""

from __future__ import annotations

import ast
import re

from tests.packages import ROOT

PAGE = (ROOT / "docs" / "dynamicemb.md").read_text()


def functions_of(file: str) -> set[str]:
    path = ROOT / file
    if not path.is_file():
        return set()
    return {
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }


def test_every_test_that_is_named_exists() -> None:
    named = set(re.findall(r"(tests/[\w/]+\.py)::(\w+)", PAGE))
    assert len(named) > 80
    there = {file: functions_of(file) for file, _ in named}
    missing = sorted(
        f"{file}::{name}" for file, name in named if name not in there[file]
    )
    assert not missing


def test_every_row_has_a_test_or_a_reason() -> None:
    rows = [
        line.strip("| ").split(" | ")
        for line in PAGE.splitlines()
        if line.startswith("| ")
    ]
    promises = [row for row in rows if len(row) == 3 and row[1].startswith("`")]
    assert len(promises) > 80
    for what, files, ours in promises:
        assert what.endswith("."), what
        assert all(re.fullmatch(r"`[\w/]+\.py`", file) for file in files.split(", ")), (
            what
        )
        assert "`tests/" in ours or ours.startswith(("RecStore ", "A detail of ")), what
