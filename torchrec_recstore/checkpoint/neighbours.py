"""What a checkpoint that is to be replaced holds and what needs it, as far as can be told without loading anything."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchrec_recstore.checkpoint.files import CheckpointError
from torchrec_recstore.checkpoint.info import METADATA, CheckpointInfo
from torchrec_recstore.checkpoint.staging import is_staging


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
