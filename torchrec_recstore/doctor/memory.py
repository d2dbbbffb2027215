"""Memory that tables can have.

A table's rows lie in anonymous memory that is reserved without a promise (``MAP_NORESERVE``) and committed as it is
touched. A region that grows reserves twice its size elsewhere and moves its pages there, so that for a moment three
times its size are reserved, and no more touched than rows need.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torchrec_recstore.doctor.finding import Finding, size
from torchrec_recstore.doctor.machine import UNLIMITED, Machine
from torchrec_recstore.doctor.probe import Imported

_LITTLE = 2 << 30


def available(machine: Machine) -> Finding:
    """Memory that is there for rows."""
    memory = machine.memory()
    if "MemAvailable" not in memory:
        return Finding("memory", "problem", "no MemAvailable in /proc/meminfo: tables cannot tell what is left")
    found = f"{size(memory['MemAvailable'])} available of {size(memory['MemTotal'])}"
    if memory["MemAvailable"] < _LITTLE:
        return Finding("memory", "warning", found, "end other programs, or bound tables: TableOptions(max_rows=...)")
    return Finding("memory", "ok", found)


def buffers(imported: Mapping[str, Imported]) -> Finding:
    """Outputs and gradients that a process keeps for its next steps."""
    extension = imported.get("torchrec_recstore.ops")
    kept = None if extension is None else extension.facts.get("kept_bytes")
    if kept is None:
        return Finding("buffers", "ok", "not known without the native extension")
    return Finding(
        "buffers",
        "ok",
        f"each process keeps up to {size(int(kept))} of outputs and gradients for its next steps, more where recent "
        "steps used more; torchrec_recstore.ops.buffer_pool_bytes() counts them",
    )


def control_group(machine: Machine) -> Finding:
    """The limit of a container, a batch system's job or a systemd unit, past which the kernel kills the process."""
    limits: dict[Path, int] = {}
    for folder in machine.groups("memory"):  # the native store asks the same ones before a table grows
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = machine.number(str(folder / name))
            if limit is not None and limit < machine.memory().get("MemTotal", 0):
                limits[folder / name] = limit
    if not limits:
        return Finding("memory limit", "ok", "no control group bounds this process to less than the machine has")
    tightest = min(limits, key=lambda path: limits[path])
    found = f"{size(limits[tightest])} in /{tightest}: tables refuse to grow past it"
    if limits[tightest] < _LITTLE:
        return Finding("memory limit", "warning", found, "raise it, or bound tables: TableOptions(max_rows=...)")
    return Finding("memory limit", "ok", found)


def overcommit(machine: Machine) -> Finding:
    """Whether the kernel lets address space be reserved that is never touched."""
    mode = machine.number("proc/sys/vm/overcommit_memory")
    if mode is None:
        return Finding("overcommit", "warning", "/proc/sys/vm/overcommit_memory cannot be read")
    if mode != 2:
        return Finding("overcommit", "ok", f"vm.overcommit_memory = {mode}")
    memory = machine.memory()
    left = memory.get("CommitLimit", 0) - memory.get("Committed_AS", 0)
    return Finding(
        "overcommit",
        "problem" if left < _LITTLE else "warning",
        f"vm.overcommit_memory = 2: reserved address space counts, {size(max(left, 0))} is left, and a table that "
        "grows reserves three times its size",
        "sudo sysctl vm.overcommit_memory=0  # until the next boot; to keep it: "
        "echo vm.overcommit_memory=0 | sudo tee /etc/sysctl.d/90-recstore.conf",
    )


def huge_pages(machine: Machine) -> Finding:
    """Whether rows can lie in pages of 2 MiB, which the processor translates without walking through tables."""
    text = machine.read("sys/kernel/mm/transparent_hugepage/enabled")
    if text is None:
        return Finding("huge pages", "warning", "this kernel has no transparent huge pages: lookups are slower")
    chosen = text[text.find("[") + 1 : text.find("]")]
    if chosen in ("always", "madvise"):
        return Finding("huge pages", "ok", f"transparent_hugepage/enabled: {chosen}")
    return Finding(
        "huge pages",
        "warning",
        f"transparent_hugepage/enabled: {chosen}: rows lie in small pages, lookups are slower",
        "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled  # until the next boot; "
        "to keep it: transparent_hugepage=madvise on the kernel's command line",
    )


def address_space(machine: Machine) -> Finding:
    """``ulimit -v``."""
    if machine.address_space == UNLIMITED:
        return Finding("address space", "ok", "ulimit -v: unlimited")
    return Finding(
        "address space",
        "warning",
        f"ulimit -v: {size(machine.address_space)}; a table that grows reserves three times its size",
        "ulimit -v unlimited",
    )
