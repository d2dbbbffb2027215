"""The checkpoints of a folder: the newest one, and which ones are kept.

A checkpoint has its name only when it is complete, so that every checkpoint of a folder
that can be read is complete.

Tests: tests/checkpoint/test_retention.py.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchrec_recstore.checkpoint.files import (
    CheckpointError,
    is_staging,
    leftovers,
    path_lock,
    staging_name,
    sync,
)
from torchrec_recstore.checkpoint.info import (
    METADATA,
    CheckpointInfo,
    read_info,
    when_saved_ns,
)


def newest(folder: str | Path) -> CheckpointInfo | None:
    """Returns the metadata of the newest checkpoint of a folder.

    The newest checkpoint is the one with the highest ``step``; of several with the same
    step, the one that was saved last, by the time of its metadata file. A checkpoint
    that is being written does not count, because it has no name yet.

    On several ranks, call it on one rank and send its ``path`` to the others: another
    process may write a checkpoint between the calls of two ranks.

    Args:
        folder: The path of the folder whose entries are checkpoints. Other entries are
            ignored.

    Returns:
        The metadata, whose ``path`` ``load_checkpoint`` takes; None if the folder has
        no checkpoint or does not exist.

    Raises:
        CheckpointError: The metadata of a checkpoint is damaged, or is of a newer
            version of this package. Or a checkpoint with fewer steps was saved later,
            as after a reset of the rows, a return to an earlier checkpoint, or a copy
            without the times of files. The message names them.
        NotADirectoryError: ``folder`` is no folder.
        ValueError: ``folder`` is itself a checkpoint.
    """
    checkpoints = _checkpoints(Path(folder))
    if not checkpoints:
        return None
    _check_order(checkpoints, 1)
    return checkpoints[-1].info


def keep_newest(folder: str | Path, count: int) -> list[Path]:
    """Deletes the checkpoints of a folder except for the newest ones.

    A checkpoint that a kept delta needs is kept too, also the base of a base, so that
    each kept checkpoint can be loaded. A checkpoint that a delta outside of the folder
    needs is not known: keep such deltas in the same folder.

    A checkpoint is hidden by a rename before its files are deleted, and deltas are
    deleted before their bases. A process that is killed leaves no incomplete checkpoint
    under a visible name; the next call deletes the hidden files. A checkpoint that
    another process uses as a base or replaces at this moment is left for the next call.

    On several ranks, call it on one rank, after ``save_checkpoint`` has returned.

    Args:
        folder: The path of the folder whose entries are checkpoints. Other entries are
            left as they are.
        count: The number of checkpoints to keep, at least 1, by their ``step`` as
            :func:`newest` compares them. Bases of kept deltas come on top.

    Returns:
        The paths of the deleted checkpoints, the newest first.

    Raises:
        CheckpointError: The metadata of a checkpoint is damaged, so that what it needs
            is not known; or steps and times disagree about which checkpoints are the
            newest, see :func:`newest`. Nothing is deleted.
        NotADirectoryError, FileNotFoundError: ``folder`` is no folder, or does not
            exist.
        OSError: A file cannot be deleted.
        TypeError, ValueError: ``count`` is not an int of at least 1, or ``folder`` is
            itself a checkpoint. Nothing is deleted.
    """
    if type(count) is not int:
        raise TypeError(
            f"keep_newest: count must be an int, got {type(count).__name__}"
        )
    if count < 1:
        raise ValueError(
            f"keep_newest: count must be at least 1, got {count}: the newest checkpoint"
            " is never deleted"
        )
    path = Path(folder)
    if not path.exists():
        raise FileNotFoundError(f"keep_newest: there is no folder {path}")

    checkpoints = _checkpoints(path)
    _check_order(checkpoints, count)
    needed = _with_bases(checkpoints[-count:], checkpoints)
    _sweep(path)
    deleted = []
    # A delta is newer than its base, so it goes first.
    for checkpoint in reversed(checkpoints):
        if checkpoint.info.path not in needed and _delete(checkpoint):
            deleted.append(checkpoint.entry)
    return deleted


@dataclass(frozen=True)
class _Checkpoint:
    """An entry of a folder, which may be a link, and the checkpoint that it names."""

    entry: Path
    info: CheckpointInfo  # Its path has no links.
    saved_ns: int


def _checkpoints(folder: Path) -> list[_Checkpoint]:
    """Returns the checkpoints of a folder, the oldest first."""
    if (folder / METADATA).exists():
        raise ValueError(
            f"{folder} is a checkpoint: pass the folder that contains it,"
            f" {folder.parent}"
        )
    try:
        entries = sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    checkpoints = []
    for entry in entries:
        if entry.name.startswith("."):
            continue  # it is being written or deleted
        metadata = entry / METADATA
        if not metadata.is_file():
            continue
        saved_ns = when_saved_ns(metadata)
        info = read_info(entry)
        checkpoints.append(_Checkpoint(entry, info, saved_ns))
    checkpoints.sort(key=lambda checkpoint: (checkpoint.info.step, checkpoint.saved_ns))
    return checkpoints


def _check_order(checkpoints: Sequence[_Checkpoint], count: int) -> None:
    """Checks that none of the ``count`` newest checkpoints by their steps was saved
    before one of the others.
    """
    newest_ones = checkpoints[-count:]
    others = checkpoints[:-count]
    if not others:
        return
    oldest = min(newest_ones, key=lambda checkpoint: checkpoint.saved_ns)
    latest = max(others, key=lambda checkpoint: checkpoint.saved_ns)
    if latest.saved_ns > oldest.saved_ns:
        raise CheckpointError(
            f"{oldest.entry} has more steps than {latest.entry}, which was saved later:"
            " pass the one that you mean to load_checkpoint, and delete the other one or"
            " move it to another folder"
        )


def _with_bases(
    kept: Sequence[_Checkpoint],
    checkpoints: Sequence[_Checkpoint],
) -> set[Path]:
    """Returns the paths of checkpoints and of all that they need, without links."""
    info_of = {checkpoint.info.path: checkpoint.info for checkpoint in checkpoints}
    needed: set[Path] = set()
    for checkpoint in kept:
        info: CheckpointInfo | None = checkpoint.info
        while info is not None and info.path not in needed:
            needed.add(info.path)
            base = info.base
            if base is None:
                break
            # A base outside of the folder is not deleted.
            base_path = Path(os.path.realpath(base))
            info = info_of.get(base_path)
    return needed


def _delete(checkpoint: _Checkpoint) -> bool:
    """Deletes a checkpoint, unless another process uses or has replaced it.

    Of a link, only the link is deleted.
    """
    entry = checkpoint.entry
    try:
        lock = path_lock(entry)
    except BlockingIOError:
        return False
    with lock:
        try:
            checksum = read_info(entry).checksum
        except (CheckpointError, OSError):
            return False
        if checksum != checkpoint.info.checksum:
            return False
        if entry.is_symlink():
            entry.unlink()
            return True
        hidden = entry.with_name(staging_name(entry))
        entry.rename(hidden)
        sync(entry.parent)
        shutil.rmtree(hidden)
    return True


def _sweep(folder: Path) -> None:
    """Deletes what killed processes have left, if no process writes there now."""
    names = set()
    for entry in folder.iterdir():
        if is_staging(entry) and not entry.is_symlink():
            names.add(entry.name[1:].rpartition(".saving-")[0])
    for name in sorted(names):
        path = folder / name
        try:
            lock = path_lock(path)
        except BlockingIOError:
            continue
        with lock:
            for leftover in leftovers(path):
                shutil.rmtree(leftover)
