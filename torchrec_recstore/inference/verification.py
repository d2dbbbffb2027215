"""Checksums of served files and models. TorchScript computes them too, so that a served model can check itself."""

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

BLOCK_BYTES = 1 << 19
"""What :func:`checksum_after` takes at a time: data that comes in several calls is cut at multiples of it."""


@cache
def scripted_function(function: Callable[..., Any]) -> Any:
    """A function of this module as TorchScript."""
    return torch.jit.script(function)


def checksum_after(state: Tensor, data: Tensor) -> Tensor:
    """The checksum of all that came before and of the bytes of ``data``.

    Words of eight bytes are mixed with their place, in a way that can be undone: a change of one word always changes
    the checksum, and any other change with a probability of 1 - 2**-64.

    Args:
        state: (1,) int64: the checksum of what came before; zero at the beginning.
        data: (N,) of any data type.
    """
    block_bytes = 1 << 19
    longest = min(block_bytes, data.shape[0] * data.element_size())
    factors = torch.arange(1, longest // 8 + 2) * -7046029254386353131  # 2**64 over the golden ratio
    elements = block_bytes // data.element_size()
    for first in range(0, data.shape[0], elements):
        # TorchScript takes view(dtype) for view(size).
        part = torch.view_copy(data[first : first + elements].cpu(), dtype=torch.uint8)
        words = torch.view_copy(F.pad(part, [0, -part.shape[0] % 8]), dtype=torch.int64)
        mixed = words.add_(factors[: words.shape[0]])
        mixed.bitwise_xor_((mixed >> 32).bitwise_and_(0xFFFFFFFF)).mul_(-49064778989728563)  # MurmurHash3's
        mixed.bitwise_xor_((mixed >> 29).bitwise_and_(0x7FFFFFFFF)).mul_(-4265267296055464877)
        mixed.bitwise_xor_((mixed >> 32).bitwise_and_(0xFFFFFFFF))
        state = state * 6364136223846793005 + mixed.sum() + part.shape[0]
    return state


def checksum_of(tensors: dict[str, Tensor]) -> Tensor:
    """What changes with any bit of tensors, their names, data types or shapes.

    Args:
        tensors: by name; one called ``checksum`` is left out.

    Returns:
        (1,) int64.
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
    """Sixteen digits of a (1,) int64."""
    digits = "0123456789abcdef"
    text = ""
    for shift in range(60, -4, -4):
        text += digits[int(((checksum >> shift) & 15).item())]
    return text


def checksum_of_strings(strings: list[str]) -> str:
    """Of several strings and their order."""
    codes: list[int] = []
    for string in strings:
        for char in string:
            codes.append(ord(char))
        codes.append(-1)
    return hexadecimal(checksum_after(torch.zeros(1, dtype=torch.int64), torch.tensor(codes)))


def check_file_bytes(file: Tensor) -> None:
    """Compares the bytes of an exported file with the checksum at its end.

    Args:
        file: (N,) uint8.

    Raises:
        ValueError: they differ.
    """
    digits = 16
    written = ""
    codes: list[int] = file[-digits:].to(torch.int64).tolist()
    for code in codes:
        written += chr(code)
    if hexadecimal(checksum_after(torch.zeros(1, dtype=torch.int64), file[:-digits])) != written:
        raise ValueError("the file is damaged: its checksum does not fit")


def checksum_of_format_1(tensors: dict[str, Tensor]) -> Tensor:
    """The checksum of a delta that models of format 1 take; arguments as for :func:`checksum_of`."""
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
