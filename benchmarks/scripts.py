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
    "device_host",
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
    "pauses": "tiers",
    "cold_writes": "tiers",
    "service_beside": "service",
    "service_dlrm": "service",
    "service_clients": "service",
    "service_latency": "service",
    "service_prefetch": "service",
    "service_replicated": "service",
    "service_saturation": "service",
    "serving_lookup": "serving",
    "serving_delta": "serving",
    "serving_mapped": "serving",
    "serving_servers": "serving",
    "serving_load": "serving",
    "serving_publisher": "serving",
    "serving_http": "serving",
    "serving_stream": "serving",
    "options_training": "options",
    "options_new_rows": "options",
    "options_evaluation": "options",
    "options_routing": "options",
    "options_optimizers": "options",
}
"""The script of each benchmark that has not the name of its script."""

QUICK: dict[str, list[str]] = {
    "kernel": ["--cases", "small", "--steps", "6"],
    "growth": ["--rows", "400000", "--batch", "20000"],
    "memory": ["--rows", "400000"],
    "store": ["--rows", "100000"],
    "small": ["--steps", "20"],
    "dlrm": ["--dim", "16", "--batch-size", "256", "--steps", "5"],
    "device_host": ["--rows", "20000", "--steps", "2", "--warm-up", "1"],
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
    if name == "kernel" and has_avx512:
        return ("shipped", "kept", "avx2")
    return ("shipped", "kept")
