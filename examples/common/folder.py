"""A folder that one run at a time writes to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch.distributed as dist
from common.command import DataError
from common.processes import on_rank_0

from torchrec_recstore.checkpoint.files import FileLock, make_directory


@contextmanager
def sole_use(path: Path) -> Iterator[None]:
    """Makes a folder where it is not there, and keeps other runs out of it meanwhile; collective.

    Args:
        path: the folder, on a file system that all ranks see.

    Raises:
        DataError: there is no such folder and none can be made, it cannot be written to, another run has it, or a rank
            does not see it.
    """
    locks = ExitStack()

    def lock() -> None:
        locks.enter_context(locked_folder(path))

    with locks:
        on_rank_0(lock)
        seen: list[bool] = [False] * dist.get_world_size()
        dist.all_gather_object(seen, path.is_dir())
        if not all(seen):
            raise DataError(f"{path}: rank {seen.index(False)} does not see this folder, which all ranks must share")
        yield


def locked_folder(path: Path) -> FileLock:
    """Makes a folder where it is not there, and locks it until the lock is closed or the process has ended.

    Raises:
        DataError: there is no such folder and none can be made, it cannot be written to, or another run has it.
    """
    if path.exists() and not path.is_dir():
        raise DataError(f"{path}: this is no folder")
    try:
        make_directory(path)
        # A torchrun that is killed leaves its processes to train on, and a second one would write among them.
        return FileLock(
            path / ".lock", "writing there", lambda holder: f"{path}: another run is writing there: {holder}"
        )
    except BlockingIOError as error:
        raise DataError(str(error)) from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
