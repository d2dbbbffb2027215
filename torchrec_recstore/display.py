"""Reprs, and tables as text and, in notebooks, as HTML.

This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields
from html import escape
from typing import Any


def set_fields(value: Any) -> str:
    """Returns the repr of a dataclass: the fields that differ from their defaults."""
    shown = []
    for field in fields(value):
        default: Any = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        if not field.repr:
            continue
        field_value = getattr(value, field.name)
        if field_value != default:
            shown.append(f"{field.name}={field_value!r}")

    name = type(value).__name__
    arguments = ", ".join(shown)
    return f"{name}({arguments})"


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table as aligned text. Columns of numbers are aligned to the right."""
    aligned_columns = []
    for number, name in enumerate(columns):
        cells = [row[number] for row in rows]
        aligned_columns.append(_aligned(name, cells))

    lines = []
    for aligned_cells in zip(*aligned_columns, strict=True):
        line = "  ".join(aligned_cells)
        lines.append(line.rstrip())
    return "\n".join(lines)


def _aligned(name: str, cells: Sequence[str]) -> list[str]:
    """Returns the name of a column, a rule and the cells, all equally wide."""
    width = max(len(line) for line in [name, *cells])
    rule = "-" * width
    lines = [name, rule, *cells]
    are_numbers = bool(cells) and all(cell[:1].isdigit() for cell in cells)
    if are_numbers:
        return [line.rjust(width) for line in lines]
    return [line.ljust(width) for line in lines]


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table as HTML, for notebooks."""
    head = _html_row("th", columns)
    body = "".join(_html_row("td", row) for row in rows)
    return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"


def _html_row(tag: str, cells: Sequence[str]) -> str:
    content = ""
    for cell in cells:
        content += f"<{tag}>{escape(cell)}</{tag}>"
    return f"<tr>{content}</tr>"
