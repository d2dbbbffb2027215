"""The measurement of ``cuda.py``.

Each side is interleaved with the dense part alone, and then traced.
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
from accelerator_sides import SIDES, Shape, dense_alone
from device import Copies, no_device, no_fbgemm, synchronize, traced
from figures import CUDA, cuda_figures, markdown
from measure import clock, emit, spread

DEVICE_ROWS = ("device_1", "device_10", "device_100")
TORCH_ALONE = ("kernel", *DEVICE_ROWS, "eager")
UNIFIED = ("fused_uvm", "fused_uvm_caching")


def not_here(side: str, device: torch.device) -> str | None:
    """Returns the reason why a side cannot run here, or None."""
    if side in DEVICE_ROWS and device.type == "cpu":
        return "there is no device for the rows"
    if side in TORCH_ALONE:
        return None
    if find_spec("torchrec") is None:
        return "TorchRec is not installed"
    if device.type == "cuda":
        return no_fbgemm()
    return "unified memory needs CUDA" if side in UNIFIED else None


def block(
    step: Callable[[int], None],
    steps: int,
    device: torch.device,
) -> float:
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
    name: str,
    arguments: argparse.Namespace,
    device: torch.device,
) -> dict[str, Any]:
    """Returns the figures of one side."""
    gc.collect()  # the tables of the side before
    shape = Shape(
        tables=arguments.tables,
        dim=arguments.dim,
        batch_size=arguments.batch_size,
        rows=arguments.rows,
        device=device,
        has_zipf_ids=arguments.zipf,
    )
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    step = SIDES[name](shape)
    dense = dense_alone(shape)
    block(step, 2 * shape.batches, device)
    block(dense, 2 * shape.batches, device)
    step_s = []
    dense_s = []
    for _ in range(arguments.rounds):
        step_s.append(block(step, arguments.steps, device))
        dense_s.append(block(dense, arguments.steps, device))
    over_dense = []
    for seconds, alone_s in zip(step_s, dense_s, strict=True):
        over_dense.append(seconds / alone_s)

    def steps() -> None:
        for i in range(arguments.steps):
            step(i)

    timeline = traced(steps, device)

    device_bytes = None
    if device.type == "cuda":
        device_bytes = torch.cuda.max_memory_allocated(device)
    return {
        "step_ms": spread(step_s),
        "dense_ms": spread(dense_s),
        "step_over_dense_alone": round(spread(over_dense, 1)["median"], 3),
        "device_bytes": device_bytes,
        "up": _copies_per_step(timeline.up, arguments.steps),
        "down": _copies_per_step(timeline.down, arguments.steps),
        "overlap": timeline.overlap,
        "waits": _per_step(timeline.waits, arguments.steps),
    }


def _per_step(counts: dict[str, int], steps: int) -> dict[str, float]:
    rounded = {}
    for key, count in counts.items():
        rounded[key] = round(count / steps, 1)
    return rounded


def _copies_per_step(copies: Copies, steps: int) -> dict[str, float]:
    counts = {
        "count": len(copies.sizes),
        "bytes": sum(copies.sizes),
        "pageable": copies.pageable,
    }
    return _per_step(counts, steps)


def _parser(about: str | None) -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device",
        default="cuda",
        choices=("cuda", "cpu"),
        help="cpu: test the script",
    )
    parser.add_argument("--sides", default=",".join(SIDES), help="the sides to measure")
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=8192)
    parser.add_argument(
        "--rows",
        type=int,
        default=1_000_000,
        help="the rows of each table",
    )
    parser.add_argument(
        "--zipf",
        action="store_true",
        help="ids with Zipf's distribution, 1.05",
    )
    parser.add_argument("--steps", type=int, default=10, help="the steps of a round")
    parser.add_argument("--rounds", type=int, default=12)
    return parser


def main(about: str | None) -> int:
    """Measures the sides that can run here.

    Returns the exit status: 1 if there is no device, or if a side failed.
    """
    parser = _parser(about)
    arguments = parser.parse_args()
    sides = arguments.sides.split(",")
    for side in sides:
        if side not in SIDES:
            parser.error(f"there is no side {side!r}: {', '.join(SIDES)}")
    device = torch.device(arguments.device)
    device_name = "cpu: a test, not a measurement"
    if device.type == "cuda":
        reason = no_device()
        if reason is not None:
            print(
                f"error: {reason} (--device cpu tests this script without one)",
                file=sys.stderr,
            )
            return 1
        device_name = torch.cuda.get_device_name()
    rows = []
    for side in sides:
        row = {
            "benchmark": "cuda",
            "device": device_name,
            "side": side,
            "tables": arguments.tables,
            "dim": arguments.dim,
            "batch_size": arguments.batch_size,
            "rows": arguments.rows,
            "zipf": arguments.zipf,
        }
        reason = not_here(side, device)
        if reason is not None:
            row["not_measured"] = reason
        else:
            if side not in TORCH_ALONE:
                _join_group(device)
            try:
                row |= measure(side, arguments, device)
            except Exception as error:
                # One side that fails does not lose the figures of the others.
                row["error"] = f"{type(error).__name__}: {error}"
        emit(row)
        rows.append(row)
    print(f"{device_name}, torch {torch.__version__}")
    print()
    print("\n".join(markdown(CUDA, cuda_figures(rows))))
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
