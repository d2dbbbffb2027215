"""The watch on the victims finds each kind of change."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.outside.names import VICTIM
from tests.outside.sandbox import MARKER, Sandbox


def _rewrite(victim: Path) -> None:
    """Replaces the content of a file by another one of the same size and time."""
    file = victim / "file"
    before = file.stat()
    file.write_bytes(MARKER[::-1])
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES: dict[str, Callable[[Path], object]] = {
    "created": lambda victim: (victim / "new").touch(),
    "deleted": lambda victim: (victim / "0" / "file").unlink(),
    "content": _rewrite,
    "mode": lambda victim: (victim / "0").chmod(0o700),
    "time": lambda victim: os.utime(victim / "file"),
    "replaced": lambda victim: (victim / "file").replace(victim / "0" / "file"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("level", [".", "a/b/own"])
def test_a_change_of_a_victim_is_found(
    sandbox: Sandbox, change: str, level: str
) -> None:
    sandbox.check()
    CHANGES[change](sandbox.root / level / VICTIM)
    with pytest.raises(AssertionError, match="created: "):
        sandbox.check()


def test_changes_of_the_fuzzed_directory_are_its_own(sandbox: Sandbox) -> None:
    (sandbox.data / "folder").mkdir()
    (sandbox.data / "folder" / "file").write_bytes(b"x")
    sandbox.check()
