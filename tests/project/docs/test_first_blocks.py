"""Blocks that a reader copies run as they stand, in an empty folder and without what
the page's other tests prepare.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.packages import ROOT

from .pages import blocks


def python_blocks(page: str) -> list[str]:
    return [block.text for block in blocks(ROOT / page) if block.kind == "python"]


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(program)
    return subprocess.run(
        [sys.executable, "program.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_the_first_block_about_checkpoints_runs(tmp_path: Path) -> None:
    done = run(python_blocks("docs/checkpoint.md")[0], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1\n"
    assert (tmp_path / "users" / "1").is_dir()


@pytest.mark.slow
def test_the_planner_logs_each_line_once(tmp_path: Path) -> None:
    codes = python_blocks("docs/planner.md")
    with_log = next(code for code in codes if "addHandler" in code)
    # As after any `logging.warning()` of a library.
    root_handler = "import logging\nlogging.basicConfig()\n"
    done = run(root_handler + codes[0] + with_log, tmp_path)
    assert done.returncode == 0, done.stderr
    lines = (done.stdout + done.stderr).splitlines()
    for table in ("t_user", "t_item"):
        of_table = [line for line in lines if f"RecStore table '{table}':" in line]
        assert len(of_table) == 1


def guides() -> list[str]:
    """The pages below the captions Start and Guides of docs/index.md."""
    index = (ROOT / "docs" / "index.md").read_text()
    names: list[str] = []
    for caption in ("Start", "Guides"):
        tree = index.partition(f":caption: {caption}\n:hidden:\n")[2]
        names += tree.partition("```")[0].split()
    names.remove("your-model")  # a notebook
    return names


@pytest.mark.parametrize("name", guides())
def test_a_guide_begins_with_a_block(name: str) -> None:
    """After what the reader can do with the page, and before any table."""
    page = ROOT / "docs" / f"{name}.md"
    lines = page.read_text().splitlines()
    first_block = blocks(page)[0].line
    tables = [number for number, line in enumerate(lines, 1) if line.startswith("|")]
    assert first_block <= 20
    assert not tables or first_block < tables[0]
    opening = " ".join(lines[2 : first_block - 1])
    assert len(opening) > 40
