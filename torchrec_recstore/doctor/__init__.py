"""The checks of ``recstore doctor``: of the installed packages and of the machine.

This package imports neither torch nor torchrec nor the native extension, because it
reports failures of these imports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from torchrec_recstore.doctor import machine as checks
from torchrec_recstore.doctor.machine import Finding, Machine
from torchrec_recstore.doctor.packages import (
    MODULES,
    optional_packages,
    packages,
    probe,
)


def examine(data: Path, cold: Sequence[Path] = ()) -> Iterator[tuple[str, Finding]]:
    """Checks the packages and this machine.

    Yields the section and the finding of each check, section by section.

    ``data`` is a directory on the disk for checkpoints and cold rows, and ``cold`` are
    directories of cold stores.
    """
    machine = Machine.of_this_process()
    imported = probe(MODULES)
    facts = imported["torchrec_recstore.ops"].facts
    for finding in (*packages(imported), *optional_packages()):
        yield "packages", finding
    yield "processor", checks.instruction_set(machine, facts)
    yield "memory", checks.available(machine)
    yield "memory", checks.control_group(machine)
    yield "memory", checks.overcommit(machine)
    yield "memory", checks.huge_pages(machine)
    yield "memory", checks.address_space(machine)
    yield "memory", checks.buffers(facts)
    yield "threads", checks.threads(machine)
    yield "threads", checks.spinning(machine)
    yield "files", checks.open_files(machine)
    yield "files", checks.disk(data)
    for folder in cold:
        yield "files", checks.cold_stores(folder)
