"""Writes the entries of docs/errors.md, from the situations of this folder that have a
docstring.

python -m tests.errors
"""

from __future__ import annotations

import builtins
import inspect
import textwrap
from pathlib import Path

from tests.errors import (
    checkpoints,
    examples,
    exports,
    first_mistakes,
    services,
    sharding,
    tables,
)
from tests.errors.situations import SITUATIONS, Situation

# importing them registers the situations
assert all((checkpoints, examples, exports, first_mistakes, services, sharding, tables))

DOCUMENT = Path(__file__).parents[2] / "docs" / "errors.md"
BEGIN_FIRST, END_FIRST = (
    "<!-- first mistakes: written by python -m tests.errors -->\n",
    "<!-- end of first mistakes -->\n",
)
BEGIN, END = (
    "<!-- errors: written by python -m tests.errors -->\n",
    "<!-- end of errors -->\n",
)


def explanation(situation: Situation) -> tuple[str, str]:
    """The title of an entry, and its cause and fix on one line.

    Both are empty if there is no entry.
    """
    title, _, text = inspect.cleandoc(situation.function.__doc__ or "").partition(
        "\n\n"
    )
    return title.rstrip("."), " ".join(text.split())


def with_entries(page: str) -> str:
    """The page with the present entries: the first mistakes, then by class, with those
    of this package first.
    """
    explained = [each for each in SITUATIONS.values() if each.function.__doc__]
    above_first, _, rest = page.partition(BEGIN_FIRST)
    _, _, rest = rest.partition(END_FIRST)
    above, _, rest = rest.partition(BEGIN)
    _, _, below = rest.partition(END)
    first_lines = [BEGIN_FIRST]
    for situation in explained:
        if situation.first:
            first_lines.append(_entry(situation))
    explained = [situation for situation in explained if not situation.first]
    lines = [BEGIN]
    for kind in sorted(
        {each.kind for each in explained},
        key=lambda kind: (hasattr(builtins, kind), kind),
    ):
        lines.append(f"\n## `{kind}`\n")
        for each in explained:
            if each.kind == kind:
                lines.append(_entry(each))
    return "".join(
        [above_first, *first_lines, "\n", END_FIRST, above, *lines, "\n", END, below]
    )


def _entry(situation: Situation) -> str:
    """The entry of a situation: its title, its message, and its cause and fix."""
    title, text = explanation(situation)
    message = _filled(situation.message)
    return f"\n### {title}\n\n```text\n{message}\n```\n\n{_filled(text)}\n"


def _filled(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    DOCUMENT.write_text(with_entries(DOCUMENT.read_text()))
