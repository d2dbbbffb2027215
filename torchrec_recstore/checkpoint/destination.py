"""Writes a checkpoint's directory completely or not at all, by one process at a time."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import NamedTuple

from torchrec_recstore.checkpoint.files import (
    CheckpointError,
    is_staging,
    leftovers,
    make_directory,
    path_lock,
    staging_name,
    sync,
)
from torchrec_recstore.checkpoint.info import METADATA, CheckpointInfo
from torchrec_recstore.ownership import remove

_AT_FDCWD = -100  # linux/fcntl.h
_RENAME_EXCHANGE = 2  # linux/fs.h


class Destination(AbstractContextManager["Destination"]):
    """A locked path to which this process writes a checkpoint; also a context manager.

    :meth:`stage` creates a hidden directory next to the path, the caller writes the
    files into it, and :meth:`publish` renames it. Until :meth:`close` the path is
    locked, and so are the ``bases``, the checkpoints that the new one needs or is made
    from. ``path`` has no links. The errors are those of ``save_checkpoint`` for its
    path and its base.
    """

    def __init__(
        self,
        path: Path,
        *,
        overwrite: bool = False,
        bases: Sequence[CheckpointInfo] = (),
    ) -> None:
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
                    locks.enter_context(path_lock(base.path, needed_by=path))
                except OSError as error:
                    # Without write access there is no lock; publish finds a replaced
                    # base.
                    if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                        raise
            _check_unchanged(bases)
            self._check()
            self._locks = locks.pop_all()

    @property
    def staging(self) -> Path:
        """The directory that :meth:`stage` has created."""
        assert self._staging is not None
        return self._staging

    def stage(self) -> Path:
        """Creates the directory for the files.

        The directories of dead processes are removed.
        """
        for leftover in leftovers(self.path):
            shutil.rmtree(leftover, ignore_errors=True)
        staging = self.path.with_name(staging_name(self.path))
        staging.mkdir()
        self._staging = staging
        return staging

    def publish(self) -> None:
        """Renames the directory to the path in one atomic operation.

        After an error the path is as it was.
        """
        staging = self.staging
        _check_unchanged(self._bases)
        self._check()
        sync(staging)
        replaces = self.path.exists()
        move = _exchange if replaces else os.rename
        move(staging, self.path)
        try:
            # The old checkpoint is checked again, now that no process can add a file to
            # it by its path.
            if replaces:
                _check_own_files(staging, self.path)
            sync(self.path.parent)
        except BaseException:
            move(self.path, staging)
            raise

    def publish_prepared(self, directory: Path) -> None:
        """Publishes a complete checkpoint of a directory next to the path.

        After an error, both are as they were.
        """
        self._staging = directory
        try:
            self.publish()
        except BaseException:
            self._staging = None
            raise

    def close(self) -> None:
        """Deletes the unpublished or replaced directory, and releases the locks."""
        with self._locks:
            if self._staging is not None:
                remove(self._staging)  # A save that was replaced may have been a link.
                self._staging = None

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check(self) -> None:
        if not os.path.lexists(self.path):
            return
        if not self._overwrite:
            raise FileExistsError(
                f"{self.path} exists already: pass overwrite=True to replace it"
            )
        if not self.path.is_dir():
            raise FileExistsError(
                f"{self.path} is no checkpoint: overwrite=True replaces checkpoints"
                " alone"
            )
        _check_own_files(self.path, self.path)
        metadata = _metadata(self.path)
        if metadata is None:
            return
        for entry in self.path.parent.iterdir():
            if is_staging(entry):
                continue
            if _needs(entry, self.path, metadata.checksum):
                raise FileExistsError(
                    f"{self.path} is needed to load {entry}, which is a delta of it:"
                    " save to another path, or fold that delta first (recstore"
                    " compact) and delete it"
                )


class _Metadata(NamedTuple):
    """The part of the metadata that is the same in every version of the format."""

    checksum: str
    files: frozenset[str]
    # The path of the base with links resolved, and its checksum.
    base: tuple[str, str] | None


def _check_own_files(directory: Path, path: Path) -> None:
    """Refuses to replace a checkpoint with files that do not belong to it.

    It is in ``directory`` now, and was at ``path``.
    """
    names = set(os.listdir(directory))
    if not names:
        return
    if METADATA not in names:
        raise FileExistsError(
            f"{path} is no checkpoint: overwrite=True replaces checkpoints alone"
        )
    metadata = _metadata(directory)
    if metadata is None:
        raise FileExistsError(
            f"{path} has damaged metadata, so that its own files are not known: delete"
            " it, or save to another path"
        )
    foreign = sorted(names - metadata.files - {METADATA})
    if foreign:
        listed = ", ".join(foreign[:3])
        if len(foreign) > 3:
            listed += f" and {len(foreign) - 3} more"
        raise FileExistsError(
            f"{path} contains files that do not belong to the checkpoint and would be"
            f" deleted with it: {listed}; move them away, or save to another path"
        )


def _check_unchanged(chain: Sequence[CheckpointInfo]) -> None:
    """Refuses checkpoints that were replaced or deleted since they were read."""
    for info in chain:
        metadata = _metadata(info.path)
        if metadata is None or metadata.checksum != info.checksum:
            raise CheckpointError(
                f"{info.path} has been replaced or deleted since it was read: begin"
                " again"
            )


def _needs(delta: Path, path: Path, checksum: str) -> bool:
    """Returns whether ``delta`` is a delta of a checkpoint, or of a delta of it."""
    base_paths: set[str] = set()
    metadata = _metadata(delta)
    while metadata is not None and metadata.base is not None:
        base_path, base_checksum = metadata.base
        if base_path in base_paths:
            return False  # a circle
        if base_path == os.fspath(path) and base_checksum == checksum:
            return True
        base_paths.add(base_path)
        metadata = _metadata(Path(base_path))
    return False


def _metadata(path: Path) -> _Metadata | None:
    """Reads the metadata of a checkpoint; None if it cannot be read."""
    try:
        path = path.resolve()
        document = json.loads((path / METADATA).read_bytes())
        delta_of = document["delta_of"]
        base = None
        if delta_of is not None:
            base_path = os.path.realpath(path.parent / delta_of["path"])
            base = (base_path, str(delta_of["checksum"]))
        return _Metadata(
            str(document["checksum"]),
            frozenset(document["files"]),
            base,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _exchange(source: Path, target: Path) -> None:
    """Exchanges two directories in one atomic operation."""
    # rename() cannot replace a directory that contains files. If the directory were
    # removed first, there would be no checkpoint for a moment.
    libc = ctypes.CDLL(None, use_errno=True)
    status = libc.renameat2(
        _AT_FDCWD,
        os.fsencode(source),
        _AT_FDCWD,
        os.fsencode(target),
        _RENAME_EXCHANGE,
    )
    if status != 0:
        code = ctypes.get_errno()
        reason = os.strerror(code)
        if code == errno.EINVAL:
            reason += (
                ": this filesystem cannot exchange directories, save to a new path"
            )
        raise OSError(code, reason, os.fspath(target))
