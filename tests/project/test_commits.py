"""The messages of commits: a short subject, a body that says why, no path of a machine,
and no merges.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.packages import ROOT

FIRST = "53db31a"
"""The commits after this one follow the rules."""


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def commits() -> list[tuple[str, list[str], str]]:
    """The short hash, the parents and the message of each commit after the first one."""
    try:
        if (
            Path(git("rev-parse", "--show-toplevel").strip()).resolve()
            != ROOT.resolve()
        ):
            pytest.skip("the folder is not a checkout")
        git("merge-base", "--is-ancestor", FIRST, "HEAD")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("the history is not there")
    log = git("log", "--format=%h%x1f%p%x1f%B%x1e", f"{FIRST}..HEAD")
    found = [
        entry.strip("\n").split("\x1f") for entry in log.split("\x1e") if entry.strip()
    ]
    return [(short, parents.split(), message) for short, parents, message in found]


def faults(parents: list[str], message: str) -> list[str]:
    """What is wrong with a commit."""
    subject, *rest = message.strip("\n").split("\n")
    checks = {
        "it is a merge": len(parents) > 1,
        "its subject has more than 72 characters": len(subject) > 72,
        "it has no body after an empty line": (
            len(rest) < 2 or bool(rest[0]) or not rest[1].strip()
        ),
        "it names a path of a machine": bool(
            re.search(r"(?<![\w./-])/(work|home|tmp|root|Users)\b", message)
        ),
    }
    return [fault for fault, found in checks.items() if found]


def test_every_commit_follows_the_rules() -> None:
    found = {
        f"{short} {message.splitlines()[0]}": faults(parents, message)
        for short, parents, message in commits()
    }
    assert {commit: wrong for commit, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize(
    ("parents", "message", "wrong"),
    [
        (1, "Tables: rows are counted\n\nThe planner needs them.\n", []),
        (1, "Tables: paths below tests/tmp\n\nSee examples/work.\n", []),
        (2, "Merge\n\nBoth.", ["it is a merge"]),
        (1, "T" * 73 + "\n\nWhy.", ["its subject has more than 72 characters"]),
        (1, "Tables", ["it has no body after an empty line"]),
        (1, "Tables\nWhy.", ["it has no body after an empty line"]),
        (1, "Tables\n\nSeen in /tmp/run.", ["it names a path of a machine"]),
    ],
)
def test_faults_are_found(parents: int, message: str, wrong: list[str]) -> None:
    assert faults(["p"] * parents, message) == wrong
