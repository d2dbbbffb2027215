"""Computes and checks the checksums of served files and models.

TorchScript compiles the functions that compute checksums, so that a served model can check itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrec_recstore.encoding import not_known

FORMAT = 1
"""The number of the format of exported models and deltas."""

Kind = Literal["export", "delta"]

_BLOCK_BYTES = 1 << 19
"""The block size of :func:`checksum_after`. Data that is passed in several calls is split at multiples of it."""

_EXPORT = b"recstore export %04d " % FORMAT
_DIGITS = 16
_COMMENT_BYTES = len(_EXPORT) + _DIGITS
_NO_DIGITS = b"0" * _DIGITS
_END = b"PK\x05\x06"  # The signature of the last record of a zip file: 22 bytes, and then the comment.
_END_BYTES = 22

DELTA_METADATA = {"recstore delta": f"{FORMAT:04d} {_NO_DIGITS.decode()}"}
"""The entry of a delta's header, with zeros in the place of the checksum; see :func:`sign`."""

_PATTERNS = {
    "export": re.compile(_END + rb".{18}recstore export (\d{4}) [0-9a-f]{16}\Z", re.DOTALL),
    "delta": re.compile(rb'"recstore delta":"(\d{4}) [0-9a-f]{16}"'),
}


class DamagedError(ValueError):
    """The bytes of a file are not those that were written. The message names the file.

    Args:
        message: The message.
        contents: A checksum of the bytes.
    """

    def __init__(self, message: str, contents: str) -> None:
        super().__init__(message)
        self.contents = contents


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


def verify(path: str | Path) -> None:
    """Reads an exported model or a delta and compares the file with its checksum.

    The file's tensors and code are not loaded. ``torch.jit.load`` does not check a file, and loads files with flipped
    bits. So a server should call this function, or, if this package is not installed, the method ``verify`` of the
    served model with the bytes of the file.

    Args:
        path: A file that ``export_for_inference``, ``export_checkpoint``, ``export_delta`` or
            ``export_checkpoint_delta`` has written.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is damaged, or it is of another format.
    """
    check_file(Path(path), str(path))


def check_file(path: Path, name: str, on_block: Callable[[], object] = lambda: None) -> None:
    """Compares a file with its checksum; see :func:`verify`.

    Args:
        path: The file.
        name: The name of the file in errors.
        on_block: A callback that is called after each block of the file. Its error ends the check.

    Raises:
        OSError: The file cannot be read.
        DamagedError: The checksum is wrong.
        ValueError: The file has no checksum, or it is of another format.
    """
    with path.open("rb") as file:
        _, place = _kind_and_place(file, name)
        checksum = _checksum(file, place, name, on_block)
        file.seek(place)
        if file.read(_DIGITS) != checksum:
            raise DamagedError(f"{name} is damaged: its checksum does not fit", checksum.decode())


def kind_of(path: str | Path) -> Kind:
    """Returns whether a file is an exported model or a delta. The checksum is not compared.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is neither of them, or it is of another format.
    """
    with Path(path).open("rb") as file:
        return _kind_and_place(file, str(path))[0]


def sign_export(path: Path) -> None:
    """Appends the checksum to a zip file that ``torch.jit.save`` has written, as the comment of the zip file.

    Raises:
        OSError: The file cannot be written.
    """
    with path.open("r+b") as file:
        file.seek(-_END_BYTES, os.SEEK_END)
        end = file.read()
        assert end.startswith(_END), "torch writes zip files without a comment (2.13)"
        file.seek(-2, os.SEEK_END)
        file.write(_COMMENT_BYTES.to_bytes(2, "little") + _EXPORT + _NO_DIGITS)
    sign(path)


def sign(path: Path) -> None:
    """Replaces the zeros in the place of the checksum by the checksum.

    Raises:
        OSError: The file cannot be written.
    """
    with path.open("r+b") as file:
        _, place = _kind_and_place(file, str(path))
        checksum = _checksum(file, place, str(path))
        file.seek(place)
        file.write(checksum)


def _kind_and_place(file: BinaryIO, name: str) -> tuple[Kind, int]:
    """Returns whether a file is an exported model or a delta, and the position of the checksum's digits."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    begin = file.read(9)
    kind: Kind = "delta" if begin[8:] == b"{" and not begin.startswith(b"PK") else "export"
    first = 8 if kind == "delta" else max(0, size - _END_BYTES - _COMMENT_BYTES)
    file.seek(first)
    searched = file.read(min(int.from_bytes(begin[:8], "little"), 100_000_000))  # safetensors' own limit of a header
    found = _PATTERNS[kind].search(searched)
    if found is None:
        raise ValueError(f"{name} is neither an exported model nor a delta, or it is damaged: it has no checksum")
    if int(found[1]) != FORMAT:
        raise ValueError(not_known(f"{name} has the format {int(found[1])}"))
    return kind, first + found.end(1) + 1


def _checksum(file: BinaryIO, place: int, name: str, on_block: Callable[[], object] = lambda: None) -> bytes:
    """Computes the checksum of a file with zeros in the place of its digits, or without them if they are at the end."""
    size = file.seek(0, os.SEEK_END)
    size = place if place + _DIGITS == size else size
    file.seek(0)
    block = bytearray(_BLOCK_BYTES)
    after, state = scripted_function(checksum_after), torch.zeros(1, dtype=torch.int64)
    for begin in range(0, size, _BLOCK_BYTES):
        view = memoryview(block)[: min(_BLOCK_BYTES, size - begin)]
        if file.readinto(view) != len(view):  # type: ignore[attr-defined]
            raise ValueError(f"{name} has become shorter while it was read")
        for byte in range(max(begin, place), min(begin + len(view), place + _DIGITS)):
            view[byte - begin] = ord("0")
        state = after(state, torch.frombuffer(view, dtype=torch.uint8))
        on_block()
    return str(scripted_function(hexadecimal)(state)).encode()
