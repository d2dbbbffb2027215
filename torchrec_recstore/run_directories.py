"""The directories of cold stores on an SSD, and which of them no process uses.

This module imports no torch.

Tests: tests/store/test_run_directories.py.
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import shutil
import socket
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote

from torchrec_recstore.ownership import open_own, refuse_foreign, refuse_link
from torchrec_recstore.utils import warn_user

_RUN = re.compile(r"run-[0-9a-f]{12}")
_LOCK = "lock"
_SHARED = "shared"  # the directory in which SSDStore has the rows that tables share
_open: weakref.WeakSet[RunDirectory] = weakref.WeakSet()


class RunDirectory:
    """The directory of one open store: ``root/<shard>/run-<number>``.

    It is deleted when the store is closed.

    The process that opens the store holds a lock on a file in the directory as long as
    the process lives. A new directory removes all directories under ``root`` whose
    process has died, whatever their names, because a later run on fewer ranks would not
    use these names. ``number`` is 12 hexadecimal digits that no other directory has.
    Raises OSError if the directory cannot be created or locked.
    """

    def __init__(self, root: str, shard: str, number: str) -> None:
        self._root = Path(root).absolute()
        self._root.mkdir(parents=True, exist_ok=True)
        refuse_foreign(self._root / shard)
        # Only one process works here at a time. Otherwise it could remove a directory
        # that another process has created and not locked yet.
        with _locked(self._root):
            _remove_dead(self._root)
            shard_directory = self._root / _directory_name(shard)
            refuse_link(shard_directory)
            shard_directory.mkdir(exist_ok=True)

            self.path = shard_directory / f"run-{number}"
            self.path.mkdir(mode=0o700)
            refuse_foreign(self.path)
            self._lock: int | None = open_own(
                self.path / _LOCK,
                os.O_RDWR | os.O_CREAT | os.O_EXCL,
                0o600,
            )
            _open.add(self)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            owner = f"{os.getpid()} {socket.gethostname()}"
            os.write(self._lock, owner.encode())

    def remove(self) -> None:
        """Deletes the directory, and its parent if that is empty.

        Does nothing in a forked process. Raises OSError.
        """
        lock = self._lock
        self._lock = None
        if lock is None:
            return
        try:
            _delete(self.path)
            # It does not wait for the lock: the garbage collector may run it within
            # __init__, which holds the lock.
            with (
                suppress(BlockingIOError),
                _locked(self._root, fcntl.LOCK_EX | fcntl.LOCK_NB),
            ):
                _remove_if_empty(self.path.parent)
        finally:
            os.close(lock)


def _leave_all() -> None:
    # A forked process closes the locks, so that a child which outlives its parent does
    # not hold them.
    for directory in list(_open):
        if directory._lock is not None:
            os.close(directory._lock)
        directory._lock = None


os.register_at_fork(after_in_child=_leave_all)


@dataclass(frozen=True)
class Run:
    """A directory of a cold store, as :func:`run_directories` finds it.

    ``bytes`` is the size of its files. If it is not ``alive``, its process has ended,
    and nothing needs the rows. ``pid`` is the number of the process that uses it, on
    ``host``; both are None if none does, or if it is not known.
    """

    path: Path
    shard: str
    bytes: int
    alive: bool
    pid: int | None = None
    host: str | None = None

    @property
    def owner(self) -> str:
        """A description of the process that uses the directory. Empty if none does."""
        if not self.alive:
            return ""
        if self.pid is None:
            return "a process"
        return f"process {self.pid} on host {self.host}"


def run_directories(folder: str | Path) -> list[Run]:
    """Returns the directories of all cold stores on an SSD below a folder, at any
    depth, in the order of their paths.

    The folder need not exist. Raises OSError if the locks of a store cannot be read,
    because they belong to another user.
    """
    runs = []
    for directory, names, files in os.walk(folder):
        root = Path(directory)
        # os.walk() visits the names that remain in its list, in their order
        other_names = [name for name in names if not _RUN.fullmatch(name)]
        names[:] = sorted(other_names)
        paths = _runs(root) if _LOCK in files else []
        if not paths:
            continue
        with _locked(root, fcntl.LOCK_SH, os.O_RDONLY):
            owners = {path: _owner(path) for path in paths if path.is_dir()}
        for path, owner in owners.items():
            runs.append(_run(path, owner))
    return runs


def _run(path: Path, owner: str | None) -> Run:
    """Describes a run directory, whose process has written ``owner``, if it lives."""
    run = Run(
        path=path,
        shard=unquote(path.parent.name),
        bytes=_size(path),
        alive=owner is not None,
    )
    if owner is None:
        return run
    number, _, host = owner.partition(" ")
    if not number.isdigit():  # the process has not written it yet
        return run
    return replace(run, pid=int(number), host=host)


def removal(runs: Sequence[Run]) -> str:
    """Returns the command that removes the directories that no process uses.

    Empty if there are none.
    """
    dead = [str(run.path) for run in runs if not run.alive]
    if not dead:
        return ""
    return shlex.join(["rm", "-r", *dead])


def _directory_name(shard: str) -> str:
    """Returns the name of the directory of a shard, which is no other name in the path
    of a store.
    """
    if shard in (_LOCK, _SHARED):
        # what escaped_name() would do with another character
        first = ord(shard[0])
        return f"%{first:02X}{shard[1:]}"
    return shard


def _runs(root: Path) -> list[Path]:
    """Returns the run directories.

    A link is none: what it names was not made by a store.
    """
    runs = []
    for run in root.glob("*/run-*"):
        if run.is_symlink() or run.parent.is_symlink():
            continue
        if _RUN.fullmatch(run.name) and run.parent.name != _SHARED:
            runs.append(run)
    return sorted(runs)


@contextmanager
def _locked(
    root: Path,
    operation: int = fcntl.LOCK_EX,
    flags: int = os.O_RDWR | os.O_CREAT,
) -> Iterator[None]:
    file = open_own(root / _LOCK, flags, 0o644)
    try:
        fcntl.flock(file, operation)
        yield
    finally:
        os.close(file)


def _owner(run: Path) -> str | None:
    """Returns what the process that uses a directory has written, or None.

    The caller has locked the root.
    """
    path = run / _LOCK
    if os.path.islink(path):  # a store has not made it
        return None
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:  # it is not being created, because the root is locked
        return None
    except PermissionError:  # the directory of another user, whose process may live
        return ""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except OSError:
        return os.read(file, 1 << 10).decode()
    finally:
        os.close(file)


def _size(run: Path) -> int:
    total = 0
    for directory, _, files in os.walk(run):
        for file in files:
            path = os.path.join(directory, file)
            with suppress(OSError):  # the store has just deleted it
                total += os.stat(path).st_size
    return total


def _remove_dead(root: Path) -> None:
    for run in _runs(root):
        if _owner(run) is None:
            try:
                _delete(run)
            except OSError as error:
                warn_user(
                    f"{run} is the cold store of a process that has ended, and cannot"
                    f" be removed: {error}"
                )
    for directory in root.glob("*/"):
        _remove_if_empty(directory)


def _delete(run: Path) -> None:
    # The lock is deleted last. Without it, another process takes the rest for the
    # directory of a killed process.
    with suppress(FileNotFoundError):
        for path in run.iterdir():
            if path.name == _LOCK:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        shutil.rmtree(run)


def _remove_if_empty(directory: Path) -> None:
    with suppress(OSError):
        directory.rmdir()
