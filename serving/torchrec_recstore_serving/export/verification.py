"""Computes and checks the checksums of served files and models.

TorchScript compiles the functions that compute checksums, so that a served model can
check itself.
"""

from __future__ import annotations

import hmac
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrec_recstore.encoding import not_known
from torchrec_recstore_serving.export.native_library import load_library
from torchrec_recstore_serving.export.signing import (
    Key,
    damaged,
    key_at,
    no_signature,
    wrong_signature,
)

FORMAT = 1
"""The number of the format of exported models and deltas."""

Kind = Literal["export", "package", "delta"]

_BLOCK_BYTES = 1 << 19
"""The block size of :func:`checksum_after`.

Data that is passed in several calls is split at multiples of it.
"""

_ZIP_COMMENTS = {
    "export": b"recstore export %04d " % FORMAT,
    "package": b"recstore package %04d " % FORMAT,
}
"""What stands before the checksum in the comment of a zip file: an exported model, or a
package of AOTInductor.
"""

_SIGNATURE = "recstore signature"
_DIGITS = 16
_SIGNATURE_DIGITS = 64
_COMMENT_BYTES = len(_ZIP_COMMENTS["package"]) + _DIGITS  # at most
_SIGNATURE_BYTES = len(_SIGNATURE) + 1 + _SIGNATURE_DIGITS + 1
_NO_DIGITS = b"0" * _DIGITS
# The signature of the last record of a zip file: 22 bytes, and then the comment.
_END = b"PK\x05\x06"
_END_BYTES = 22

_ZIP = re.compile(
    _END
    + rb".{18}(?:recstore signature [0-9a-f]{64} )?recstore (export|package) (\d{4})"
    rb" [0-9a-f]{16}\Z",
    re.DOTALL,
)
_DELTA = re.compile(rb'"recstore (delta)":"(\d{4}) [0-9a-f]{16}"')
_ZIP_SIGNATURE = re.compile(
    _END + rb".{18}recstore signature ([0-9a-f]{64}) ",
    re.DOTALL,
)
_DELTA_SIGNATURE = re.compile(rb'"recstore signature":"([0-9a-f]{64})"')


def delta_metadata(key: Key | None) -> dict[str, str]:
    """Returns the entries of a delta's header.

    Zeros are in the places of the checksum and the signature: see :func:`sign`.
    """
    entries = {"recstore delta": f"{FORMAT:04d} {_NO_DIGITS.decode()}"}
    if key is not None:
        entries[_SIGNATURE] = "0" * _SIGNATURE_DIGITS
    return entries


compiling = threading.RLock()
"""Held while TorchScript compiles: the classes and functions that it knows belong to
the whole process.
"""


def scripted_function(function: Callable[..., Any]) -> Any:
    """Compiles a function with TorchScript, in the first call."""
    with compiling:
        return _scripted_function(function)


@cache
def _scripted_function(function: Callable[..., Any]) -> Any:
    return torch.jit.script(function)


def hexadecimal_checksum(tensors: dict[str, Tensor]) -> str:
    """Returns :func:`checksum_of` tensors in 16 hexadecimal digits.

    The compiled functions compute it.
    """
    checksum = scripted_function(checksum_of)(tensors)
    return str(scripted_function(hexadecimal)(checksum))


def compile_checksums() -> None:
    """Compiles the functions of checksums.

    A thread that is started later then compiles nothing.
    """
    for function in (checksum_after, checksum_of, hexadecimal):
        scripted_function(function)


