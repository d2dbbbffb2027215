"""The pip commands of errors and pages: one constant decides from where pip takes the
distributions.
"""

from __future__ import annotations

import re
import shlex

import pytest

from tests.packages import ROOT
from torchrec_recstore import installing
from torchrec_recstore.doctor.packages import extra_packages
from torchrec_recstore.installing import install
from torchrec_recstore.plugins import missing
from torchrec_recstore.triples import DEFAULT

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "docs").rglob("*.ipynb")),
    *sorted((ROOT / "docs").rglob("*.rst")),
]
NAMES = re.compile(
    r"(?:torchrec-recstore|path/to/torchrec_recstore)"
    r"(?:[-/](?P<part>service|serving))?(?:\[(?P<extras>[\w,-]+)\])?"
)


def commands() -> list[tuple[str, str]]:
    """Returns the pip commands of the pages that install a distribution of ours, with
    the name of the page.
    """
    page_commands = []
    for page in PAGES:
        if page.name == "changelog.rst":
            continue
        for match in re.finditer(r"pip install [^`\n]+", page.read_text()):
            command = match[0].strip()
            if NAMES.search(command):
                page_commands.append((page.name, command))
    return page_commands


def test_the_commands_of_the_pages_work_today() -> None:
    """Each command of a page is the command that an error would print."""
    checked = 0
    for page, command in commands():
        words = shlex.split(command.partition(" #")[0])[2:]
        expected_words: list[str] = []
        for word in words:
            match = NAMES.fullmatch(word)
            assert match is not None, f"{page}: {command}"
            line = install(match["extras"] or "", part=match["part"] or "")
            expected_words += shlex.split(line)[2:]
        distinct_words = sorted(set(expected_words))
        assert sorted(set(words)) == distinct_words, f"{page}: {command}"
        checked += 1
    assert checked > 10


def test_on_the_day_of_publication(monkeypatch: pytest.MonkeyPatch) -> None:
    def lines() -> list[str]:
        finding = extra_packages("redis", "a use", {"redis": ">=8"}, lambda name: None)
        return [
            finding.fix or "",
            str(missing("follow")).partition("installed: ")[2],
            install("cli,retrieval"),
            DEFAULT.install_on_cpu.partition(" && ")[0],
        ]

    assert lines() == [
        "pip install 'path/to/torchrec_recstore[redis]'",
        "pip install 'path/to/torchrec_recstore/serving[predict]'"
        " path/to/torchrec_recstore/service",
        "pip install 'path/to/torchrec_recstore[cli,retrieval]'"
        " path/to/torchrec_recstore/serving",
        "pip install 'path/to/torchrec_recstore[torchrec-cpu]'",
    ]
    monkeypatch.setattr(installing, "CHECKOUT", None)
    assert lines() == [
        "pip install 'torchrec-recstore[redis]'",
        "pip install 'torchrec-recstore-serving[predict]'",
        "pip install 'torchrec-recstore[cli,retrieval]'",
        "pip install 'torchrec-recstore[torchrec-cpu]'",
    ]


def test_no_command_is_written_by_hand() -> None:
    """No source file has a pip command with a name of ours: only installing.py has."""
    for folder in ("torchrec_recstore", "service", "serving", "examples"):
        for file in (ROOT / folder).rglob("*.py"):
            text = re.sub(r'"\s*f?"', "", file.read_text())
            matches = re.findall(r"pip install [^\n]*torchrec[-_]recstore", text)
            assert not matches, f"{file}: {matches}"
