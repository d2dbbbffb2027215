"""Simulated machines for tests: files of ``/proc`` and ``/sys`` in the format of Linux."""

from __future__ import annotations

from pathlib import Path

from torchrec_recstore.doctor.machine import Machine

MEMINFO = """MemTotal:       24739540 kB
MemFree:        12102516 kB
MemAvailable:   {available} kB
Buffers:          188112 kB
HugePages_Total:       0
CommitLimit:    12369768 kB
Committed_AS:   {committed} kB
"""


def machine(
    root: Path, files: dict[str, str] | None = None, **others: object
) -> Machine:
    """Returns a machine of 24 GB without limits, changed by the given files."""
    meminfo = MEMINFO.format(available=20000000, committed=1195944)
    usual = {
        "proc/meminfo": meminfo,
        "proc/sys/vm/overcommit_memory": "0\n",
        "proc/self/cgroup": "0::/\n",
    }
    usual["sys/kernel/mm/transparent_hugepage/enabled"] = "always [madvise] never\n"
    for name, text in {**usual, **(files or {})}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Machine(root=root, **others)  # type: ignore[arg-type]
