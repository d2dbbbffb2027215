"""The version, the changelog, and what messages of commits say."""

from __future__ import annotations

import datetime
import re
import subprocess
import sys

import pytest

import torchrec_recstore
from tests.packages import ROOT

KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
# Messages before this commit name folders of the machines on which the commits were
# made.
LAST_UNCHECKED = "7fe295e965a453d7cfde66256a757f56389755ef"
MACHINE_PATH = re.compile(r"/(tmp|work|home|root)/")


def test_the_changelog_is_in_the_form_of_keep_a_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert text.startswith("# Changelog\n")
    assert "https://keepachangelog.com/en/1.1.0/" in text
    headings = re.findall(r"^## (.*)$", text, flags=re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    released = [
        re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - (\d{4}-\d{2}-\d{2})", heading)
        for heading in headings[1:]
    ]
    assert all(released), headings
    dates = [datetime.date.fromisoformat(match[2]) for match in released if match]
    assert dates == sorted(dates, reverse=True)
    assert (
        next(match[1] for match in released if match) == torchrec_recstore.__version__
    )
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        kinds = re.findall(r"^### (.*)$", section, flags=re.MULTILINE)
        assert set(kinds) <= KINDS
        assert len(kinds) == len(set(kinds)), "each kind of change once in a version"


def test_packages_have_the_version() -> None:
    # Building the package must not import torch.
    code = "import sys; sys.modules['torch'] = None; exec(open('setup.py').read())"
    done = subprocess.run(
        [sys.executable, "-c", code, "--version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == torchrec_recstore.__version__


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_messages_of_commits_name_no_path_of_a_machine() -> None:
    if (
        not (ROOT / ".git").exists()
        or git("merge-base", "--is-ancestor", LAST_UNCHECKED, "HEAD").returncode
    ):
        pytest.skip("not a checkout with the history of the last commits")
    messages = git("log", "--format=%h %B%x00", f"{LAST_UNCHECKED}..HEAD").stdout.split(
        "\0"
    )
    assert [
        message.strip() for message in messages if MACHINE_PATH.search(message)
    ] == []
    assert MACHINE_PATH.search("made in /tmp/build")
