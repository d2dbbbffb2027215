"""Locks on paths, over processes and hosts, that the system gives up when their holder dies."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from weakref import WeakSet

_UNKNOWN_HOLDER_S = 1.0  # how long to wait for the name of a holder that has not written it yet

_held: WeakSet[FileLock] = WeakSet()


class FileLock:
    """A lock that one process holds, or that several share; also a context manager.

    The lock is an ``flock`` of a file. The system gives it up when the process that holds it ends, however it ends; a
    process that is forked meanwhile does not have it. The file tells others who holds the lock. On NFS the lock holds
    over hosts, unless the filesystem is mounted with ``nolock`` or ``local_lock``.

    Args:
        file: the lock's file, in a directory that exists. It is made where it is missing.
        doing: what this process does with the lock, for the error of others: "writing it".
        refusal: makes the message of the error out of the holder, "process 12 on host h has been writing it since
            2026-01-31T12:00:00Z".
        shared: whether others may have the lock as well, if they share it, too.
        keep: whether the file stays when the lock is given up.

    Raises:
        BlockingIOError: another process has the lock, or another part of this one.
        OSError: the file cannot be written, or its filesystem has no locks.
    """

    def __init__(
        self, file: Path, doing: str, refusal: Callable[[str], str], *, shared: bool = False, keep: bool = False
    ) -> None:
        self._descriptor: int | None = None
        self._file = file
        since = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        self._record = _Record(os.getpid(), socket.gethostname(), since, doing, secrets.token_hex(4))
        self._shared = shared
        self._keep = keep
        deadline = time.monotonic() + _UNKNOWN_HOLDER_S
        while not self._acquire():
            holder, known = _holder(file)
            # A holder that is not known is only beginning, or has just died.
            if known or time.monotonic() > deadline:
                raise BlockingIOError(refusal(holder))
            time.sleep(0.01)

    def close(self) -> None:
        """Gives up the lock."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        _held.discard(self)
        try:
            # Whoever has opened the file by now, and waits for nothing but its lock, finds that the file is gone.
            with suppress(OSError):
                if self._shared and not _is_alone(descriptor):
                    _write_records(descriptor, [each for each in _records(self._file) if each != self._record])
                elif not self._keep and self._is_at_its_path(descriptor):
                    self._file.unlink()
        finally:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> FileLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _acquire(self) -> bool:
        """Takes the lock if it is free."""
        while True:
            descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(descriptor, (fcntl.LOCK_SH if self._shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                if self._is_at_its_path(descriptor):  # else whoever had it before has removed it
                    others = _records(self._file) if self._shared else []
                    _write_records(descriptor, [*others, self._record])
                    self._descriptor = descriptor
                    _held.add(self)
                    return True
            except BlockingIOError:
                return False
            except OSError as error:
                without = error.errno in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
                reason = "its filesystem has no file locks" if without else f"cannot be locked: {error.strerror}"
                raise OSError(error.errno, reason, os.fspath(self._file)) from error
            finally:
                if self._descriptor is None:
                    os.close(descriptor)

    def _is_at_its_path(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._file))
        except FileNotFoundError:
            return False

    def _forget(self) -> None:
        assert self._descriptor is not None
        os.close(self._descriptor)  # not unlocked: the parent's is the same lock
        self._descriptor = None


def lock_file(path: Path) -> Path:
    """The file that is locked by whoever writes to ``path``."""
    return path.with_name(f".{path.name}.lock")


def path_lock(path: Path) -> FileLock:
    """The lock of whoever writes to ``path``, which :class:`FileLock` describes."""
    return FileLock(
        lock_file(path),
        "writing it",
        lambda holder: f"{path} cannot be written: {holder}: wait for that process, or use another path",
    )


def _is_alone(descriptor: int) -> bool:
    """Whether nobody else shares the lock; if somebody does, this process has given it up by asking."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class _Record:
    """A holder, as the file of the lock names it; ``token`` tells the locks of one process apart."""

    pid: int
    host: str
    since: str
    doing: str
    token: str

    def is_alive(self) -> bool:
        """Whether the process lives, as far as this host can tell."""
        try:
            if self.host == socket.gethostname():
                os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # another user's
        return True


def _records(file: Path) -> list[_Record]:
    """The holders, the last one to take the lock last. Those that share it may miss one that came as another left."""
    try:
        return [_Record(**json.loads(line)) for line in file.read_bytes().splitlines()]
    except (OSError, ValueError, TypeError):
        return []


def _write_records(descriptor: int, records: Sequence[_Record]) -> None:
    text = "".join(json.dumps(asdict(record)) + "\n" for record in records)
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)


def _holder(file: Path) -> tuple[str, bool]:
    """Who holds a lock, in words, and whether that is known."""
    for each in reversed(_records(file)):
        if each.is_alive():
            return f"process {each.pid} on host {each.host} has been {each.doing} since {each.since}", True
    return "another process has been using it", False


def _forget_all() -> None:
    for lock in list(_held):
        lock._forget()
    _held.clear()


os.register_at_fork(after_in_child=_forget_all)
