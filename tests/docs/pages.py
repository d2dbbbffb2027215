"""What stands in a page between fences, in order."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN = ("python", "bash")
OUTPUT = "text output"
"""What the block above it prints: compared line by line; a line of ``...`` stands for any number of lines."""
NOT_RUN = ("console", "text", "diff", "cpp", "cmake", "ini", "json")
"""What a reader sees as such: commands of other machines, what something prints, changes of other code."""

_FENCE = re.compile(r"^( *)```(\{?[^\n`]*)\n(.*?)^\1```$", flags=re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block: ``kind`` is what stands behind the opening fence."""

    kind: str
    text: str
    line: int
    output: str | None = None


def blocks(page: Path) -> list[Block]:
    """A page's blocks; one that is followed by its output has it."""
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
    """The page's prose."""
    return _FENCE.sub("", page.read_text())
