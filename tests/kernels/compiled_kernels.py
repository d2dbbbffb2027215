"""Compiles the kernels of a CUDA device without one, and reads what they consist of."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from torchrec_recstore.kernels.device_kernels import TritonKernels

ARCHITECTURES = {"sm_80": 80, "sm_90a": 90, "sm_100a": 100}
"""The compute capability of each architecture."""

_TYPES = {
    torch.float32: "*fp32",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_FLOATING_POINT = re.compile(r"\s([a-z][a-z0-9_.]*\.(?:f16|f32|f64|bf16)[a-z0-9_.]*)\s")


@dataclass(frozen=True)
class Launch:
    """A kernel as it is compiled for one launch."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, int | None], ...]
    warps: int


@dataclass(frozen=True)
class Binary:
    """What ptxas says of a kernel, and its floating-point instructions."""

    registers: int
    spilled_bytes: int
    instructions: frozenset[str]


class RecordedKernels(TritonKernels):
    """Notes the launches, and runs none of them."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        arguments: Sequence[Tensor | int | None],
        *,
        warps: int,
        compile_only: bool = False,
        **constants: int,
    ) -> None:
        all_constants: dict[str, int | None] = dict(constants)
        signature = {}
        for name, argument in zip(kernel.arg_names, arguments, strict=False):
            if argument is None:
                all_constants[name] = None
            elif isinstance(argument, Tensor):
                signature[name] = _TYPES[argument.dtype]
            else:
                signature[name] = "i32"
        for name in all_constants:
            signature[name] = "constexpr"
        recorded = Launch(
            kernel=kernel,
            signature=tuple((name, signature[name]) for name in kernel.arg_names),
            constants=tuple(all_constants.items()),
            warps=warps,
        )
        if recorded not in self.launches:
            self.launches.append(recorded)


@cache
def compiled(launch: Launch, architecture: str) -> Binary:
    """Compiles a launch, and assembles it.

    Steps of different optimizers share most of their kernels, which are compiled once.
    """
    names = [name for name, _ in launch.signature]
    constants = {(names.index(name),): value for name, value in launch.constants}
    source = ASTSource(
        fn=launch.kernel, signature=dict(launch.signature), constexprs=constants
    )
    options = {"num_warps": launch.warps, "enable_fp_fusion": False}
    target = GPUTarget("cuda", ARCHITECTURES[architecture], 32)
    ptx = triton.compile(source, target=target, options=options).asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [_ptxas(), "-v", "--gpu-name", architecture, str(path)]
        done = subprocess.run(
            [*command, "-o", str(path) + ".cubin"],
            capture_output=True,
            text=True,
            check=True,
        )
    registers = re.findall(r"Used (\d+) registers", done.stderr)
    spilled = re.findall(r"(\d+) bytes spill", done.stderr)
    return Binary(
        registers=int(registers[0]),
        spilled_bytes=sum(map(int, spilled)),
        instructions=frozenset(_FLOATING_POINT.findall(ptx)),
    )


def _ptxas() -> str:
    """Returns the newest assembler that Triton brings."""
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    return str(max(folder.glob("ptxas*")))
