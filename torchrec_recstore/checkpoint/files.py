"""Files and directories of a checkpoint: written whole or not at all, and checked when they are read."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import xxhash
from safetensors import SafetensorError
from torch import Tensor

_BLOCK = 1 << 20
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class CheckpointError(ValueError):
    """A checkpoint cannot be used: damaged, incomplete, or of another format; the message names the file."""


@dataclass(frozen=True)
class FileInfo:
    """Size and checksum of a file.

    Args:
        bytes: its size.
        xxh3_128: of its bytes, hexadecimal, as ``xxhsum -H2`` prints it.
    """

    bytes: int
    xxh3_128: str


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileInfo:
    """Writes a safetensors file that is on the disk when this returns.

    Raises:
        OSError: it cannot be written.
    """
    try:
        safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:  # what it makes of the system's errors
        code = re.search(r"os error (\d+)", str(error))
        number = int(code[1]) if code else errno.EIO
        raise OSError(number, f"cannot be written: {os.strerror(number)}", os.fspath(path)) from error
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors 0.8 lets nobody else read
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return file_info(path)


def file_info(path: Path, on_bytes: Callable[[int], object] = lambda count: None) -> FileInfo:
    """Reads a file through.

    Args:
        path: the file.
        on_bytes: called after every block with its size.
    """
    digest = xxhash.xxh3_128()
    block = memoryview(bytearray(_BLOCK))
    size = 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
            size += count
            on_bytes(count)
    return FileInfo(size, digest.hexdigest())


def check_file(path: Path, expected: FileInfo, on_bytes: Callable[[int], object] = lambda count: None) -> None:
    """Reads a file through and compares it with what it should be.

    Raises:
        CheckpointError: it is missing, or has another size or other bytes.
    """
    try:
        found = file_info(path, on_bytes)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    if found.bytes != expected.bytes:
        raise CheckpointError(f"{path} is damaged: it has {found.bytes} bytes instead of {expected.bytes}")
    if found != expected:
        raise CheckpointError(f"{path} is damaged: its checksum does not fit")


def read_tensors(path: Path, expected: FileInfo) -> dict[str, Tensor]:
    """The tensors of a safetensors file, after :func:`check_file`; they lie in the file until they are touched."""
    check_file(path, expected)
    tensors: dict[str, Tensor] = safetensors.torch.load_file(path)
    return tensors


def read_ids(path: Path) -> Tensor:
    """The ids of a file with rows, which is not checked.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            ids: Tensor = file.get_tensor("ids")
            return ids
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is missing or damaged: {error}") from error


def sync_directory(path: Path) -> None:
    """Has the directory's entries on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def staging_directory(path: Path) -> Path:
    """Where a checkpoint is written before it has its name."""
    return path.parent / f".{path.name}.saving"


def make_staging(path: Path) -> Path:
    """An empty directory for the files of ``path``; what an earlier save left behind there goes.

    Raises:
        OSError: it cannot be made.
    """
    staging = staging_directory(path)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    return staging


def publish(path: Path) -> None:
    """Gives the files in the staging directory of ``path`` their place, at once and for good.

    Raises:
        OSError: that cannot be done; ``path`` is as it was.
    """
    staging = staging_directory(path)
    sync_directory(staging)
    replaces = path.exists()
    if replaces:
        _exchange(staging, path)
    else:
        os.rename(staging, path)
    try:
        sync_directory(path.parent)
    except OSError:
        if replaces:
            _exchange(staging, path)
        else:
            os.rename(path, staging)
        raise
    shutil.rmtree(staging, ignore_errors=True)


def _exchange(one: Path, other: Path) -> None:
    # rename() cannot replace a directory that has files; to remove it first would leave a moment without a checkpoint.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        hint = ": this filesystem cannot exchange directories, save to a new path" if code == errno.EINVAL else ""
        raise OSError(code, os.strerror(code) + hint, os.fspath(other))
