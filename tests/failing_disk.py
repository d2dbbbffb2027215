"""Has calls on the files of one folder fail, or kills the process in the middle of one:
failing_disk.cpp.
"""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

_KILL = -1
FOR_EVER = 1 << 40


def environment_with_shim(folder: Path) -> dict[str, str]:
    """Compiles the shim into a folder, and returns the environment of a process that
    has it.
    """
    shim = folder / "failing_disk.so"
    source = Path(__file__).with_name("failing_disk.cpp")
    command = [
        "g++",
        "-std=c++17",
        "-shared",
        "-fPIC",
        "-O1",
        str(source),
        "-o",
        str(shim),
        "-ldl",
    ]
    subprocess.run(command, check=True)
    return {**os.environ, "LD_PRELOAD": str(shim)}


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.disk_arm.argtypes = [
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_long,
        ctypes.c_long,
        ctypes.c_int,
    ]
    library.disk_disarm.restype = ctypes.c_long
    library.disk_calls.restype = ctypes.c_long
    return library


class Failures:
    """What has happened since the failures began."""

    @property
    def calls(self) -> int:
        """The number of calls of the names that may fail."""
        calls: int = _library().disk_calls()
        return calls


@contextmanager
def failing_calls(
    folder: Path, names: str, first: int, count: int = 1, error: int = errno.EIO
) -> Iterator[Failures]:
    """Returns a context in which calls of this process fail.

    The process must have the shim.

    Args:
        folder: The folder whose files are concerned.
        names: The names of the calls, with spaces between them: "write", "pwrite",
            "pread", "preadv", "read", "fsync" (and fdatasync), "ftruncate",
            "fallocate", "rename", "mkdir", "create" (an open that may create a file)
            and "open" (one that may not).
        first: The number of the first call that fails.
        count: The number of calls that fail from then on. Default: 1.
        error: The error. Default: EIO.
    """
    _library().disk_arm(str(folder).encode(), names.encode(), first, count, error)
    try:
        yield Failures()
    finally:
        _library().disk_disarm()


def die_in_call(folder: Path, names: str, number: int) -> None:
    """Kills this process with SIGKILL in one of the next calls, of a write after half
    of it.

    See failing_calls.
    """
    _library().disk_arm(str(folder).encode(), names.encode(), number, 1, _KILL)
