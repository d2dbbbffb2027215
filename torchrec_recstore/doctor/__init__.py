"""What ``recstore doctor`` looks at: packages that fit each other, and the machine's settings that tables depend on.

Nothing here imports torch, torchrec or the native extension: that they cannot be imported is what it reports.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torchrec_recstore.doctor.machine import Finding, Machine
from torchrec_recstore.doctor.machine_checks import (
    address_space,
    available,
    buffers,
    control_group,
    disk,
    huge_pages,
    instruction_set,
    open_files,
    overcommit,
    spinning,
    threads,
)
from torchrec_recstore.doctor.packages import optional_packages, packages
from torchrec_recstore.doctor.probe import MODULES, probe

SECTIONS = ("packages", "processor", "memory", "threads", "files")


def examine(data: Path) -> Iterator[tuple[str, Finding]]:
    """Looks at this machine and environment.

    Args:
        data: a folder on the disk where checkpoints and cold rows are to lie.

    Yields:
        A section and what was found, in the order of :data:`SECTIONS`.
    """
    machine = Machine.here()
    imported = probe(MODULES)
    yield from (("packages", finding) for finding in packages(imported))
    yield from (("packages", finding) for finding in optional_packages())
    yield "processor", instruction_set(machine, imported)
    for look in (available, control_group, overcommit, huge_pages, address_space):
        yield "memory", look(machine)
    yield "memory", buffers(imported)
    for look in (threads, spinning):
        yield "threads", look(machine)
    yield "files", open_files(machine)
    yield "files", disk(data)
