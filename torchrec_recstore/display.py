"""Reprs, and tables as text and, in notebooks, as HTML. This module imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from html import escape
from typing import Any


def set_fields(value: Any) -> str:
    """Returns the repr of a dataclass, with the fields that differ from their defaults only."""
    shown = [(field.name, getattr(value, field.name)) for field in fields(value) if field.repr]
    defaults = {field.name: _default(field) for field in fields(value)}
    arguments = ", ".join(f"{name}={given!r}" for name, given in shown if given != defaults[name])
    return f"{type(value).__name__}({arguments})"


def _default(field: Field[Any]) -> object:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table as aligned text. Columns of numbers are aligned to the right."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    numbers = [all(cell[:1].isdigit() for cell in cells) for cells in zip(*rows, strict=True)] or [False] * len(widths)

    def line(cells: Sequence[str]) -> str:
        aligned = [
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(cells, widths, numbers, strict=True)
        ]
        return "  ".join(aligned).rstrip()

    return "\n".join([line(columns), line(["-" * width for width in widths]), *map(line, rows)])


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table as HTML, for notebooks."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
