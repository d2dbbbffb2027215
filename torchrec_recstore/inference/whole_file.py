"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchrec_recstore.checkpoint.files import sync_directory
from torchrec_recstore.checkpoint.lock import path_lock
from torchrec_recstore.checkpoint.staging import leftovers, staging_name


def check_path(path: Path) -> None:
    """Refuses a path that no file can be written to.

    Raises:
        FileNotFoundError, IsADirectoryError: the message names it.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent} is no directory")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields an empty file beside ``path``, which its body writes, and renames it. The path is locked meanwhile.

    Raises:
        BlockingIOError: another process is writing to ``path``.
        OSError: it cannot be written; what was there is there still.
    """
    check_path(path)
    beside = path.with_name(staging_name(path))
    try:
        with path_lock(path):
            for rest in leftovers(path):  # of dead processes, since this one has the lock
                rest.unlink()
            try:
                beside.touch()
                mode = beside.stat().st_mode
                yield beside
                with beside.open("rb") as file:
                    os.fsync(file.fileno())
                beside.chmod(mode)  # those of safetensors are their owner's alone
                beside.replace(path)
                sync_directory(path.parent)
            finally:
                beside.unlink(missing_ok=True)
    except OSError as error:
        if error.strerror:  # without the hidden file's name
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
