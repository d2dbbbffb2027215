"""The kernels of a CUDA device, compiled by Triton without one.

They run with the Triton that is installed. torch 2.12.1 brings Triton 3.7.1, and torch
2.14.1 Triton 3.8.
"""

from __future__ import annotations

from itertools import cycle, product

import pytest
import torch

from tests.kernels.device_cases import OPTIMIZERS
from tests.kernels.device_work import Arena, Case, Tables, settings_of
from tests.kernels.test_device_kernels import plain_lookup

pytest.importorskip("triton", reason="Triton is not installed")

from tests.kernels.compiled_kernels import (
    ARCHITECTURES,
    Launch,
    RecordedKernels,
    compiled,
)

ALLOWED = {
    # each rounds once, to nearest
    "add.rn.f32",
    "sub.rn.f32",
    "mul.rn.f32",
    "div.rn.f32",
    "sqrt.rn.f32",
    "cvt.rn.f16.f32",
    "cvt.rn.f32.s32",
    "cvt.rn.f32.s64",
    "cvt.rn.f32.u64",
    # the same, for two numbers at a time (Blackwell)
    "add.rn.f32x2",
    "sub.rn.f32x2",
    "mul.rn.f32x2",
    # each is exact
    "abs.f32",
    "cvt.f32.f16",
    "neg.f32",
    "selp.f32",
    "setp.eq.f32",
    "setp.gt.f32",
    "setp.lt.f32",
    "setp.neu.f32",
}
"""The floating-point instructions that give the bits of the host.

No ``fma``, no ``.ftz``, and no ``.approx`` is among them.
"""
MOST_REGISTERS = 96
"""A multiprocessor then runs 20 warps and more."""

_NARROW = {"stochastic": True, "weighted": True, "nonfinite": "skip"}
_BOUNDS = [OPTIMIZERS["row_wise_adagrad_bounds"]]
CASES: dict[str, Case] = {
    name: Case([optimizer], columns=64) for name, optimizer in OPTIMIZERS.items()
} | {
    "3 columns": Case(_BOUNDS, columns=3),
    "128 columns": Case(_BOUNDS, columns=128),
    "1024 columns": Case(_BOUNDS, columns=1024),
    "1024 columns of LAMB": Case([OPTIMIZERS["lamb"]], columns=1024),
    "float16": Case(
        _BOUNDS,
        columns=64,
        dtype=torch.float16,
        grad_dtype=torch.bfloat16,
        pooling="mean",
        **_NARROW,  # type: ignore[arg-type]
    ),
    "bfloat16": Case(
        _BOUNDS,
        columns=64,
        dtype=torch.bfloat16,
        grad_dtype=torch.float16,
        **_NARROW,  # type: ignore[arg-type]
    ),
}
ON_ALL = [name for name in CASES if name not in OPTIMIZERS]
ON_ONE = list(zip(OPTIMIZERS, cycle(ARCHITECTURES), strict=False))
"""An optimizer and its architecture: the kernels of all optimizers have one source, and
what an architecture makes of it is in the cases of ``ON_ALL``.
"""


def launches_of(case: Case) -> list[Launch]:
    """Returns the kernels of a training step."""
    kernels = RecordedKernels()
    tables = Tables(case)
    Arena(tables, kernels).step(tables.batch(0), settings=settings_of(tables))
    return kernels.launches


def check(launch: Launch, architecture: str) -> None:
    binary = compiled(launch, architecture)
    assert binary.instructions <= ALLOWED, binary.instructions - ALLOWED
    assert binary.spilled_bytes == 0
    assert binary.registers <= MOST_REGISTERS


def test_kernels_of_a_usual_table() -> None:
    launches = launches_of(CASES["row_wise_adagrad"])
    names = {launch.kernel.__name__ for launch in launches}
    assert names == {"_pool", "_locate", "_check_finite", "_sum_hot", "_update"}
    for launch in launches:
        check(launch, "sm_90a")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "architecture"), [*ON_ONE, *product(ON_ALL, ARCHITECTURES)]
)
def test_kernels_of_a_step(name: str, architecture: str) -> None:
    for launch in launches_of(CASES[name]):
        check(launch, architecture)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_of_plain_lookups(architecture: str) -> None:
    kernels = RecordedKernels()
    plain_lookup(kernels)
    names = {launch.kernel.__name__ for launch in kernels.launches}
    assert {"_gather", "_scatter", "_weight_gradients"} <= names
    for launch in kernels.launches:
        check(launch, architecture)
