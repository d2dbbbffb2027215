"""The measurement of ``cuda.py``: each side is interleaved with the dense part alone,
and then traced.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerator_sides import BATCHES, SIDES, Shape, dense_alone
from device import no_device, no_fbgemm, synchronize, traced
from figures import CUDA, cuda_figures, markdown
from measure import clock, emit, spread

TORCH_ALONE = ("kernel", "eager")
UNIFIED = ("fused_uvm", "fused_uvm_caching")


def not_here(side: str, device: torch.device) -> str | None:
    """Returns the reason why a side cannot run here, or None."""
    if side in TORCH_ALONE:
        return None
    if find_spec("torchrec") is None:
        return "TorchRec is not installed"
    if device.type == "cuda":
        return no_fbgemm()
    return "unified memory needs CUDA" if side in UNIFIED else None


def block(step: Callable[[int], None], steps: int, device: torch.device) -> float:
    """Runs steps and returns the seconds of one of them.

    The device is waited for only at the end.
    """
    synchronize(device)
    begin = clock()
    for i in range(steps):
        step(i)
    synchronize(device)
    return (clock() - begin) / steps


def measure(
    name: str, arguments: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """Returns the figures of one side."""
    gc.collect()  # the tables of the side before
    shape = Shape(
        arguments.tables, arguments.dim, arguments.batch_size, arguments.rows, device
    )
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    step, dense = SIDES[name](shape), dense_alone(shape)
    for each in (step, dense):
        block(each, 2 * BATCHES, device)
    times = [
        [block(each, arguments.steps, device) for each in (step, dense)]
        for _ in range(arguments.rounds)
    ]

    def steps() -> None:
        for i in range(arguments.steps):
            step(i)

    seen = traced(steps, device)

    def of_a_step(**counts: int) -> dict[str, float]:
        return {key: round(count / arguments.steps, 1) for key, count in counts.items()}

    copies = {
        way: of_a_step(
            count=len(each.sizes), bytes=sum(each.sizes), pageable=each.pageable
        )
        for way, each in (("up", seen.up), ("down", seen.down))
    }
    return {
        "step_ms": spread([time for time, _ in times]),
        "dense_ms": spread([time for _, time in times]),
        "step_over_dense_alone": round(
            spread([time / alone for time, alone in times], 1)["median"], 3
        ),
        "device_bytes": (
            torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        ),
        **copies,
        "overlap": seen.overlap,
        "waits": of_a_step(**seen.waits),
    }


def main(about: str | None) -> int:
    """Measures the sides that can run here.

    Returns the exit status: 1 if there is no device, or if a side failed.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", default="cuda", choices=("cuda", "cpu"), help="cpu: test the script"
    )
    parser.add_argument("--sides", default=",".join(SIDES), help="the sides to measure")
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=8192)
    parser.add_argument(
        "--rows", type=int, default=1_000_000, help="the rows of each table"
    )
    parser.add_argument("--steps", type=int, default=10, help="the steps of a round")
    parser.add_argument("--rounds", type=int, default=12)
    arguments = parser.parse_args()
    asked = arguments.sides.split(",")
    if unknown := [side for side in asked if side not in SIDES]:
        parser.error(f"there is no side {unknown[0]!r}: {', '.join(SIDES)}")
    device = torch.device(arguments.device)
    if device.type == "cuda" and (reason := no_device()):
        print(
            f"error: {reason} (--device cpu tests this script without one)",
            file=sys.stderr,
        )
        return 1
    rows = []
    for side in asked:
        row = {
            "benchmark": "cuda",
            "device": (
                torch.cuda.get_device_name()
                if device.type == "cuda"
                else "cpu: a test, not a measurement"
            ),
            "side": side,
            **{
                key: getattr(arguments, key)
                for key in ("tables", "dim", "batch_size", "rows")
            },
        }
        if reason := not_here(side, device):
            row["not_measured"] = reason
        else:
            if side not in TORCH_ALONE:
                _join_group(device)
            try:
                row |= measure(side, arguments, device)
            except (
                Exception
            ) as error:  # one side that fails does not lose the figures of the others
                row["error"] = f"{type(error).__name__}: {error}"
        emit(row)
        rows.append(row)
    print(
        "\n".join(
            [
                f"{rows[0]['device']}, torch {torch.__version__}",
                "",
                *markdown(CUDA, cuda_figures(rows)),
            ]
        )
    )
    sys.stdout.flush()
    # the shutdown of gloo sometimes aborts (torch 2.13)
    os._exit(int(any("error" in row for row in rows)))


def _join_group(device: torch.device) -> None:
    import torch.distributed as dist

    if not dist.is_initialized():
        backends = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group(
                backends,
                init_method=f"file://{Path(folder) / 'store'}",
                rank=0,
                world_size=1,
            )
