"""The directory that a checkpoint is written to: by one process at a time, completely or not at all."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from torchrec_recstore.checkpoint.files import (
    CheckpointError,
    FileLock,
    is_staging,
    leftovers,
    lock_file,
    make_directory,
    path_lock,
    staging_name,
    sync_directory,
)
from torchrec_recstore.checkpoint.info import METADATA, CheckpointInfo


@dataclass(frozen=True)
class _Metadata:
    """What is read of a checkpoint, of another version's too."""

    checksum: str
    files: frozenset[str]
    base: tuple[str, str] | None  # its path, links resolved, and its checksum


def check_own_files(directory: Path, path: Path) -> None:
    """Refuses to delete files that are not a checkpoint's.

    Args:
        directory: the checkpoint, or an empty directory.
        path: what to call it in the error.

    Raises:
        FileExistsError: there is something in ``directory`` that is not a file of the checkpoint.
    """
    there = set(os.listdir(directory))
    if not there:
        return
    if METADATA not in there:
        raise FileExistsError(f"{path} is no checkpoint: overwrite=True replaces checkpoints alone")
    metadata = _metadata(directory)
    if metadata is None:
        raise FileExistsError(
            f"{path} has damaged metadata, so that its own files are not known: delete it, or save to another path"
        )
    foreign = sorted(there - metadata.files - {METADATA})
    if foreign:
        names = ", ".join(foreign[:3]) + (f" and {len(foreign) - 3} more" if len(foreign) > 3 else "")
        raise FileExistsError(
            f"{path} holds what is no file of the checkpoint, and would be deleted with it: {names}; move it away, or "
            "save to another path"
        )


def check_not_needed(path: Path) -> None:
    """Refuses to replace a checkpoint that a delta beside it needs.

    Args:
        path: the checkpoint, links resolved.

    Raises:
        FileExistsError: a delta in the same directory is a delta of it, or of another delta of it.
    """
    own = _metadata(path)
    for entry in path.parent.iterdir():
        if own is not None and not is_staging(entry) and _needs(entry, path, own.checksum):
            raise FileExistsError(
                f"{path} is needed to load {entry}, which is a delta of it: save to another path, or fold that delta "
                "first (recstore compact) and delete it"
            )


def check_unchanged(chain: Sequence[CheckpointInfo]) -> None:
    """Refuses to use checkpoints that have been replaced or deleted since they were read.

    Raises:
        CheckpointError: one of them.
    """
    for info in chain:
        metadata = _metadata(info.path)
        if metadata is None or metadata.checksum != info.checksum:
            raise CheckpointError(f"{info.path} has been replaced or deleted since it was read: begin again")


def _needs(delta: Path, path: Path, checksum: str) -> bool:
    seen: set[str] = set()
    metadata = _metadata(delta)
    while metadata is not None and metadata.base is not None and metadata.base[0] not in seen:
        if metadata.base == (os.fspath(path), checksum):
            return True
        seen.add(metadata.base[0])
        metadata = _metadata(Path(metadata.base[0]))
    return False


def _metadata(path: Path) -> _Metadata | None:
    """None where there is no checkpoint, or where its metadata cannot be read."""
    try:
        path = path.resolve()
        document = json.loads((path / METADATA).read_bytes())
        of = document["delta_of"]
        base = None if of is None else (os.path.realpath(path.parent / of["path"]), str(of["checksum"]))
        return _Metadata(str(document["checksum"]), frozenset(document["files"]), base)
    except (OSError, ValueError, KeyError, TypeError):
        return None


_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class Destination:
    """A path that nobody but this process writes a checkpoint to; also a context manager.

    Files are written into a directory beside the path, which has a name that no other save uses, and which
    :meth:`publish` renames. The path is locked until :meth:`close`. The checkpoints that are read meanwhile are locked
    against being replaced.

    Args:
        path: of the checkpoint's directory, links resolved. Its parents are made where they are missing.
        overwrite: whether a checkpoint at ``path`` may be replaced.
        bases: checkpoints that the new one needs, or is made of.

    Raises:
        FileExistsError: there is something at ``path``, and no ``overwrite``; or it is no checkpoint, has files that
            are not the checkpoint's, or is needed by a delta beside it.
        BlockingIOError: another process is writing to ``path``, or replacing one of ``bases``.
        CheckpointError: one of ``bases`` has been replaced since it was read.
        OSError: the parent directory cannot be made or written.
    """

    def __init__(self, path: Path, *, overwrite: bool = False, bases: Sequence[CheckpointInfo] = ()) -> None:
        self.path = path
        self._overwrite = overwrite
        self._bases = bases
        self._staging: Path | None = None
        self._check()
        make_directory(path.parent)
        with ExitStack() as locks:
            locks.enter_context(path_lock(path))
            for base in bases:
                try:
                    locks.enter_context(_shared_lock(base.path, path))
                except OSError as error:  # where this process cannot write; publish looks whether it is there still
                    if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                        raise
            check_unchanged(bases)
            self._check()
            self._locks = locks.pop_all()

    @property
    def staging(self) -> Path:
        """The directory to write the files to, after :meth:`stage`."""
        assert self._staging is not None
        return self._staging

    def stage(self) -> Path:
        """Makes the directory to write the files to, and removes those that dead processes have left behind.

        Raises:
            OSError: it cannot be made.
        """
        for rest in leftovers(self.path):  # dead, since this process has the lock
            shutil.rmtree(rest, ignore_errors=True)
        staging = self.path.with_name(staging_name(self.path))
        staging.mkdir()
        self._staging = staging
        return staging

    def publish(self) -> None:
        """Gives the files their place, at once and for good.

        Raises:
            FileExistsError, CheckpointError: as for the class, if that has changed meanwhile.
            OSError: that cannot be done. After any error ``path`` is as it was.
        """
        staging = self.staging
        check_unchanged(self._bases)
        self._check()
        sync_directory(staging)
        replaces = self.path.exists()
        if replaces:
            _exchange(staging, self.path)
        else:
            os.rename(staging, self.path)
        try:
            if replaces:
                check_own_files(staging, self.path)  # again, now that nobody reaches it by its path
            sync_directory(self.path.parent)
        except BaseException:
            if replaces:
                _exchange(staging, self.path)
            else:
                os.rename(self.path, staging)
            raise

    def close(self) -> None:
        """Removes what has not been published, or what has been replaced, and unlocks the path."""
        with self._locks:
            if self._staging is not None:
                shutil.rmtree(self._staging, ignore_errors=True)
                self._staging = None

    def __enter__(self) -> Destination:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check(self) -> None:
        if not os.path.lexists(self.path):
            return
        if not self._overwrite:
            raise FileExistsError(f"{self.path} exists already: pass overwrite=True to replace it")
        if not self.path.is_dir():
            raise FileExistsError(f"{self.path} is no checkpoint: overwrite=True replaces checkpoints alone")
        check_own_files(self.path, self.path)
        check_not_needed(self.path)


def _shared_lock(base: Path, path: Path) -> FileLock:
    return FileLock(
        lock_file(base),
        f"writing {path}, which needs it,",
        lambda holder: f"{base}, which {path} needs, cannot be used: {holder}: wait for that process",
        shared=True,
    )


def _exchange(one: Path, other: Path) -> None:
    # rename() cannot replace a directory that has files; to remove it first would leave a moment without a checkpoint.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        hint = ": this filesystem cannot exchange directories, save to a new path" if code == errno.EINVAL else ""
        raise OSError(code, os.strerror(code) + hint, os.fspath(other))
