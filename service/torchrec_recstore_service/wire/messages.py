"""Messages of the protocol as bytes, whose arrays are written and read where they lie.

The messages with large arrays have fields of bytes and of messages only. protobuf would
copy each array several times.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

_FILLER = b"\x7a\x00"  # an empty field 15, which no message has
_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype = ctypes.py_object
_new_bytes.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t]
_address = ctypes.pythonapi.PyBytes_AsString
_address.restype = ctypes.c_void_p
_address.argtypes = [ctypes.py_object]


def new_message(
    arrays: Sequence[tuple[int, int]],
    header: bytes = b"",
) -> tuple[bytes, list[Tensor]]:
    """Makes a message whose arrays the caller fills before it uses the message.

    Args:
        arrays: The number of the field and the size in bytes of each array.
        header: The content of the field 1, if the message has a header. Default: b"",
            for a message without one.

    Returns:
        The message, and the memory of each array, (size,) uint8, aligned to 4 bytes.
        The caller keeps the message for as long as it uses the memory.
    """
    prefix = b""  # what stands before the next array
    if header:
        prefix = _prefix(1, len(header), 0) + header
    prefixes = []
    end = 0
    for number, size in arrays:
        prefix += _prefix(number, size, end + len(prefix))
        prefixes.append((end, prefix))
        end += len(prefix) + size
        prefix = b""

    message: bytes = _new_bytes(None, end + len(prefix))
    address = _address(message)
    # of a message without arrays, which is its header
    ctypes.memmove(address + end, prefix, len(prefix))
    memory = []
    for (begin, array_prefix), (_, size) in zip(prefixes, arrays, strict=True):
        target = address + begin
        ctypes.memmove(target, array_prefix, len(array_prefix))
        array = _memory(target + len(array_prefix), size)
        memory.append(array)
    return message, memory


def _prefix(number: int, size: int, place: int) -> bytes:
    """Returns what stands at ``place`` before an array of ``size`` bytes, so that the
    array is aligned to 4 bytes.
    """
    least_width = max(1, -(-size.bit_length() // 7))
    for filler in (b"", _FILLER):
        # a number may be written with more bytes than it needs
        for width in range(least_width, 6):
            if (place + len(filler) + 1 + width) % 4 == 0:
                tag = number << 3 | 2
                return filler + bytes([tag]) + _varint(size, width)
    raise AssertionError(
        "two bytes of filler and one byte of width reach every alignment"
    )


def _varint(number: int, width: int) -> bytes:
    """Returns a number in ``width`` bytes of 7 bits, low bits first.

    All bytes but the last one have the bit 0x80.
    """
    digits = bytearray(number >> 7 * i & 0x7F for i in range(width))
    for i in range(width - 1):
        digits[i] |= 0x80
    return bytes(digits)


def fields(message: bytes) -> dict[int, Tensor]:
    """Returns the memory of each field, (size,) uint8, by the number of the field.

    It must not be changed.

    The caller keeps the message for as long as it uses the memory.

    Raises:
        ValueError: The message has another form.
    """
    content_of: dict[int, Tensor] = {}
    address = _address(message)
    position = 0
    end = len(message)
    while position < end:
        tag = message[position]
        size = 0
        width = 0  # of the size, in bytes
        while tag & 0x87 == 2 and width < 5 and position + 1 + width < end:
            digit = message[position + 1 + width]
            size |= (digit & 0x7F) << 7 * width
            width += 1
            if digit < 0x80:
                break
        else:
            raise ValueError("the message is not one of the protocol")
        position += 1 + width
        if position + size > end:
            raise ValueError("the message is not one of the protocol")
        content_of[tag >> 3] = _memory(address + position, size)
        position += size
    return content_of


def content(field: Tensor | None) -> bytes:
    """Returns a copy of a field as bytes.

    None stands for a field that the message does not have.
    """
    if field is None:
        return b""
    return field.numpy().tobytes()


def _memory(address: int, size: int) -> Tensor:
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    content = (ctypes.c_char * size).from_address(address)
    return torch.frombuffer(content, dtype=torch.uint8)
