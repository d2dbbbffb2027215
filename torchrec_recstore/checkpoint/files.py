"""Files and directories of a checkpoint: written whole or not at all, and checked when they are read."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import xxhash
from safetensors import SafetensorError
from torch import Tensor

_BLOCK = 1 << 20


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


def make_directory(path: Path) -> None:
    """Makes a directory and its parents where they are missing, and has the new entries on the disk.

    Raises:
        NotADirectoryError: there is a file in the way.
        OSError: it cannot be made.
    """
    if path.is_dir():
        return
    make_directory(path.parent)
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir():  # else another process was faster
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fspath(path)) from None
    sync_directory(path.parent)
