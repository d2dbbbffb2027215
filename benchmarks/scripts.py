"""Which benchmarks there are, and how each is run; free of torch."""

from __future__ import annotations

SCRIPTS = ("kernel", "growth", "memory", "store", "dlrm", "checkpoint", "tiers", "service", "options")
# The table's memory is not malloc's.
ONE_LANE = {"growth", "memory", "store", "checkpoint", "tiers", "service", "options"}
SCRIPT_OF = {"delta": "checkpoint", "async_save": "checkpoint", "eviction": "tiers", "bounded_memory": "tiers"}
SCRIPT_OF |= {"service_clients": "service", "service_prefetch": "service"}
SCRIPT_OF |= {f"options_{part}": "options" for part in ("training", "new_rows", "evaluation", "routing")}

QUICK: dict[str, list[str]] = {
    "kernel": ["--cases", "small", "--steps", "6"],
    "growth": ["--rows", "400000", "--batch", "20000"],
    "memory": ["--rows", "400000"],
    "store": ["--rows", "100000"],
    "dlrm": ["--dim", "16", "--batch-size", "256", "--steps", "5"],
    "checkpoint": ["--rows", "200000", "--only", "full,deltas"],
    "tiers": ["--parts", "eviction,memory", "--rows", "50000", "--steps", "20"],
    "service": ["--steps", "5"],
    "options": ["--rows", "20000", "--batch", "2000", "--steps", "30"],
}
"""Flags with which a script takes seconds, and its figures say that all works rather than how fast it is."""


def lanes_of(name: str) -> tuple[str, ...]:
    """The lanes that a script is run in."""
    return ("shipped",) if name in ONE_LANE else ("shipped", "kept")
