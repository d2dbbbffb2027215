"""What does not apply to RecStore on a CPU: the entries of ``does_not_apply.txt``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PATH = Path(__file__).with_name("does_not_apply.txt")
CHECKS = ("stock", "fails", "not run")


@dataclass(frozen=True)
class Entry:
    """A line of the list.

    Args:
        pattern: tests, relative to this directory; ``*`` stands for any text.
        check: "stock": TorchRec's own tables fail on a CPU too. "fails": RecStore fails. "not run": see the reason.
        reason: why the tests do not apply.
    """

    pattern: str
    check: str
    reason: str

    @property
    def file(self) -> str:
        """The name of the tests' file."""
        return self.pattern.partition("::")[0]

    @property
    def runs(self) -> bool:
        """Whether the tests are run, and have to fail."""
        return self.check != "not run"

    @property
    def stock(self) -> bool:
        """Whether the tests also have to fail with TorchRec's own tables."""
        return self.check == "stock"

    def matches(self, name: str) -> bool:
        """Whether the entry names the test."""
        return re.fullmatch(".*".join(map(re.escape, self.pattern.split("*"))), name) is not None


def entries() -> list[Entry]:
    """The list.

    Raises:
        ValueError: a line is not an entry.
    """
    found = []
    for line in PATH.read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        parts = [part.strip() for part in line.split(" | ")]
        if len(parts) != 3 or parts[1] not in CHECKS or not all(parts):
            raise ValueError(f"{PATH.name}: not 'tests | {' or '.join(CHECKS)} | reason': {line}")
        found.append(Entry(*parts))
    return found
