"""The machine that the checks examine, and the finding that a check returns."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Status = Literal["ok", "warning", "problem"]

UNLIMITED = resource.RLIM_INFINITY


@dataclass(frozen=True)
class Finding:
    """The result of one check, which is one line of the report.

    Args:
        name: The name of the check.
        status: ``"problem"``: a part of the package does not work. ``"warning"``: it works, but slowly, or it may fail
            later. ``"ok"``: there is nothing to do.
        found: The state that was found.
        fix: The command to type or the action to take. It is empty if nothing has to be done.
    """

    name: str
    status: Status
    found: str
    fix: str = ""


def size(count: float) -> str:
    """Formats a number of bytes: ``3.2 GB``."""
    for scale, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= scale:
            return f"{count / scale:.1f} {name}"
    return f"{count:.0f} B"


@dataclass(frozen=True)
class Machine:
    """The machine that the checks examine.

    Args:
        root: The directory that contains ``proc`` and ``sys``.
        environ: The environment variables.
        cores: The number of cores that this process may run on.
        open_files: The soft and the hard limit of open files.
        address_space: The soft limit of the address space in bytes.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=dict)
    cores: int = 1
    open_files: tuple[int, int] = (UNLIMITED, UNLIMITED)
    address_space: int = UNLIMITED

    @classmethod
    def here(cls) -> Machine:
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
        """Returns the number in a file, or None if the file contains anything else, for example ``max``."""
        text = self.read(path)
        return int(text) if text is not None and text.lstrip("-").isdigit() else None

    def memory(self) -> dict[str, int]:
        """Returns the values of ``/proc/meminfo`` in bytes."""
        lines = (line.split() for line in (self.read("proc/meminfo") or "").splitlines())
        return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) == 3}

    def groups(self, controller: str) -> list[Path]:
        """Returns the directories of the control groups that limit this process, from its own group to the root.

        Args:
            controller: The controller, ``"memory"`` or ``"cpu"``. Version 1 of control groups has a tree for each
                controller; version 2 has one tree for all controllers.
        """
        for line in (self.read("proc/self/cgroup") or "").splitlines():
            number, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                return self._up(Path("sys/fs/cgroup", controller), path)
            if number == "0" and (self.root / "sys/fs/cgroup/cgroup.controllers").exists():
                return self._up(Path("sys/fs/cgroup"), path)
        return []

    def _up(self, mount: Path, path: str) -> list[Path]:
        own = mount / path.lstrip("/")
        return [folder for folder in (own, *own.parents) if folder.is_relative_to(mount)]
