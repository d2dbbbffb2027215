"""Threads of torch, on which lookups and updates run."""

from __future__ import annotations

from torchrec_recstore.doctor.finding import Finding
from torchrec_recstore.doctor.machine import Machine


def threads(machine: Machine) -> Finding:
    """As many as there are cores to run on."""
    cores = usable_cores(machine)
    where = f"{machine.cores} cores" + (
        "" if cores == machine.cores else f", of whose time a control group gives {cores}"
    )
    ranks = (
        f"several ranks: torchrun gives each one thread unless told otherwise: OMP_NUM_THREADS={cores // 2} "
        "torchrun --nproc-per-node 2 ..."
    )
    set_to = machine.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if not set_to:
        if cores < machine.cores:
            found = f"{where}, and torch starts {machine.cores} threads"
            return Finding("threads", "warning", found, f"export OMP_NUM_THREADS={cores}")
        return Finding("threads", "ok", where, ranks if cores > 2 else "")
    if not set_to.isdigit() or int(set_to) < 1:
        return Finding(
            "threads", "warning", f"OMP_NUM_THREADS={set_to} is no number of threads", f"export OMP_NUM_THREADS={cores}"
        )
    found = f"OMP_NUM_THREADS={set_to} on {where}"
    if int(set_to) > cores:
        return Finding("threads", "warning", f"{found}: they wait for each other", f"export OMP_NUM_THREADS={cores}")
    if int(set_to) == 1 < cores:
        return Finding("threads", "warning", f"{found}: one process uses one core", f"export OMP_NUM_THREADS={cores}")
    return Finding("threads", "ok", found)


def usable_cores(machine: Machine) -> int:
    """Cores that this process may run on, or fewer where a control group gives it less time than they have."""
    shares = [float(machine.cores)]
    for folder in machine.groups("cpu"):
        quota, period = machine.number(f"{folder}/cpu.cfs_quota_us"), machine.number(f"{folder}/cpu.cfs_period_us")
        words = (machine.read(f"{folder}/cpu.max") or "").split()
        if len(words) == 2 and words[0].isdigit():
            quota, period = int(words[0]), int(words[1])
        if quota is not None and period is not None and quota > 0:
            shares.append(quota / period)
    return max(1, int(min(shares)))


def spinning(machine: Machine) -> Finding:
    """Whether threads that wait leave their cores to others; docs/performance.md has what it costs."""
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        if name in machine.environ:
            return Finding("waiting threads", "ok", f"{name}={machine.environ[name]}")
    return Finding(
        "waiting threads",
        "ok",
        "spin for milliseconds, which is fine where training has its cores for itself",
        "beside other work: export GOMP_SPINCOUNT=10000",
    )
