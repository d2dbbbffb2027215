"""The tests that do not apply to RecStore on a CPU: the entries of
``does_not_apply.txt``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from torchrec_recstore.triples import release

PATH = Path(__file__).with_name("does_not_apply.txt")
CHECKS = ("stock", "fails", "not run")


@dataclass(frozen=True)
class Entry:
    """An entry of the list.

    Args:
        pattern: The tests, relative to this directory. ``*`` matches any text.
        check: "stock": TorchRec's own tables fail on a CPU too. "fails": RecStore
            fails. "not run": see the reason.
        reason: The reason why the tests do not apply.
    """

    pattern: str
    check: str
    reason: str

    @property
    def file(self) -> str:
        """The name of the file with the tests."""
        return self.pattern.partition("::")[0]

    @property
    def runs(self) -> bool:
        """Whether the tests run and must fail."""
        return self.check != "not run"

    @property
    def stock(self) -> bool:
        """Whether the tests must also fail with TorchRec's own tables."""
        return self.check == "stock"

    def matches(self, name: str) -> bool:
        """Whether the entry names the test."""
        return (
            re.fullmatch(".*".join(map(re.escape, self.pattern.split("*"))), name)
            is not None
        )


def entries(torchrec: str | None = None) -> list[Entry]:
    """The entries of the list that are for a version of TorchRec.

    Args:
        torchrec: the version, default: the installed one.

    Raises:
        ValueError: a line is not an entry.
    """
    found = []
    has = release(torchrec or version("torchrec"))
    for line in PATH.read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        parts = [part.strip() for part in line.split(" | ")]
        check = re.fullmatch(
            rf"({'|'.join(CHECKS)})(?: (before|from) (\d+\.\d+))?",
            parts[1] if len(parts) == 3 else "",
        )
        if check is None or not all(parts):
            raise ValueError(
                f"{PATH.name}: not 'tests | {' or '.join(CHECKS)} [before or from 1.N]"
                f" | reason': {line}"
            )
        kind, bound, number = check.groups()
        if bound is None or (has < release(number)) == (bound == "before"):
            found.append(Entry(parts[0], kind, parts[2]))
    return found
