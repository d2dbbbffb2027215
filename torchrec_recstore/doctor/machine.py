"""The machine, the finding of a check, and the checks of the machine's settings."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torchrec_recstore.run_directories import removal, run_directories
from torchrec_recstore.threads import MOST_SPINS, SPIN_COUNT, VARIABLES

Status = Literal["ok", "warning", "problem"]

UNLIMITED = resource.RLIM_INFINITY
_FILES = 4096  # the least number of open files that is ok
_GOOD = 65536  # the number to set
_LITTLE_DISK = 1 << 30
_LITTLE_MEMORY = 2 << 30
# The processor flags that csrc/row_loops/row_loops.cpp checks for each instruction set, the
# best set first.
_NEEDS = {
    "avx512": "avx512f avx512dq avx512vl avx512bw",
    "avx2": "avx2 f16c",
    "neon": "asimd",
    "baseline": "",
}
# The implementer and the part of processors of Arm: Graviton 2 and 3, and Graviton 4
# and Grace.
_CORES = {
    "0x41 0xd0c": "Neoverse N1",
    "0x41 0xd40": "Neoverse V1",
    "0x41 0xd4f": "Neoverse V2",
}


@dataclass(frozen=True)
class Finding:
    """The result of one check, which is one line of the report."""

    name: str
    # "problem": a part of the package does not work. "warning": it is slow, or may fail
    # later.
    status: Status
    found: str
    fix: str = ""  # the command to type or the action to take


def size(count: float) -> str:
    """Formats a number of bytes: ``3.2 GB``."""
    for scale, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= scale:
            return f"{count / scale:.1f} {name}"
    return f"{count:.0f} B"


@dataclass(frozen=True)
class Machine:
    """The machine that the checks examine."""

    root: Path = Path("/")  # contains proc and sys
    environ: Mapping[str, str] = field(default_factory=dict)
    cores: int = 1  # that this process may run on
    open_files: tuple[int, int] = (UNLIMITED, UNLIMITED)  # the soft and the hard limit
    address_space: int = UNLIMITED  # the soft limit in bytes

    @classmethod
    def of_this_process(cls) -> Machine:
        """Returns the machine that this process runs on."""
        return cls(
            environ=os.environ,
            cores=len(os.sched_getaffinity(0)),
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
            address_space=resource.getrlimit(resource.RLIMIT_AS)[0],
        )

    def read(self, path: str) -> str | None:
        """Returns the stripped text of a file, or None if the file cannot be read."""
        try:
            return (self.root / path).read_text().strip()
        except OSError:
            return None

    def number(self, path: str) -> int | None:
        """Returns the number in a file, or None if it contains, for example, ``max``."""
        text = self.read(path)
        return int(text) if text is not None and text.lstrip("-").isdigit() else None

    def memory(self) -> dict[str, int]:
        """Returns the values of ``/proc/meminfo`` in bytes."""
        values = {}
        for line in (self.read("proc/meminfo") or "").splitlines():
            words = line.split()
            if len(words) == 3:  # a name, a number and kB
                values[words[0].rstrip(":")] = int(words[1]) * 1024
        return values

    def groups(self, controller: str) -> list[Path]:
        """Returns the directories of the control groups that limit this process, from
        its own group to the root.
        """
        mount = Path("sys/fs/cgroup")
        for line in (self.read("proc/self/cgroup") or "").splitlines():
            number, controllers, path = line.split(":", 2)
            # Version 1 has a tree for each controller, and version 2 has one tree.
            is_version_1 = controller in controllers.split(",")
            is_version_2 = (
                number == "0" and (self.root / mount / "cgroup.controllers").exists()
            )
            if is_version_1 or is_version_2:
                top = mount / controller if is_version_1 else mount
                group = top / path.lstrip("/")
                folders = (group, *group.parents)
                return [folder for folder in folders if folder.is_relative_to(top)]
        return []


def open_files(machine: Machine) -> Finding:
    """Checks the limit of open files.

    RocksDB keeps all of its files open, and a server one for each connection.
    """
    soft, hard = machine.open_files
    if soft == UNLIMITED or soft >= _FILES:
        limit = "unlimited" if soft == UNLIMITED else str(soft)
        return Finding("open files", "ok", f"ulimit -n: {limit}")
    description = (
        f"ulimit -n: {soft}; a large cold store in RocksDB and a server with many"
        " clients need more"
    )
    if hard == UNLIMITED or hard >= _GOOD:
        return Finding(
            "open files",
            "warning",
            description,
            f"ulimit -n {_GOOD}",
        )
    fix = f"sudo prlimit --pid $$ --nofile={_GOOD}"
    return Finding(
        "open files",
        "warning",
        f"{description}; the hard limit is {hard}",
        fix,
    )


def disk(folder: Path) -> Finding:
    """Checks the free disk space for checkpoints and cold rows."""
    path = os.path.abspath(folder)
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding(
            "disk",
            "problem",
            f"{folder}: {error.strerror}",
            f"mkdir -p {folder}",
        )
    if not folder.is_dir():
        return Finding(
            "disk",
            "problem",
            f"{path} is not a folder",
            "name a folder: --data DIR",
        )
    if not os.access(folder, os.W_OK):
        return Finding(
            "disk",
            "problem",
            f"{path} cannot be written",
            "name another folder: --data DIR",
        )
    description = f"{size(free)} free at {path}"
    if free < _LITTLE_DISK:
        return Finding(
            "disk",
            "warning",
            description,
            "name another disk for checkpoints and cold stores",
        )
    return Finding("disk", "ok", description)


def cold_stores(folder: Path) -> Finding:
    """Checks whether killed processes have left cold rows below a folder."""
    name = "cold store"
    try:
        os.listdir(folder)
        runs = run_directories(folder)
    except OSError as error:
        return Finding(
            name,
            "problem",
            f"{error.filename}: {error.strerror}",
            "name another folder: --cold-store DIR",
        )
    in_use = [run for run in runs if run.alive]
    ended = [run for run in runs if not run.alive]
    bytes_in_use = size(sum(run.bytes for run in in_use))
    description = (
        f"{os.path.abspath(folder)}: {len(in_use)} directories in use ({bytes_in_use})"
    )
    owners = ", ".join(sorted({run.owner for run in in_use}))
    if owners:
        description += f" by {owners}"
    if not ended:
        return Finding(name, "ok", description)
    bytes_of_ended = size(sum(run.bytes for run in ended))
    description += (
        f", and {len(ended)} of processes that have ended ({bytes_of_ended}), which the"
        " next process with the same path removes"
    )
    return Finding(
        name,
        "warning",
        description,
        removal(runs),
    )


def available(machine: Machine) -> Finding:
    """Checks the memory that is available for rows."""
    memory = machine.memory()
    if "MemAvailable" not in memory:
        return Finding(
            "memory",
            "problem",
            "no MemAvailable in /proc/meminfo: the free memory is unknown",
        )
    description = (
        f"{size(memory['MemAvailable'])} available of {size(memory['MemTotal'])}"
    )
    if memory["MemAvailable"] < _LITTLE_MEMORY:
        fix = "end other programs, or limit the tables: TableOptions(max_rows=...)"
        return Finding("memory", "warning", description, fix)
    return Finding("memory", "ok", description)


def buffers(facts: Mapping[str, str]) -> Finding:
    """Reports the memory that a process keeps for its next steps.

    ``facts`` are those of the native extension.
    """
    if "kept_bytes" not in facts:
        return Finding("buffers", "ok", "not known without the native extension")
    kept_bytes = size(int(facts["kept_bytes"]))
    description = (
        f"each process keeps up to {kept_bytes} of outputs and gradients for its next"
        " steps, and more if recent steps used more;"
        " torchrec_recstore.ops.buffer_pool_bytes() returns the current size"
    )
    return Finding("buffers", "ok", description)


def control_group(machine: Machine) -> Finding:
    """Checks the memory limits of control groups.

    The native store also reads them before a table grows.
    """
    total = machine.memory().get("MemTotal", 0)
    limits: dict[Path, int] = {}
    for folder in machine.groups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            file = folder / name
            limit = machine.number(str(file))
            if limit is not None and limit < total:
                limits[file] = limit
    if not limits:
        return Finding(
            "memory limit",
            "ok",
            "no control group limits the memory of this process",
        )
    tightest = min(limits, key=lambda file: limits[file])
    limit = limits[tightest]
    description = f"{size(limit)} in /{tightest}: tables refuse to grow past it"
    if limit < _LITTLE_MEMORY:
        fix = "raise the limit, or limit the tables: TableOptions(max_rows=...)"
        return Finding("memory limit", "warning", description, fix)
    return Finding("memory limit", "ok", description)


def overcommit(machine: Machine) -> Finding:
    """Checks whether a process may reserve more address space than there is memory."""
    mode = machine.number("proc/sys/vm/overcommit_memory")
    if mode is None:
        return Finding(
            "overcommit",
            "warning",
            "/proc/sys/vm/overcommit_memory cannot be read",
        )
    if mode != 2:
        return Finding("overcommit", "ok", f"vm.overcommit_memory = {mode}")
    memory = machine.memory()
    free = memory.get("CommitLimit", 0) - memory.get("Committed_AS", 0)
    description = (
        "vm.overcommit_memory = 2: reserved address space counts as memory,"
        f" {size(max(free, 0))} is left, and a table that grows reserves three times"
        " its size"
    )
    fix = (
        "sudo sysctl vm.overcommit_memory=0  # until the next boot; to keep it: echo"
        " vm.overcommit_memory=0 | sudo tee /etc/sysctl.d/90-recstore.conf"
    )
    status: Status = "problem" if free < _LITTLE_MEMORY else "warning"
    return Finding("overcommit", status, description, fix)


def huge_pages(machine: Machine) -> Finding:
    """Checks whether rows can use huge pages of 2 MiB.

    The processor translates their addresses faster.
    """
    text = machine.read("sys/kernel/mm/transparent_hugepage/enabled")
    if text is None:
        return Finding(
            "huge pages",
            "warning",
            "this kernel has no transparent huge pages: lookups are slower",
        )
    chosen = text[text.find("[") + 1 : text.find("]")]
    if chosen in ("always", "madvise"):
        return Finding(
            "huge pages",
            "ok",
            f"transparent_hugepage/enabled: {chosen}",
        )
    description = (
        f"transparent_hugepage/enabled: {chosen}: rows use small pages, and lookups are"
        " slower"
    )
    fix = (
        "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled  # until"
        " the next boot; to keep it: add transparent_hugepage=madvise to the kernel's"
        " command line"
    )
    return Finding("huge pages", "warning", description, fix)


def address_space(machine: Machine) -> Finding:
    """Checks the limit of the address space."""
    if machine.address_space == UNLIMITED:
        return Finding("address space", "ok", "ulimit -v: unlimited")
    description = (
        f"ulimit -v: {size(machine.address_space)}; a table that grows reserves three"
        " times its size"
    )
    return Finding("address space", "warning", description, "ulimit -v unlimited")


def instruction_set(machine: Machine, facts: Mapping[str, str]) -> Finding:
    """Checks whether the native extension uses the processor's best instruction set."""
    fields = {}
    for line in (machine.read("proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    model = _processor_model(fields)
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    best = next(
        name for name, needed in _NEEDS.items() if flags.issuperset(needed.split())
    )
    if "instruction_set" not in facts:
        return Finding("processor", "ok", f"{model}, {best}")
    chosen = facts["instruction_set"]
    description = f"{model}: the loops over rows use {chosen}"
    best_first = list(_NEEDS)
    if best_first.index(chosen) > best_first.index(best):
        description = f"{description}, and the processor has {best}"
        forced = machine.environ.get("RECSTORE_ISA")
        if forced is None:
            return Finding(
                "processor",
                "warning",
                description,
                "reinstall torchrec-recstore",
            )
        description = f"{description}; RECSTORE_ISA={forced} is set"
        return Finding("processor", "warning", description, "unset RECSTORE_ISA")
    if chosen == "baseline":
        description = f"{description}; without AVX2 they take several times as long"
        fix = (
            "use a processor with AVX2; in a virtual machine, enable AVX2 for the guest"
        )
        return Finding("processor", "warning", description, fix)
    return Finding("processor", "ok", description)


def _processor_model(fields: Mapping[str, str]) -> str:
    """Returns the name of the processor, from the fields of /proc/cpuinfo."""
    # only on aarch64
    part = " ".join(
        fields[name] for name in ("CPU implementer", "CPU part") if name in fields
    )
    if part in _CORES:
        return _CORES[part]
    if fields.get("model name"):
        return fields["model name"]
    return f"a processor without a name {part}".strip()


def threads(machine: Machine) -> Finding:
    """Checks whether torch starts as many threads as there are usable cores."""
    cores = usable_cores(machine)
    where = f"{machine.cores} cores"
    if cores != machine.cores:
        where += f", and a control group limits the CPU time to that of {cores}"
    fix = f"export OMP_NUM_THREADS={cores}"
    set_to = machine.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if not set_to and cores < machine.cores:
        description = f"{where}, and torch starts {machine.cores} threads"
        return Finding("threads", "warning", description, fix)
    if not set_to:
        if cores <= 2:
            return Finding("threads", "ok", where)
        ranks = (
            "for several ranks, set the threads of each rank (torchrun's default: 1):"
            f" OMP_NUM_THREADS={cores // 2} torchrun --nproc-per-node 2 ..."
        )
        return Finding("threads", "ok", where, ranks)
    if not set_to.isdigit() or int(set_to) < 1:
        description = f"OMP_NUM_THREADS={set_to} is not a number of threads"
        return Finding("threads", "warning", description, fix)
    description = f"OMP_NUM_THREADS={set_to} on {where}"
    if int(set_to) > cores:
        description = f"{description}: the threads wait for each other"
        return Finding("threads", "warning", description, fix)
    if int(set_to) == 1 < cores:
        description = f"{description}: one process uses one core"
        return Finding("threads", "warning", description, fix)
    return Finding("threads", "ok", description)


def usable_cores(machine: Machine) -> int:
    """Returns the number of cores that this process and its control groups may use."""
    shares = [float(machine.cores)]
    for folder in machine.groups("cpu"):
        quota = machine.number(f"{folder}/cpu.cfs_quota_us")
        period = machine.number(f"{folder}/cpu.cfs_period_us")
        limit = machine.read(f"{folder}/cpu.max") or ""
        words = limit.split()
        if len(words) == 2 and words[0].isdigit():
            quota = int(words[0])
            period = int(words[1])
        if quota is not None and period is not None and quota > 0:
            shares.append(quota / period)
    least_share = min(shares)
    return max(1, int(least_share))


def spinning(machine: Machine) -> Finding:
    """Checks whether waiting threads of OpenMP leave their cores to other threads.

    See docs/operations.md.
    """
    name = "waiting threads"
    count, policy = (machine.environ.get(variable, "") for variable in VARIABLES)
    short = f"export GOMP_SPINCOUNT={SPIN_COUNT}"
    if count:
        if count.strip().isdigit() and int(count) <= MOST_SPINS:
            return Finding(name, "ok", f"GOMP_SPINCOUNT={count}")
        return Finding(
            name,
            "warning",
            f"GOMP_SPINCOUNT={count}: waiting threads keep their cores for long",
            short,
        )
    if policy:
        if policy.strip().lower() == "passive":
            return Finding(name, "ok", f"OMP_WAIT_POLICY={policy}")
        description = (
            f"OMP_WAIT_POLICY={policy}: waiting threads keep their cores for minutes"
        )
        return Finding(name, "warning", description, "export OMP_WAIT_POLICY=passive")
    omp_threads = machine.environ.get("OMP_NUM_THREADS", "").strip()
    if usable_cores(machine) == 1 or omp_threads == "1":
        return Finding(name, "ok", "one thread waits for no other")
    description = (
        "waiting threads spin for milliseconds: on cores that other programs use too,"
        " a training step takes several times as long"
    )
    fix = f"call torchrec_recstore.tune_threads() at the top of each script, or {short}"
    return Finding(name, "warning", description, fix)
