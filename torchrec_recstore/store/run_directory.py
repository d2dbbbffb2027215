from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torchrec_recstore.store.cold_bytes import escaped_name, new_run

_RUN = re.compile(r"run-[0-9a-f]{12}")
_LOCK = "lock"


class RunDirectory:
    """A directory of one open store, ``root/<escaped name>/run-<random>``, which nothing outlives.

    Its owner holds a lock on a file in it for as long as it lives. Making one removes all under ``root`` whose owner is
    dead, of any name: a run on fewer ranks would never come back for the others.
    """

    def __init__(self, root: str, name: str) -> None:
        """Raises OSError."""
        Path(root).mkdir(parents=True, exist_ok=True)
        # One at a time, or one process would take a directory that another has made and not locked yet for a dead one.
        with _locked(Path(root) / _LOCK):
            _remove_dead(Path(root))
            self.path = (Path(root) / escaped_name(name) / f"run-{new_run()}").absolute()
            self.path.mkdir(parents=True)
            self._root_lock = Path(root).absolute() / _LOCK
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        """Deletes it, and the directory of its name where that is empty. Raises OSError."""
        try:
            shutil.rmtree(self.path)
            # Not waiting: the garbage collector may come here out of the constructor above, which holds the lock.
            with suppress(BlockingIOError), _locked(self._root_lock, wait=False):
                _remove_if_empty(self.path.parent)
        finally:
            os.close(self._lock)


@contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(file)


def _remove_dead(root: Path) -> None:
    for lock in root.glob(f"*/run-*/{_LOCK}"):
        run = lock.parent
        if _RUN.fullmatch(run.name) and _is_free(lock):
            shutil.rmtree(run, ignore_errors=True)  # what stays is tried again by the next
    for directory in root.glob("*/"):
        _remove_if_empty(directory)


def _is_free(lock: Path) -> bool:
    try:
        file = os.open(lock, os.O_RDWR)
    except OSError:  # gone with its owner, or another user's
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(file)
    return True


def _remove_if_empty(directory: Path) -> None:
    try:
        directory.rmdir()
    except OSError:
        return
