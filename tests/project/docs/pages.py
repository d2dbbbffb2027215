"""The fenced blocks of a page, in order."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

RUN = ("python", "bash")
OUTPUT = "text output"
"""The output of the block above it.

Lines are compared one by one; a line ``...`` matches any number of lines.
"""
NOT_RUN = ("console", "text", "diff", "cpp", "cmake", "ini", "json", "yaml")
"""Blocks that are only shown: commands on other machines, outputs, changes of other
code.
"""

_FENCE = re.compile(
    r"^( *)```(\{?[^\n`]*)\n(.*?)^\1```$", flags=re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class Block:
    """One fenced block. ``kind`` is the text after the opening fence."""

    kind: str
    text: str
    line: int
    output: str | None = None


def blocks(page: Path) -> list[Block]:
    """The blocks of a page.

    A block that is followed by its output includes the output.
    """
    text = page.read_text()
    found: list[Block] = []
    for match in _FENCE.finditer(text):
        indent, kind, body = match.groups()
        body = re.sub(rf"^{indent}", "", body, flags=re.MULTILINE)
        line = text.count("\n", 0, match.start()) + 1
        if kind == OUTPUT:
            above = found.pop()
            found.append(Block(above.kind, above.text, above.line, output=body))
        else:
            found.append(Block(kind, body, line))
    return found


def without_fences(page: Path) -> str:
    """The text of the page outside of blocks."""
    return _FENCE.sub("", page.read_text())
