"""Reprs, and tables as text and, in notebooks, as HTML.

This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields
from html import escape
from typing import Any


def set_fields(value: Any) -> str:
    """Returns the repr of a dataclass, with the fields that differ from their defaults
    only.
    """
    shown = []
    for field in fields(value):
        default = (
            field.default
            if field.default_factory is MISSING
            else field.default_factory()
        )
        if field.repr and getattr(value, field.name) != default:
            shown.append(f"{field.name}={getattr(value, field.name)!r}")
    return f"{type(value).__name__}({', '.join(shown)})"


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table as aligned text. Columns of numbers are aligned to the right."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    numbers = [
        all(cell[:1].isdigit() for cell in cells) for cells in zip(*rows, strict=True)
    ] or [False] * len(widths)

    def line(cells: Sequence[str]) -> str:
        aligned = zip(cells, widths, numbers, strict=True)
        return "  ".join(
            c.rjust(width) if number else c.ljust(width) for c, width, number in aligned
        ).rstrip()

    return "\n".join(
        [line(columns), line(["-" * width for width in widths]), *map(line, rows)]
    )


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table as HTML, for notebooks."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
