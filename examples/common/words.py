"""Numbers as a report shows them."""

from __future__ import annotations

from typing import Any

ALL = "all"
"""In the place of a table's name: all of them together."""

PART_TITLES = {
    "input_dist": "input dist",
    "lookup": "lookup",
    "dense": "dense",
    "update": "update",
    "reading": "reading",
}
"""What a step's time is split into; the parts' sum is the whole of it. See ``StepSplit``."""


def short(value: float) -> str:
    """A count in four characters or so: 950, 12.5k, 3M."""
    for factor, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"


def short_bytes(value: float) -> str:
    """A size: 950 B, 12.5 kB, 3 MB."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.3g} B"


def share(value: float) -> str:
    """A share of a whole, in per cent."""
    return f"{100 * value:.3g} %"


def plain(value: Any) -> str:
    """A setting or a result."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"
    return str(value)
