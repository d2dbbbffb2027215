"""The machine as the checks see it, and what a check reports."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Status = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Args:
        name: of what was looked at.
        status: ``"problem"``: something will not work; ``"warning"``: it is slower than it could be, or fails one day.
        found: what is so.
        fix: what to type or do; empty where there is nothing to do.
    """

    name: str
    status: Status
    found: str
    fix: str = ""


def size(count: float) -> str:
    """Bytes for people: ``3.2 GB``."""
    for scale, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= scale:
            return f"{count / scale:.1f} {name}"
    return f"{count:.0f} B"


UNLIMITED = resource.RLIM_INFINITY


@dataclass(frozen=True)
class Machine:
    """Where a check looks.

    Args:
        root: of ``/proc`` and ``/sys``.
        environ: environment variables.
        cores: that this process may run on.
        open_files: soft and hard limit of open files.
        address_space: soft limit of the address space in bytes.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=dict)
    cores: int = 1
    open_files: tuple[int, int] = (UNLIMITED, UNLIMITED)
    address_space: int = UNLIMITED

    @classmethod
    def here(cls) -> Machine:
        """This one."""
        return cls(
            environ=os.environ,
            cores=len(os.sched_getaffinity(0)),
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
            address_space=resource.getrlimit(resource.RLIMIT_AS)[0],
        )

    def read(self, path: str) -> str | None:
        """A file's text without blanks around it; None where it cannot be read."""
        try:
            return (self.root / path).read_text().strip()
        except OSError:
            return None

    def number(self, path: str) -> int | None:
        """The number that a file consists of; None for anything else, as ``max``."""
        text = self.read(path)
        return int(text) if text is not None and text.lstrip("-").isdigit() else None

    def memory(self) -> dict[str, int]:
        """``/proc/meminfo`` in bytes."""
        lines = (line.split() for line in (self.read("proc/meminfo") or "").splitlines())
        return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) == 3}

    def groups(self, controller: str) -> list[Path]:
        """Directories of this process's control groups that can bound it, its own first.

        Args:
            controller: ``"memory"`` or ``"cpu"``; of version 1, or of version 2, where all are in one tree.
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
