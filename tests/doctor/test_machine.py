"""Tests of the checks of threads, files and the processor on simulated machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchrec_recstore.doctor import machine as checks
from torchrec_recstore.doctor.machine import (
    UNLIMITED,
    Finding,
    disk,
    instruction_set,
    open_files,
    spinning,
    threads,
    usable_cores,
)

from .machines import machine

CPUINFO = (
    "processor\t: 0\nmodel name\t: A Processor\nflags\t\t: fpu {}\n\nprocessor\t:"
    " 1\nmodel name\t: A Processor\n"
)
GRAVITON3 = """processor\t: 0
BogoMIPS\t: 2100.00
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop sha3 \
sm3 sm4 asimddp sha512 sve asimdfhm dit uscat ilrcpc flagm ssbs paca pacg dcpodp svei8mm svebf16 i8mm bf16 dgh rng
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x1
CPU part\t: {}
CPU revision\t: 1
"""
AVX2 = "avx avx2 f16c"
AVX512 = f"{AVX2} avx512f avx512dq avx512bw avx512vl"


@pytest.mark.parametrize(
    ("set_to", "status"),
    [
        ("", "ok"),
        ("8", "ok"),
        ("4,2", "ok"),
        ("1", "warning"),
        ("9", "warning"),
        ("x", "warning"),
        ("0", "warning"),
    ],
)
def test_threads(tmp_path: Path, set_to: str, status: str) -> None:
    environ = {"OMP_NUM_THREADS": set_to} if set_to else {}
    finding = threads(machine(tmp_path, cores=8, environ=environ))
    assert finding.status == status
    if status == "warning":
        assert finding.fix == "export OMP_NUM_THREADS=8"
    assert ("torchrun" in finding.fix) == (set_to == "")
    assert ("not a number of threads" in finding.found) == (set_to in ("x", "0"))


@pytest.mark.parametrize(
    "files",
    [
        {
            "sys/fs/cgroup/cgroup.controllers": "cpu\n",
            "sys/fs/cgroup/cpu.max": "200000 100000\n",
        },
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/a\n0::/\n",
            "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "250000\n",
            "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    ],
)
def test_a_control_group_gives_less_time(tmp_path: Path, files: dict[str, str]) -> None:
    finding = threads(machine(tmp_path, files, cores=8))
    assert (finding.status, finding.fix) == ("warning", "export OMP_NUM_THREADS=2")
    assert (
        "a control group limits the CPU time to that of 2, and torch starts 8 threads"
        in finding.found
    )
    assert (
        usable_cores(
            machine(
                tmp_path / "free", {"sys/fs/cgroup/cpu.max": "max 100000\n"}, cores=8
            )
        )
        == 8
    )


@pytest.mark.parametrize(
    ("environ", "fix"),
    [
        ({}, "torchrec_recstore.tune_threads()"),
        ({"OMP_NUM_THREADS": "1"}, ""),
        ({"GOMP_SPINCOUNT": "1000"}, ""),
        ({"GOMP_SPINCOUNT": "10000"}, ""),
        ({"GOMP_SPINCOUNT": "300000"}, "GOMP_SPINCOUNT=1000"),
        ({"GOMP_SPINCOUNT": "100k"}, "GOMP_SPINCOUNT=1000"),
        ({"GOMP_SPINCOUNT": "INFINITE"}, "GOMP_SPINCOUNT=1000"),
        # libgomp ignores the policy in this case
        ({"GOMP_SPINCOUNT": "1000", "OMP_WAIT_POLICY": "active"}, ""),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, ""),
        ({"OMP_WAIT_POLICY": "active"}, "OMP_WAIT_POLICY=passive"),
    ],
)
def test_spinning(tmp_path: Path, environ: dict[str, str], fix: str) -> None:
    finding = spinning(machine(tmp_path, cores=8, environ=environ))
    assert (finding.status == "warning") == bool(fix)
    assert fix in finding.fix
    assert spinning(machine(tmp_path, cores=1)).status == "ok"


@pytest.mark.parametrize(
    ("limits", "status", "fix"),
    [
        ((1024, 1048576), "warning", "ulimit -n 65536"),
        ((1024, 4096), "warning", "sudo prlimit --pid $$ --nofile=65536"),
        ((65536, 65536), "ok", ""),
        ((UNLIMITED, UNLIMITED), "ok", ""),
    ],
)
def test_open_files(
    tmp_path: Path, limits: tuple[int, int], status: str, fix: str
) -> None:
    finding = open_files(machine(tmp_path, open_files=limits))
    assert (finding.status, finding.fix) == (status, fix)


def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert disk(tmp_path).status == "ok"
    missing = disk(tmp_path / "new")
    assert (missing.status, missing.fix) == ("problem", f"mkdir -p {tmp_path}/new")
    (tmp_path / "file").touch()
    assert disk(tmp_path / "file") == Finding(
        "disk",
        "problem",
        f"{tmp_path}/file is not a folder",
        "name a folder: --data DIR",
    )
    monkeypatch.setattr(checks, "_LITTLE_DISK", 1 << 62)
    assert disk(tmp_path).status == "warning"
    # root may write anywhere
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert disk(tmp_path).found == f"{tmp_path} cannot be written"


@pytest.mark.parametrize(
    ("flags", "chosen", "environ", "status", "fix"),
    [
        (AVX512, "avx512", {}, "ok", ""),
        (AVX2, "avx2", {}, "ok", ""),
        (AVX512, "avx2", {"RECSTORE_ISA": "avx2"}, "warning", "unset RECSTORE_ISA"),
        (AVX512, "baseline", {}, "warning", "reinstall torchrec-recstore"),
        (
            "sse2",
            "baseline",
            {},
            "warning",
            (
                "use a processor with AVX2; in a virtual machine, enable AVX2 for the"
                " guest"
            ),
        ),
        (AVX2, None, {}, "ok", ""),
    ],
)
def test_instruction_set(
    tmp_path: Path,
    flags: str,
    chosen: str | None,
    environ: dict[str, str],
    status: str,
    fix: str,
) -> None:
    facts = {} if chosen is None else {"instruction_set": chosen}
    looked_at = machine(
        tmp_path, {"proc/cpuinfo": CPUINFO.format(flags)}, environ=environ
    )
    finding = instruction_set(looked_at, facts)
    assert (finding.status, finding.fix) == (status, fix)
    assert finding.found.startswith("A Processor")


@pytest.mark.parametrize(
    ("part", "chosen", "environ", "status", "found", "fix"),
    [
        ("0xd40", "neon", {}, "ok", "Neoverse V1: the loops over rows use neon", ""),
        (
            "0xd99",
            "neon",
            {},
            "ok",
            "a processor without a name 0x41 0xd99: the loops over rows use neon",
            "",
        ),
        ("0xd4f", None, {}, "ok", "Neoverse V2, neon", ""),
        (
            "0xd40",
            "baseline",
            {"RECSTORE_ISA": "baseline"},
            "warning",
            (
                "Neoverse V1: the loops over rows use baseline, and the processor has"
                " neon; RECSTORE_ISA=baseline is set"
            ),
            "unset RECSTORE_ISA",
        ),
    ],
)
def test_instruction_set_of_aarch64(
    tmp_path: Path,
    part: str,
    chosen: str | None,
    environ: dict[str, str],
    status: str,
    found: str,
    fix: str,
) -> None:
    facts = {} if chosen is None else {"instruction_set": chosen}
    looked_at = machine(
        tmp_path, {"proc/cpuinfo": GRAVITON3.format(part)}, environ=environ
    )
    assert instruction_set(looked_at, facts) == Finding("processor", status, found, fix)  # type: ignore[arg-type]
