"""Files that are there as a whole or not at all."""

from __future__ import annotations

from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file beside its place and renames it: a killed run, or a full disk, leaves the one before, or none.

    Raises:
        OSError: it cannot be written; with its name.
    """
    beside = path.with_name(f".{path.name}")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
