"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Args:
        name: of what was looked at.
        status: ``"problem"``: something will not work; ``"warning"``: it is slower than it could be, or fails one day.
        found: what is so.
        fix: what to type or do; empty where there is nothing to do.
    """

    name: str
    status: Status
    found: str
    fix: str = ""


def size(count: float) -> str:
    """Bytes for people: ``3.2 GB``."""
    for scale, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= scale:
            return f"{count / scale:.1f} {name}"
    return f"{count:.0f} B"
