"""Builds and calls limit.cpp, which gathers and scatters rows by known slots.

This is the limit of the machine.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from measure import lane
from torch import Tensor

_SOURCE = Path(__file__).with_suffix(".cpp")


@cache
def _library() -> ctypes.CDLL:
    # The library is not written next to the source, which may belong to an installed
    # package.
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "limit.so")
        command = [
            "g++",
            "-std=c++17",
            "-O3",
            "-march=native",
            "-shared",
            "-fPIC",
            "-fopenmp",
        ]
        if lane() == "avx2":
            command.append("-mno-avx512f")
        command += [str(_SOURCE), "-o", str(library)]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(library))


def _call(
    name: str,
    rows: Tensor,
    slots: Tensor,
    values: Tensor,
) -> None:
    function = getattr(_library(), name)
    function.restype = ctypes.c_bool
    has_loop = function(
        ctypes.c_void_p(rows.data_ptr()),
        ctypes.c_void_p(slots.data_ptr()),
        ctypes.c_int64(slots.numel()),
        ctypes.c_int64(rows.shape[1]),
        ctypes.c_void_p(values.data_ptr()),
        ctypes.c_int(torch.get_num_threads()),
    )
    if not has_loop:
        raise ValueError(f"limit.cpp has no loop for {rows.shape[1]} columns")


def empty(*shape: int) -> Tensor:
    """Returns an uninitialized float32 tensor in huge pages."""
    tensor = torch.empty(*shape)
    _library().use_huge_pages(
        ctypes.c_void_p(tensor.data_ptr()), ctypes.c_int64(tensor.nbytes)
    )
    return tensor


def gather(rows: Tensor, slots: Tensor, out: Tensor) -> None:
    """Computes ``out[i] = rows[slots[i]]``, with slots (n,) int32 and out (n, columns)
    float32.
    """
    _call("gather", rows, slots, out)


def scatter(rows: Tensor, slots: Tensor, grad: Tensor) -> None:
    """Computes ``rows[slots[i]] -= grad[i]``, with slots (n,) int32 and grad (n,
    columns) float32.
    """
    _call("scatter", rows, slots, grad)
