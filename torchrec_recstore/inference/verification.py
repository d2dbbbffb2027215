"""Whether a served file is, byte for byte, what was written.

An exported model is a zip file, whose comment ends with a checksum of all bytes before it. A delta is a file of
safetensors; in its header is a checksum of the file with zeros in the checksum's place.
"""

from __future__ import annotations

import os
import re
import zipfile
from pathlib import Path
from typing import BinaryIO

import safetensors.torch
import torch
from safetensors import SafetensorError

from torchrec_recstore.inference.checksum import (
    BLOCK_BYTES,
    checksum_after,
    checksum_of_format_1,
    hexadecimal,
    scripted_function,
)
from torchrec_recstore.newer import not_known

FORMAT = 2
"""Of exported models and their deltas. A delta is of the format of the model that it is for."""

DELTA_KEY = "recstore delta"
"""Of the entry in the header of a delta."""

_EXPORT = b"recstore export %04d "
_DIGITS = 16
_COMMENT_BYTES = len(_EXPORT % FORMAT) + _DIGITS
_END = b"PK\x05\x06"  # begins the last 22 bytes of a zip file, and then its comment
_END_BYTES = 22


def verify(path: str | Path) -> None:
    """Reads an exported model or a delta through and compares it with its checksum.

    Neither the file's tensors nor its code are loaded. ``torch.jit.load`` itself checks nothing, and takes files in
    which bits have flipped: the server calls this, or ``verify`` of the served model with the file's bytes, where
    this package is not.

    A file of format 1 has no checksum of all of it. Of a model the checksums of the zip file's members are compared,
    which are those of tensors, code and constants.

    Args:
        path: what ``export_for_inference``, ``export_checkpoint``, ``export_delta`` or ``export_checkpoint_delta`` has
            written.

    Raises:
        OSError: the file cannot be read.
        ValueError: a byte is another one than was written, or a newer version has written the file.
    """
    path = Path(path)
    if is_delta(path):
        _verify_delta(path)
    else:
        _verify_export(path)


def is_delta(path: Path) -> bool:
    """Whether a file is a delta rather than an exported model, as far as its beginning tells.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        begin = file.read(9)
    return begin[8:] == b"{" and not begin.startswith(b"PK")


def format_of_export(path: Path) -> int:
    """The number of an exported file's format.

    Raises:
        OSError: it cannot be read.
        ValueError: its end is not that of an exported model, or a newer version has written it.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _END_BYTES - _COMMENT_BYTES))
        end = file.read()
    if end[-_END_BYTES:].startswith(_END) and end[-2:] == b"\0\0":
        return 1
    comment = re.fullmatch(rb"recstore export (\d{4}) [0-9a-f]{16}", end[-_COMMENT_BYTES:])
    if comment is None or not end.startswith(_END):
        raise ValueError(f"{path} is no exported model, or it is damaged: its end is another one")
    if not 2 <= int(comment[1]) <= FORMAT:
        raise ValueError(not_known(f"{path} is of format {int(comment[1])} of exported models"))
    return int(comment[1])


def sign_export(path: Path) -> None:
    """Writes the comment of a zip file that ``torch.jit.save`` has written.

    Raises:
        OSError: it cannot be written.
    """
    with path.open("r+b") as file:
        file.seek(-_END_BYTES, os.SEEK_END)
        end = file.read()
        assert end.startswith(_END), "torch writes zip files without a comment (2.13)"
        file.seek(-2, os.SEEK_END)
        file.write(_COMMENT_BYTES.to_bytes(2, "little") + _EXPORT % FORMAT)
        size = file.tell()
        file.seek(0)
        checksum = _checksum(file, size)
        file.seek(size)
        file.write(checksum.encode())


def delta_metadata(number: int) -> dict[str, str]:
    """What goes into the header of a delta before :func:`sign_delta`.

    Args:
        number: of its format.
    """
    return {DELTA_KEY: f"{number:04d} {'0' * _DIGITS}"}


