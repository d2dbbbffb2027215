"""Computes and checks the checksums of served files and models.

TorchScript compiles the functions that compute checksums, so that a served model can check itself.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor

from torchrec_recstore.encoding import not_known

FORMAT = 2
"""The number of the format of exported models and deltas. A delta has the format of the model to which it applies."""

HASHED_FORMAT = 3
"""The number of the format of models with ``index="hash"``. Their version is computed from the sums of their rows."""

_DELTA_KEY = "recstore delta"
"""The key of this package's entry in the header of a delta."""

_BLOCK_BYTES = 1 << 19
"""The block size of :func:`checksum_after`. Data that is passed in several calls is split at multiples of it."""

_EXPORT = b"recstore export %04d "
_DIGITS = 16
_COMMENT_BYTES = len(_EXPORT % FORMAT) + _DIGITS
_END = b"PK\x05\x06"  # The signature of the last record of a zip file: 22 bytes, and then the comment.
_END_BYTES = 22


@cache
def scripted_function(function: Callable[..., Any]) -> Any:
    """Compiles a function with TorchScript."""
    return torch.jit.script(function)


def checksum_after(state: Tensor, data: Tensor) -> Tensor:
    """Updates a checksum with the bytes of ``data``.

    Each word of eight bytes is mixed with its position by an invertible function. So a change of one word always
    changes the checksum, and any other change does so with a probability of 1 - 2**-64.

    Args:
        state: (1,) int64. The checksum of the data before ``data``. It is 0 at the beginning.
        data: (N,) of any data type. The data.

    Returns:
        (1,) int64. The new checksum.
    """
    block_bytes = 1 << 19
    longest = min(block_bytes, data.shape[0] * data.element_size())
    factors = torch.arange(1, longest // 8 + 2) * -7046029254386353131  # 2**64 over the golden ratio
    elements = block_bytes // data.element_size()
    for first in range(0, data.shape[0], elements):
        # TorchScript confuses view(dtype) with view(size).
        part = torch.view_copy(data[first : first + elements].cpu(), dtype=torch.uint8)
        words = torch.view_copy(F.pad(part, [0, -part.shape[0] % 8]), dtype=torch.int64)
        mixed = words.add_(factors[: words.shape[0]])
        mixed.bitwise_xor_((mixed >> 32).bitwise_and_(0xFFFFFFFF)).mul_(-49064778989728563)  # MurmurHash3's
        mixed.bitwise_xor_((mixed >> 29).bitwise_and_(0x7FFFFFFFF)).mul_(-4265267296055464877)
        mixed.bitwise_xor_((mixed >> 32).bitwise_and_(0xFFFFFFFF))
        state = state * 6364136223846793005 + mixed.sum() + part.shape[0]
    return state


def checksum_of(tensors: dict[str, Tensor]) -> Tensor:
    """Computes the checksum of tensors, their names, their data types and their shapes.

    Args:
        tensors: The tensors by name. A tensor with the name ``checksum`` is ignored.

    Returns:
        (1,) int64. The checksum.
    """
    state = torch.zeros(1, dtype=torch.int64)
    for name in sorted(tensors.keys()):
        if name == "checksum":
            continue
        tensor = tensors[name]
        described: list[int] = []
        for char in name:
            described.append(ord(char))
        described.append(-1)
        described.append(tensor.dtype)  # type: ignore[arg-type]
        for size in tensor.shape:
            described.append(size)
        state = checksum_after(state, torch.tensor(described))
        state = checksum_after(state, tensor.detach().reshape(-1))
    return state


def hexadecimal(checksum: Tensor) -> str:
    """Converts a (1,) int64 checksum to 16 hexadecimal digits."""
    digits = "0123456789abcdef"
    text = ""
    for shift in range(60, -4, -4):
        text += digits[int(((checksum >> shift) & 15).item())]
    return text


def checksum_of_strings(strings: list[str]) -> str:
    """Computes the checksum of a list of strings, in 16 hexadecimal digits."""
    codes: list[int] = []
    for string in strings:
        for char in string:
            codes.append(ord(char))
        codes.append(-1)
    return hexadecimal(checksum_after(torch.zeros(1, dtype=torch.int64), torch.tensor(codes)))


def check_file_bytes(file: Tensor) -> None:
    """Compares the bytes of an exported file with the checksum at its end.

    Args:
        file: (N,) uint8. All bytes of the file.

    Raises:
        ValueError: The checksum is wrong.
    """
    digits = 16
    written = ""
    codes: list[int] = file[-digits:].to(torch.int64).tolist()
    for code in codes:
        written += chr(code)
    if hexadecimal(checksum_after(torch.zeros(1, dtype=torch.int64), file[:-digits])) != written:
        raise ValueError("the file is damaged: its checksum does not fit")


def checksum_of_format_1(tensors: dict[str, Tensor]) -> Tensor:
    """Computes the checksum of a delta of format 1. See :func:`checksum_of`; the arguments are the same."""
    total = torch.zeros(1, dtype=torch.int64)
    factors = torch.arange(1 << 17) * -7046029254386353131 | 1
    for name in sorted(tensors.keys()):
        if name == "checksum":
            continue
        tensor = tensors[name]
        described: list[int] = []
        for char in name:
            described.append(ord(char))
        described.append(0)
        for size in tensor.shape:
            described.append(size)
        for data in (torch.tensor(described), tensor.reshape(-1)):
            for first in range(0, data.shape[0], 1 << 16):
                part = torch.view_copy(data[first : first + (1 << 16)], dtype=torch.uint8)
                words = torch.view_copy(F.pad(part, [0, -part.shape[0] % 8]), dtype=torch.int64)
                total = total * 6364136223846793005 + (words * factors[: words.shape[0]]).sum()
    return total


def verify(path: str | Path) -> None:
    """Reads an exported model or a delta and compares the file with its checksum.

    The file's tensors and code are not loaded. ``torch.jit.load`` does not check a file, and loads files with flipped
    bits. So a server should call this function, or, if this package is not installed, the method ``verify`` of the
    served model with the bytes of the file.

    A file of format 1 has no checksum of the whole file. For a model of format 1, the checksums of the members of the
    zip file are compared. They cover tensors, code and constants.

    Args:
        path: A file that ``export_for_inference``, ``export_checkpoint``, ``export_delta`` or
            ``export_checkpoint_delta`` has written.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is damaged, or a newer version of this package has written it.
    """
    path = Path(path)
    if is_delta(path):
        _verify_delta(path)
    else:
        _verify_export(path)


def is_delta(path: Path) -> bool:
    """Returns whether a file begins as a delta and not as an exported model.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        begin = file.read(9)
    return begin[8:] == b"{" and not begin.startswith(b"PK")


def format_of_export(path: Path) -> int:
    """Returns the number of an exported file's format.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file does not end as an exported model does, or a newer version has written it.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _END_BYTES - _COMMENT_BYTES))
        end = file.read()
    if end[-_END_BYTES:].startswith(_END) and end[-2:] == b"\0\0":
        return 1
    comment = re.fullmatch(rb"recstore export (\d{4}) [0-9a-f]{16}", end[-_COMMENT_BYTES:])
    if comment is None or not end.startswith(_END):
        raise ValueError(
            f"{path} is not an exported model, or it is damaged: it does not end as an exported model does"
        )
    if not 2 <= int(comment[1]) <= HASHED_FORMAT:
        raise ValueError(not_known(f"{path} is of format {int(comment[1])} of exported models"))
    return int(comment[1])


def sign_export(path: Path, number: int = FORMAT) -> None:
    """Appends the checksum to a zip file that ``torch.jit.save`` has written, as the comment of the zip file.

    Args:
        path: The file.
        number: The number of the file's format.

    Raises:
        OSError: The file cannot be written.
    """
    with path.open("r+b") as file:
        file.seek(-_END_BYTES, os.SEEK_END)
        end = file.read()
        assert end.startswith(_END), "torch writes zip files without a comment (2.13)"
        file.seek(-2, os.SEEK_END)
        file.write(_COMMENT_BYTES.to_bytes(2, "little") + _EXPORT % number)
        size = file.tell()
        file.seek(0)
        checksum = _checksum(file, size)
        file.seek(size)
        file.write(checksum.encode())


def delta_metadata(number: int) -> dict[str, str]:
    """Returns the entry of a delta's header, with zeros in the place of the checksum; see :func:`sign_delta`.

    Args:
        number: The number of the delta's format.
    """
    return {_DELTA_KEY: f"{number:04d} {'0' * _DIGITS}"}


def sign_delta(path: Path) -> None:
    """Replaces the zeros in the header of a delta by its checksum.

    Raises:
        OSError: The file cannot be written.
    """
    with path.open("r+b") as file:
        place = _place_of_checksum(_header(file))
        assert place is not None
        file.seek(0)
        checksum = _checksum(file, file.seek(0, os.SEEK_END), place)
        file.seek(place)
        file.write(checksum.encode())


def delta_format(path: str | Path) -> int:
    """Returns the number of a delta's format.

    Raises:
        OSError, SafetensorError: The file is missing, or is not a file of safetensors.
        ValueError: A newer version of this package has written the file.
    """
    with safetensors.safe_open(path, framework="pt") as file:
        written = (file.metadata() or {}).get(_DELTA_KEY)
    number = 1 if written is None else int(written.split()[0])
    if number > HASHED_FORMAT:
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
    """Checks an exported model of format 1 by the checksums in its zip file."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError, EOFError, UnicodeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    except Exception as error:  # zlib.error is a direct subclass of Exception.
        raise ValueError(f"{path} is damaged: {error}") from error
    if damaged is not None:
        raise ValueError(f"{path} is damaged: the checksum of {damaged} does not fit")


def _verify_delta(path: Path) -> None:
    with path.open("rb") as file:
        header = _header(file)
        place = _place_of_checksum(header)
        if place is not None:
            number = int(header[place - 8 - 5 : place - 8 - 1])
            if number > HASHED_FORMAT:
                raise ValueError(not_known(f"{path} is of format {number} of deltas"))
            file.seek(0)
            checksum = _checksum(file, file.seek(0, os.SEEK_END), place)
            file.seek(place)
            if file.read(_DIGITS) != checksum.encode():
                raise ValueError(f"{path} is damaged: its checksum does not fit")
            return
    _verify_tensors(path)


def _verify_tensors(path: Path) -> None:
    """Checks a delta of format 1 by the checksum of its tensors."""
    content = path.read_bytes()
    try:
        tensors = safetensors.torch.load(content)
        good = safetensors.torch.save(tensors) == content and torch.equal(
            tensors["checksum"], scripted_function(checksum_of_format_1)(tensors)
        )
    except (SafetensorError, KeyError, RuntimeError) as error:
        raise ValueError(f"{path} is not a delta, or it is damaged: {error}") from error
    if not good:
        raise ValueError(f"{path} is not a delta, or it is damaged: its checksum does not fit")


def _header(file: BinaryIO) -> bytes:
    file.seek(0)
    size = int.from_bytes(file.read(8), "little")
    return file.read(min(size, 100_000_000))  # safetensors' own limit


def _place_of_checksum(header: bytes) -> int | None:
    """Returns the position of the checksum's digits in a delta."""
    found = re.search(rb'"' + _DELTA_KEY.encode() + rb'":"\d{4} (?=[0-9a-f]{16}")', header)
    return None if found is None else 8 + found.end()


def _checksum(file: BinaryIO, size: int, place: int | None = None) -> str:
    """Computes the checksum of the first ``size`` bytes, with zeros in the place of the checksum's digits."""
    file.seek(0)
    block = bytearray(_BLOCK_BYTES)
    after, state = scripted_function(checksum_after), torch.zeros(1, dtype=torch.int64)
    for begin in range(0, size, _BLOCK_BYTES):
        view = memoryview(block)[: min(_BLOCK_BYTES, size - begin)]
        if file.readinto(view) != len(view):  # type: ignore[attr-defined]
            raise ValueError(f"{file.name} has become shorter while it was read")
        for byte in range(max(begin, place or 0), min(begin + len(view), (place or 0) + _DIGITS)) if place else ():
            view[byte - begin] = ord("0")
        state = after(state, torch.frombuffer(view, dtype=torch.uint8))
    return str(scripted_function(hexadecimal)(state))
