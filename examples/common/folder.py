"""A folder that one run at a time writes to."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from common.command import DataError
from common.processes import on_rank_0


@contextmanager
def sole_use(path: Path) -> Iterator[None]:
    """Makes a folder where it is not there, and keeps other runs out of it meanwhile; collective.

    Args:
        path: the folder, on a file system that all ranks see.

    Raises:
        DataError: there is no such folder and none can be made, it cannot be written to, another run has it, or a rank
            does not see it.
    """
    locks: list[int] = []
    try:
        on_rank_0(lambda: locks.append(locked_folder(path)))
        seen: list[bool] = [False] * dist.get_world_size()
        dist.all_gather_object(seen, path.is_dir())
        if not all(seen):
            raise DataError(f"{path}: rank {seen.index(False)} does not see this folder, which all ranks must share")
        yield
    finally:
        for descriptor in locks:
            os.close(descriptor)


def locked_folder(path: Path) -> int:
    """Makes a folder where it is not there, and locks it until the descriptor is closed or the process has ended.

    Returns:
        The descriptor.

    Raises:
        DataError: there is no such folder and none can be made, it cannot be written to, or another run has it.
    """
    if path.exists() and not path.is_dir():
        raise DataError(f"{path}: this is no folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    try:
        # A torchrun that is killed leaves its processes to train on, and a second one would write among them.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise DataError(f"{path}: another run is writing there") from None
    except OSError:
        pass  # a network file system without locks on folders
    return descriptor
