"""Every code block of every page runs, and prints what the page says."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.multiprocessing as mp

from tests.packages import ROOT
from tests.processes import START_METHOD

from .pages import NOT_RUN, RUN, Block, blocks, without_fences
from .run_page import matches, run

PAGES = sorted((ROOT / "docs").glob("*.md"))
WITH_CODE = [page for page in PAGES if any(block.kind in RUN for block in blocks(page))]
AROUND = Path(__file__).parent / "around"
"""By the page's name: Python that makes what its blocks take for granted, and that
looks at what they have done.
"""

SLOW = {
    "checkpoint",
    "cold_stores",
    "command",
    "compile",
    "first-table",
    "operations",
    "planner",
    "publishing",
    "serving",
    "triton",
}
"""Pages whose blocks take the most time.

``test_what_blocks_import_is_there`` looks at these pages too.
"""

TIMEOUT_S = 280


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page, id=page.stem, marks=[pytest.mark.slow] if page.stem in SLOW else []
        )
        for page in [ROOT / "README.md", *WITH_CODE]
    ],
)
def test_blocks_run(page: Path, tmp_path: Path) -> None:
    around = [
        AROUND / f"{page.stem.replace('-', '_')}_{when}.py"
        for when in ("before", "after")
    ]
    codes = [path.read_text() if path.exists() else "" for path in around]
    to_run = [block for block in blocks(page) if block.kind in RUN]
    process = mp.get_context(START_METHOD).Process(
        target=run, args=(to_run, tmp_path, *codes)
    )
    process.start()
    process.join(TIMEOUT_S)
    alive = process.is_alive()
    process.kill()
    process.join()
    failed, skipped = tmp_path / "failed", tmp_path / "skipped"
    assert not alive, f"the blocks have not ended in {TIMEOUT_S} s"
    assert not failed.exists(), failed.read_text()
    assert process.exitcode == 0
    if skipped.exists():
        pytest.skip(skipped.read_text())


def imported_names(code: str) -> Iterator[tuple[str, str]]:
    """Modules of this package that the code imports from, and the names that it
    imports.
    """
    for node in ast.walk(ast.parse(code)):
        if (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").split(".")[0] == "torchrec_recstore"
        ):
            yield from ((node.module or "", alias.name) for alias in node.names)


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *WITH_CODE], ids=lambda page: page.stem
)
def test_what_blocks_import_is_there(page: Path) -> None:
    codes = [block.text for block in blocks(page) if block.kind == "python"]
    for module, name in {found for code in codes for found in imported_names(code)}:
        assert hasattr(importlib.import_module(module), name), f"{module} has no {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_say_what_they_are(page: Path) -> None:
    """Whatever is not run is marked as such, and code stands in fences alone."""
    kinds = {block.kind for block in blocks(page)}
    assert {kind for kind in kinds if not kind.startswith("{")} <= {*RUN, *NOT_RUN}
    for block in blocks(page):
        if block.kind == "console":
            assert block.text.startswith("$ "), (
                f"line {block.line}: a console shows a prompt"
            )
        if block.kind not in RUN and not block.kind.startswith("{"):
            code = re.search(
                r"^(import|from) \w+|^recstore \w+", block.text, flags=re.MULTILINE
            )
            assert code is None, (
                f"line {block.line}: code that could run is marked {block.kind!r}"
            )
    prose = without_fences(page)
    assert "```" not in prose
    indented = re.findall(r"(?:^|\n\n) {4}(?! *[-*] ).*", prose)
    assert not [text for text in indented if not _of_a_list(prose, text)]


def _of_a_list(prose: str, text: str) -> bool:
    """Whether an indented paragraph belongs to an item of a list."""
    above = prose[: prose.index(text)].rstrip().rpartition("\n\n")[2]
    return above.lstrip().startswith(("- ", "* ", "1. "))


def test_outputs_are_compared_line_by_line() -> None:
    assert matches("a\nb  \n", "a\nb\n")
    assert matches("a\nb\nc\nd\n", "a\n...\nd\n")
    assert matches("", "")
    assert not matches("a\nb\n", "a\n")
    assert not matches("a\n", "")
    assert not matches("a\nb\n", "...\na\n")


def test_a_block_that_fails_or_prints_something_else_is_found(tmp_path: Path) -> None:
    for number, (block, said) in enumerate(
        [
            (Block("python", "print(1)  # 2\n", 1), "where the page says\n2"),
            (Block("python", "1 / 0\n", 1), "ZeroDivisionError"),
            (Block("bash", "echo here; false; true\n", 7), "line 7 ends with 1:\nhere"),
            (
                Block("bash", "echo 127.0.0.1:7700\n", 1, output="127.0.0.1:7700\n"),
                "where the page says",
            ),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        process = mp.get_context(START_METHOD).Process(
            target=run, args=([block], folder)
        )
        process.start()
        process.join(TIMEOUT_S)
        assert said in (folder / "failed").read_text()
