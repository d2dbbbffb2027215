"""The checks of ``recstore doctor``: installed packages that must fit each other, and settings of the machine.

This package imports neither torch nor torchrec nor the native extension, because it reports failures of these imports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from torchrec_recstore.doctor.machine import (
    Finding,
    Machine,
    address_space,
    available,
    buffers,
    cold_stores,
    control_group,
    disk,
    huge_pages,
    instruction_set,
    open_files,
    overcommit,
    spinning,
    threads,
)
from torchrec_recstore.doctor.packages import MODULES, optional_packages, packages, probe

SECTIONS = ("packages", "processor", "memory", "threads", "files")


def examine(data: Path, cold: Sequence[Path] = ()) -> Iterator[tuple[str, Finding]]:
    """Checks this machine and the installed packages.

    Args:
        data: A directory on the disk for checkpoints and cold rows.
        cold: Paths of ``RocksDBStore``, or directories above them. Default: none.

    Yields:
        The section and the finding of each check, in the order of :data:`SECTIONS`.
    """
    machine = Machine.here()
    imported = probe(MODULES)
    yield from (("packages", finding) for finding in packages(imported))
    yield from (("packages", finding) for finding in optional_packages())
    facts = imported["torchrec_recstore.ops"].facts
    yield "processor", instruction_set(machine, facts)
    for look in (available, control_group, overcommit, huge_pages, address_space):
        yield "memory", look(machine)
    yield "memory", buffers(facts)
    for look in (threads, spinning):
        yield "threads", look(machine)
    yield "files", open_files(machine)
    yield "files", disk(data)
    yield from (("files", cold_stores(folder)) for folder in cold)
