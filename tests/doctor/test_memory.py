"""Tests of the checks of memory, its limits and the kernel's settings on simulated
machines.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from torchrec_recstore.doctor.machine import (
    Machine,
    address_space,
    available,
    buffers,
    control_group,
    huge_pages,
    overcommit,
)
from torchrec_recstore.doctor.packages import probe

from .machines import MEMINFO, machine

V1 = "9:name=systemd:/\n4:memory:/jobs/7\n2:cpuacct:/\n1:cpu,cpuacct:/jobs/7\n0::/\n"


def test_available(tmp_path: Path) -> None:
    finding = available(machine(tmp_path))
    assert (finding.status, finding.found) == ("ok", "20.5 GB available of 25.3 GB")
    little = available(
        machine(
            tmp_path, {"proc/meminfo": MEMINFO.format(available=1000000, committed=1)}
        )
    )
    assert (little.status, little.found) == ("warning", "1.0 GB available of 25.3 GB")
    assert "max_rows" in little.fix
    assert available(Machine(root=tmp_path / "nowhere")).status == "problem"


@pytest.mark.slow
def test_buffers() -> None:
    imported = probe(["torch", "torchrec_recstore.ops"])
    finding = buffers(imported["torchrec_recstore.ops"].facts)
    assert finding.status == "ok"
    assert "keeps up to 67.1 MB of outputs and gradients" in finding.found
    assert buffers({}).found == "not known without the native extension"


def test_nothing_bounds_the_process(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/cgroup.controllers": "cpu memory\n",
        "sys/fs/cgroup/memory.max": "max\n",
    }
    finding = control_group(machine(tmp_path, files))
    assert (finding.status, finding.found) == (
        "ok",
        "no control group limits the memory of this process",
    )
    unlimited = {
        "proc/self/cgroup": V1,
        "sys/fs/cgroup/memory/jobs/7/memory.limit_in_bytes": "9223372036854771712\n",
    }
    assert control_group(machine(tmp_path / "v1", unlimited)).found == finding.found


@pytest.mark.parametrize("version", [1, 2])
def test_a_limit(tmp_path: Path, version: int) -> None:
    if version == 1:
        files = {
            "proc/self/cgroup": V1,
            "sys/fs/cgroup/memory/jobs/memory.limit_in_bytes": "4000000000\n",
        }
        where = "/sys/fs/cgroup/memory/jobs/memory.limit_in_bytes"
    else:
        files = {
            "proc/self/cgroup": "0::/user.slice/job.scope\n",
            "sys/fs/cgroup/cgroup.controllers": "memory\n",
        }
        files["sys/fs/cgroup/user.slice/memory.max"] = "4000000000\n"
        files["sys/fs/cgroup/user.slice/job.scope/memory.max"] = "max\n"
        where = "/sys/fs/cgroup/user.slice/memory.max"
    finding = control_group(machine(tmp_path, files))
    assert (finding.status, finding.fix) == ("ok", "")
    assert finding.found == f"4.0 GB in {where}: tables refuse to grow past it"
    files[where.lstrip("/")] = "1000000000\n"
    little = control_group(machine(tmp_path, files))
    assert little.status == "warning"
    assert "max_rows" in little.fix


@pytest.mark.parametrize(
    ("mode", "committed", "status"),
    [
        ("0", 1195944, "ok"),
        ("1", 1195944, "ok"),
        ("2", 1195944, "warning"),
        ("2", 12000000, "problem"),
    ],
)
def test_overcommit(tmp_path: Path, mode: str, committed: int, status: str) -> None:
    files = {"proc/sys/vm/overcommit_memory": f"{mode}\n"}
    files["proc/meminfo"] = MEMINFO.format(available=20000000, committed=committed)
    finding = overcommit(machine(tmp_path, files))
    assert finding.status == status
    assert (finding.fix == "") == (status == "ok")
    if mode == "2":
        assert finding.fix.startswith(
            "sudo sysctl vm.overcommit_memory=0  # until the next boot; to keep it:"
            " echo "
        )
        assert (
            "11.4 GB" if status == "warning" else "378.6 MB"
        ) + " is left" in finding.found


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("[always] madvise never", "ok"),
        ("always [madvise] never", "ok"),
        ("always madvise [never]", "warning"),
    ],
)
def test_huge_pages(tmp_path: Path, text: str, status: str) -> None:
    finding = huge_pages(
        machine(tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": f"{text}\n"})
    )
    assert finding.status == status
    for part in (
        "tee /sys/kernel/mm/transparent_hugepage/enabled  # until the next boot",
        "transparent_hugepage=madvise",
    ):
        assert (part in finding.fix) == (status == "warning")


def test_a_kernel_without_huge_pages(tmp_path: Path) -> None:
    bare = machine(tmp_path)
    (tmp_path / "sys/kernel/mm/transparent_hugepage/enabled").unlink()
    assert huge_pages(bare).status == "warning"


def test_address_space(tmp_path: Path) -> None:
    assert address_space(machine(tmp_path)).status == "ok"
    finding = address_space(machine(tmp_path, address_space=8 << 30))
    assert (finding.status, finding.fix) == ("warning", "ulimit -v unlimited")
    assert finding.found.startswith("ulimit -v: 8.6 GB")
