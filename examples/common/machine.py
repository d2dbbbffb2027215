"""What a run ran on, and how much memory its process takes."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from rich.filesize import decimal

PACKAGES = (
    "torchrec-recstore",
    "torch",
    "torchrec",
    "fbgemm-gpu-cpu",
    "fbgemm-gpu",
    "numpy",
    "tensorboard",
    "matplotlib",
)


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that a run depends on; those that are installed."""
    found = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, str]:
    """The processor, its cores as far as this process may use them, memory and system."""
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "threads of torch": str(torch.get_num_threads()),
        "memory": decimal(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "system": platform.platform(),
        "host": platform.node(),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def resident_bytes() -> int:
    """Memory of this process that is in DRAM, with what it shares."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