def sign_delta(path: Path) -> None:
    """Writes the checksum into the header of a delta, in the place of its zeros.

    Raises:
        OSError: it cannot be written.
    """
    with path.open("r+b") as file:
        place = _place_of_checksum(_header(file))
        assert place is not None
        file.seek(0)
        checksum = _checksum(file, file.seek(0, os.SEEK_END), place)
        file.seek(place)
        file.write(checksum.encode())


def delta_format(path: str | Path) -> int:
    """The number of a delta's format.

    Raises:
        OSError, SafetensorError: the file is missing, or none of safetensors.
        ValueError: a newer version has written it.
    """
    with safetensors.safe_open(path, framework="pt") as file:
        written = (file.metadata() or {}).get(DELTA_KEY)
    number = 1 if written is None else int(written.split()[0])
    if number > FORMAT:
        raise ValueError(not_known(f"{path} is of format {number} of deltas"))
    return number


def _verify_export(path: Path) -> None:
    if format_of_export(path) == 1:
        _verify_members(path)
        return
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END) - _DIGITS
        file.seek(0)
        checksum = _checksum(file, size)
        file.seek(size)
        if file.read() != checksum.encode():
            raise ValueError(f"{path} is damaged: its checksum does not fit")


def _verify_members(path: Path) -> None:
    """A file of format 1."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError, EOFError, UnicodeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    except Exception as error:  # zlib.error, which has no better base
        raise ValueError(f"{path} is damaged: {error}") from error
    if damaged is not None:
        raise ValueError(f"{path} is damaged: the checksum of {damaged} does not fit")


def _verify_delta(path: Path) -> None:
    with path.open("rb") as file:
        header = _header(file)
        place = _place_of_checksum(header)
        if place is not None:
            number = int(header[place - 8 - 5 : place - 8 - 1])
            if number > FORMAT:
                raise ValueError(not_known(f"{path} is of format {number} of deltas"))
            file.seek(0)
            checksum = _checksum(file, file.seek(0, os.SEEK_END), place)
            file.seek(place)
            if file.read(_DIGITS) != checksum.encode():
                raise ValueError(f"{path} is damaged: its checksum does not fit")
            return
    _verify_tensors(path)


def _verify_tensors(path: Path) -> None:
    """A delta of format 1, which has a checksum of its tensors."""
    content = path.read_bytes()
    try:
        tensors = safetensors.torch.load(content)
        good = safetensors.torch.save(tensors) == content and torch.equal(
            tensors["checksum"], scripted_function(checksum_of_format_1)(tensors)
        )
    except (SafetensorError, KeyError, RuntimeError) as error:
        raise ValueError(f"{path} is no delta, or it is damaged: {error}") from error
    if not good:
        raise ValueError(f"{path} is no delta, or it is damaged: its checksum does not fit")


def _header(file: BinaryIO) -> bytes:
    file.seek(0)
    size = int.from_bytes(file.read(8), "little")
    return file.read(min(size, 100_000_000))  # safetensors' own limit


def _place_of_checksum(header: bytes) -> int | None:
    """Where in a delta the digits of its checksum begin."""
    found = re.search(rb'"' + DELTA_KEY.encode() + rb'":"\d{4} (?=[0-9a-f]{16}")', header)
    return None if found is None else 8 + found.end()


def _checksum(file: BinaryIO, size: int, place: int | None = None) -> str:
    """Of the first ``size`` bytes, with zeros in the place of a checksum."""
    file.seek(0)
    block = bytearray(BLOCK_BYTES)
    after, state = scripted_function(checksum_after), torch.zeros(1, dtype=torch.int64)
    for begin in range(0, size, BLOCK_BYTES):
        view = memoryview(block)[: min(BLOCK_BYTES, size - begin)]
        if file.readinto(view) != len(view):  # type: ignore[attr-defined]
            raise ValueError(f"{file.name} has become shorter while it was read")
        for byte in range(max(begin, place or 0), min(begin + len(view), (place or 0) + _DIGITS)) if place else ():
            view[byte - begin] = ord("0")
        state = after(state, torch.frombuffer(view, dtype=torch.uint8))
    return str(scripted_function(hexadecimal)(state))
