"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchrec_recstore.checkpoint.files import sync_directory


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
    """Yields an empty file beside ``path``, which its body writes, and renames it.

    Raises:
        OSError: it cannot be written; what was there is there still.
    """
    check_path(path)
    beside: Path | None = None
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(handle)
        beside = Path(name)
        yield beside
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        beside.chmod(0o666 & ~umask)  # as any other file; those of mkstemp and safetensors are their owner's alone
        beside.replace(path)
    except BaseException as error:
        if beside is not None:
            beside.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.strerror:  # without the hidden file's name
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    sync_directory(path.parent)
