"""Checksums that TorchScript computes too, so that a served model can check itself where this package is not.

The functions here are always run as TorchScript, where the characters of a string are its bytes and a data type is its
number. docs/serving.md describes what they compute.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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
