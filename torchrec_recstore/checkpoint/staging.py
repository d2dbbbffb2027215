"""Names of what is written beside a path before it is renamed."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from pathlib import Path

_STAGING = re.compile(r"\..+\.saving-[0-9a-f]{12}")


def staging_name(path: Path) -> str:
    """A name beside ``path`` that nobody else uses."""
    return f".{path.name}.saving-{secrets.token_hex(6)}"


def is_staging(path: Path) -> bool:
    """Whether :func:`staging_name` has given the name."""
    return _STAGING.fullmatch(path.name) is not None


def leftovers(path: Path) -> Iterator[Path]:
    """What is beside ``path`` under such names: of dead processes, unless a process has the lock of the path."""
    for entry in path.parent.iterdir():
        if entry.name.startswith(f".{path.name}.saving-") and is_staging(entry) and not entry.is_symlink():
            yield entry