def checksum_after(state: Tensor, data: Tensor) -> Tensor:
    """Updates a checksum with the bytes of ``data``.

    Each word of eight bytes is mixed with its position by an invertible function. So a
    change of one word always changes the checksum, and any other change does so with a
    probability of 1 - 2**-64.

    Args:
        state: (1,) int64. The checksum of the data before ``data``. It is 0 at the
            beginning.
        data: (N,) of any data type. The data.

    Returns:
        (1,) int64. The new checksum.
    """
    block_bytes = 1 << 19
    longest = min(block_bytes, data.shape[0] * data.element_size())
    # 2**64 over the golden ratio
    factors = torch.arange(1, longest // 8 + 2) * -7046029254386353131
    elements = block_bytes // data.element_size()
    for first in range(0, data.shape[0], elements):
        # TorchScript confuses view(dtype) with view(size).
        block = data[first : first + elements].cpu()
        part = torch.view_copy(block, dtype=torch.uint8)
        padded = F.pad(part, [0, -part.shape[0] % 8])
        words = torch.view_copy(padded, dtype=torch.int64)
        mixed = words.add_(factors[: words.shape[0]])
        # MurmurHash3's
        mixed.bitwise_xor_((mixed >> 32).bitwise_and_(0xFFFFFFFF))
        mixed.mul_(-49064778989728563)
        mixed.bitwise_xor_((mixed >> 29).bitwise_and_(0x7FFFFFFFF))
        mixed.mul_(-4265267296055464877)
        mixed.bitwise_xor_((mixed >> 32).bitwise_and_(0xFFFFFFFF))
        state = state * 6364136223846793005
        state = state + mixed.sum() + part.shape[0]
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
        digit = int(((checksum >> shift) & 15).item())
        text += digits[digit]
    return text


def checksum_of_strings(strings: list[str]) -> str:
    """Computes the checksum of a list of strings, in 16 hexadecimal digits."""
    codes: list[int] = []
    for string in strings:
        for char in string:
            codes.append(ord(char))
        codes.append(-1)
    state = torch.zeros(1, dtype=torch.int64)
    return hexadecimal(checksum_after(state, torch.tensor(codes)))


def check_file_bytes(file: Tensor) -> None:
    """Compares the bytes of an exported file with the checksum at its end.

    Args:
        file: (N,) uint8. All bytes of the file.

    Raises:
        ValueError: The checksum is wrong.
    """
    digits = 16
    written = ""
    last_bytes = file[-digits:].to(torch.int64)
    codes: list[int] = last_bytes.tolist()
    for code in codes:
        written += chr(code)
    state = torch.zeros(1, dtype=torch.int64)
    computed = hexadecimal(checksum_after(state, file[:-digits]))
    if computed != written:
        raise ValueError("the file is damaged: its checksum does not fit")


def verify(path: str | Path, *, key: str | Path | None = None) -> None:
    """Compares an exported model, a package or a delta with its checksum.

    With a key, also compares it with its signature.

    The file's tensors and code are not loaded. ``torch.jit.load`` does not check a
    file, and loads files with flipped bits. So a server should call this function, or,
    if this package is not installed, the method ``verify`` of the served model with the
    bytes of the file.

    A checksum shows damage, but everyone can compute it. A model that is loaded runs
    code of its file. If others can write the file, verify and load a copy that they
    cannot write.

    Args:
        path: A file that ``export_for_inference``, ``export_checkpoint``,
            ``export_delta`` or ``export_checkpoint_delta`` has written, or a package to
            which ``sign_package`` has added a checksum.
        key: The file of the key with which the file must have been signed. Default:
            None, the signature is not checked.

    Raises:
        OSError: The file or the key cannot be read.
        ValueError: The file is damaged, or it is of another format; or with ``key``, it
            has no signature or the one of another key.
    """
    with Path(path).open("rb") as file:
        check_file(file, str(path), key_at(key))


def check_file(
    file: BinaryIO,
    name: str,
    key: Key | None,
    on_block: Callable[[], object] = lambda: None,
) -> None:
    """Compares a file with its checksum and its signature; see :func:`verify`.

    Args:
        file: The file.
        name: The name of the file in errors.
        key: The key. None: the signature is not checked.
        on_block: A callback that is called after each block of the file. Its error ends
            the check.

    Raises:
        OSError: The file cannot be read.
        ValueError: The checksum or the signature is wrong or missing, or the file is of
            another format.
    """
    places = _places(file, name)
    if key is not None and places.signature is None:
        raise no_signature(name, key)
    checksum, signature = _digests(file, places, name, key, on_block)
    if key is not None:
        written = _digits(file, places.signature, _SIGNATURE_DIGITS)
        if not hmac.compare_digest(signature, written):
            raise wrong_signature(name, key, signature.decode())
    if checksum != _digits(file, places.checksum, _DIGITS):
        raise damaged(
            f"{name} is damaged: its checksum does not fit",
            checksum.decode(),
        )


def kind_of(path: str | Path) -> Kind:
    """Returns whether a file is an exported model, a package or a delta.

    The checksum is not compared.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is none of them, or it is of another format.
    """
    with Path(path).open("rb") as file:
        return _places(file, str(path)).kind


def sign_zip(
    path: Path,
    key: Key | None = None,
    *,
    kind: Literal["export", "package"] = "export",
    name: str | None = None,
) -> None:
    """Appends the checksum to a zip file of torch, as its comment.

    Args:
        path: The file.
        key: The key with which the file is signed. The signature is in the comment,
            too. Default: None, no signature.
        kind: What the file is. Default: ``"export"``.
        name: The name of the file in errors. Default: None, the path.

    Raises:
        OSError: The file cannot be written.
        ValueError: The file is no zip file, or has a comment.
    """
    comment = _ZIP_COMMENTS[kind] + _NO_DIGITS
    if key is not None:
        signature = f"{_SIGNATURE} {'0' * _SIGNATURE_DIGITS} "
        comment = signature.encode() + comment
    with path.open("r+b") as file:
        end = b""
        if file.seek(0, os.SEEK_END) >= _END_BYTES:
            file.seek(-_END_BYTES, os.SEEK_END)
            end = file.read()
        if not end.startswith(_END):  # torch writes zip files without a comment (2.13)
            raise ValueError(
                f"{path if name is None else name} is no zip file as torch writes it"
            )
        file.seek(-2, os.SEEK_END)
        file.write(len(comment).to_bytes(2, "little") + comment)
    sign(path, key)


def remove_comment(path: Path) -> None:
    """Removes what :func:`sign_zip` has appended to a file.

    Nothing happens if it has appended nothing.

    Raises:
        OSError: The file cannot be written.
    """
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        first = max(0, size - _END_BYTES - _COMMENT_BYTES - _SIGNATURE_BYTES)
        file.seek(first)
        appended = _ZIP.search(file.read())
        if appended is None:
            return
        end = first + appended.start() + _END_BYTES
        file.seek(end - 2)
        file.write(bytes(2))
        file.truncate(end)


def sign(path: Path, key: Key | None = None) -> None:
    """Replaces the zeros in the places of the signature and of the checksum.

    Raises:
        OSError: The file cannot be written.
    """
    with path.open("r+b") as file:
        places = _places(file, str(path))
        if key is not None:  # The checksum is also one of the signature.
            assert places.signature is not None
            _, signature = _digests(file, places, str(path), key)
            file.seek(places.signature)
            file.write(signature)
        checksum, _ = _digests(file, places, str(path), None)
        file.seek(places.checksum)
        file.write(checksum)


@dataclass(frozen=True)
class _Places:
    """The kind of a file, and the positions of its digits.

    Args:
        kind: Whether the file is an exported model, a package or a delta.
        checksum: The position of the checksum.
        signature: The position of the signature. None: the file has none.
    """

    kind: Kind
    checksum: int
    signature: int | None


def _places(file: BinaryIO, name: str) -> _Places:
    """Finds the digits in the header of a delta, or in the comment of a zip file."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    begin = file.read(9)
    header_bytes = int.from_bytes(begin[:8], "little")
    if begin[8:] == b"{" and not begin.startswith(b"PK"):
        pattern = _DELTA
        signature_pattern = _DELTA_SIGNATURE
        offset = 8
    else:
        pattern = _ZIP
        signature_pattern = _ZIP_SIGNATURE
        offset = max(0, size - _END_BYTES - _COMMENT_BYTES - _SIGNATURE_BYTES)
    file.seek(offset)
    # safetensors' own limit of a header
    searched = file.read(min(header_bytes, 100_000_000))
    checksum = pattern.search(searched)
    if checksum is None:
        raise ValueError(
            f"{name} is neither an exported model nor a delta, or it is damaged: it has"
            " no checksum (sign_package adds one to a package of AOTInductor)"
        )
    file_format = int(checksum[2])
    if file_format != FORMAT:
        raise ValueError(not_known(f"{name} has the format {file_format}"))
    kind: Kind = checksum[1].decode()  # type: ignore[assignment]
    signature = signature_pattern.search(searched)
    return _Places(
        kind=kind,
        checksum=offset + checksum.end(2) + 1,
        signature=None if signature is None else offset + signature.start(1),
    )


def _digits(file: BinaryIO, place: int | None, count: int) -> bytes:
    assert place is not None
    file.seek(place)
    return file.read(count)


def _digests(
    file: BinaryIO,
    places: _Places,
    name: str,
    key: Key | None,
    on_block: Callable[[], object] = lambda: None,
) -> tuple[bytes, bytes]:
    """Computes the checksum and the signature of a file with zeros in their places.

    Zeros stand in the place of the checksum for both, except that digits at the end are
    left out. Zeros stand in the place of the signature for the signature. Without a
    key, the signature is that of nothing.
    """
    place = places.checksum
    size = file.seek(0, os.SEEK_END)
    if place + _DIGITS == size:
        size = place
    file.seek(0)
    block = bytearray(_BLOCK_BYTES)
    update = _checksum_function()
    state = torch.zeros(1, dtype=torch.int64)
    signing = None
    if key is not None:
        signing = key.begin(f"{places.kind} {place} {places.signature}")
    for begin in range(0, size, _BLOCK_BYTES):
        view = memoryview(block)[: min(_BLOCK_BYTES, size - begin)]
        if file.readinto(view) != len(view):  # type: ignore[attr-defined]
            raise ValueError(f"{name} has become shorter while it was read")
        _zero(view, begin, place, _DIGITS)
        state = update(state, torch.frombuffer(view, dtype=torch.uint8))
        if signing is not None and places.signature is not None:
            _zero(view, begin, places.signature, _SIGNATURE_DIGITS)
            signing.update(view)
        on_block()
    signature = b"" if signing is None else signing.hexdigest().encode()
    return str(scripted_function(hexadecimal)(state)).encode(), signature


def _checksum_function() -> Callable[[Tensor, Tensor], Tensor]:
    """Returns :func:`checksum_after` for the bytes of a file.

    The library computes it fifty times as fast, but a process that serves models with a
    sorted index need not have it.
    """
    # A process may have loaded the library by its path.
    if not hasattr(torch.ops.recstore, "checksum_after"):
        try:
            load_library()
        except (ImportError, OSError):
            return scripted_function(checksum_after)  # type: ignore[no-any-return]
    return torch.ops.recstore.checksum_after


def _zero(view: memoryview, begin: int, place: int, count: int) -> None:
    for byte in range(max(begin, place), min(begin + len(view), place + count)):
        view[byte - begin] = ord("0")
