"""The names, lanes and flags of the benchmarks. This module does not import torch."""

from __future__ import annotations

from pathlib import Path

SCRIPTS = (
    "kernel",
    "growth",
    "memory",
    "store",
    "small",
    "dlrm",
    "checkpoint",
    "tiers",
    "reshard",
    "plan",
    "service",
    "serving",
    "options",
)
# These benchmarks measure small outputs or the memory of tables, which malloc does not
# manage: the lanes do not differ.
ONE_LANE = set(SCRIPTS) - {"kernel", "dlrm"}
SCRIPT_OF = {
    "delta": "checkpoint",
    "async_save": "checkpoint",
    "eviction": "tiers",
    "bounded_memory": "tiers",
}
SCRIPT_OF["pauses"] = SCRIPT_OF["cold_writes"] = "tiers"
SCRIPT_OF |= {
    "service_beside": "service",
    "service_dlrm": "service",
    "service_clients": "service",
    "service_latency": "service",
    "service_prefetch": "service",
    "service_replicated": "service",
    "service_saturation": "service",
}
SCRIPT_OF |= {
    f"serving_{part}": "serving"
    for part in (
        "lookup",
        "delta",
        "mapped",
        "servers",
        "load",
        "publisher",
        "http",
        "stream",
    )
}
SCRIPT_OF |= {
    f"options_{part}": "options"
    for part in ("training", "new_rows", "evaluation", "routing", "optimizers")
}

QUICK: dict[str, list[str]] = {
    "kernel": ["--cases", "small", "--steps", "6"],
    "growth": ["--rows", "400000", "--batch", "20000"],
    "memory": ["--rows", "400000"],
    "store": ["--rows", "100000"],
    "small": ["--steps", "20"],
    "dlrm": ["--dim", "16", "--batch-size", "256", "--steps", "5"],
    "checkpoint": ["--rows", "200000", "--only", "full,deltas"],
    "tiers": ["--parts", "eviction,memory", "--rows", "50000", "--steps", "20"],
    "reshard": ["--rows", "20000"],
    "plan": ["--ranks", "2", "--batch", "32", "--scale", "0.01"],
    "service": ["--steps", "5"],
    "serving": ["--rows", "20000", "--seconds", "6", "--steps", "8"],
    "options": ["--rows", "20000", "--batch", "2000", "--steps", "30"],
}
"""The flags of a quick run, which takes seconds.

It tests the benchmark; its figures are not meaningful.
"""


def lanes_of(name: str) -> tuple[str, ...]:
    """Returns the lanes of a benchmark on this machine."""
    if name in ONE_LANE:
        return ("shipped",)
    has_avx512 = "avx512bw" in Path("/proc/cpuinfo").read_text()
    return (
        ("shipped", "kept", "avx2")
        if name == "kernel" and has_avx512
        else ("shipped", "kept")
    )
