"""Whether this machine has a CUDA device and FBGEMM's kernels for it, and the copies in
a trace of ``torch.profiler``.

The benchmark ``cuda.py`` and the tests of ``tests/cuda`` use this module.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

STEPS = "recstore steps"
"""The annotation of the steps in a trace. Waits are counted within it."""

Interval = tuple[float, float]


def no_device() -> str | None:
    """Returns the reason why nothing can run on CUDA here, or None."""
    return None if torch.cuda.is_available() else "no CUDA device"


def no_fbgemm() -> str | None:
    """Returns the reason why TorchRec's sharded modules cannot run on CUDA here, or
    None.
    """
    if reason := no_device():
        return reason
    missing = "FBGEMM's CUDA build is not installed"
    try:
        import fbgemm_gpu  # noqa: F401  (it registers its operators)
        import torchrec  # noqa: F401
    except (ImportError, OSError):
        return missing
    has = torch._C._dispatch_has_kernel_for_dispatch_key(
        "fbgemm::asynchronous_complete_cumsum", "CUDA"
    )
    return None if has else missing


@dataclass(frozen=True)
class Copies:
    """The copies of one direction: the bytes of each, and how many of them use memory
    that is not pinned.
    """

    sizes: list[int]
    pageable: int


@dataclass(frozen=True)
class Timeline:
    """The copies and waits in a trace.

    Args:
        up: The copies from the host to the device.
        down: The copies from the device to the host.
        overlap: The share of the time of the copies in which a kernel runs on the
            device. None: there are no copies. Kernels of NCCL are not counted.
        waits: How often the host waits for the device within the annotation
            :data:`STEPS`, by the name of the call, for example
            ``cudaEventSynchronize``.
    """

    up: Copies
    down: Copies
    overlap: float | None
    waits: dict[str, int]


def traced(steps: Callable[[], None], device: torch.device) -> Timeline:
    """Runs training steps under ``torch.profiler`` and returns their timeline.

    Args:
        steps: Runs the steps.
        device: The device of the steps. A trace of the CPU has no copies.
    """
    on_cuda = device.type == "cuda"
    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    ) as profiler:
        with record_function(STEPS):
            steps()
        synchronize(device)  # after the annotation: it is no wait of the steps
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return timeline(json.loads(path.read_text())["traceEvents"])


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timeline(events: list[dict[str, Any]]) -> Timeline:
    """Returns the timeline of the events of a Chrome trace.

    Source: the categories and names that Kineto writes (torch 2.13,
    ``kineto/libkineto/src/output_json.cpp``).
    """
    events = [event for event in events if event.get("ph") == "X"]
    of = {
        way: [
            each
            for each in events
            if each.get("cat") == "gpu_memcpy" and f" {way} " in each["name"]
        ]
        for way in ("HtoD", "DtoH")
    }
    kernels = _union(
        [
            _interval(e)
            for e in events
            if e.get("cat") == "kernel" and "nccl" not in e["name"].lower()
        ]
    )
    copies = [_interval(each) for way in of.values() for each in way]
    copying = sum(end - begin for begin, end in copies)
    hidden = sum(
        max(0.0, min(end, k[1]) - max(begin, k[0]))
        for begin, end in copies
        for k in kernels
    )
    ranges = [
        _interval(each)
        for each in events
        if each.get("cat") == "user_annotation" and each["name"] == STEPS
    ]
    waits: dict[str, int] = {}
    for each in events:
        within = any(begin <= each["ts"] <= end for begin, end in ranges)
        if (
            within
            and each.get("cat") in ("cuda_runtime", "cuda_driver")
            and "Synchronize" in each["name"]
        ):
            waits[each["name"]] = waits.get(each["name"], 0) + 1
    return Timeline(
        _copies(of["HtoD"]),
        _copies(of["DtoH"]),
        hidden / copying if copying else None,
        waits,
    )


def _interval(event: dict[str, Any]) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _copies(events: list[dict[str, Any]]) -> Copies:
    return Copies(
        [int(each["args"]["bytes"]) for each in events],
        sum("Pageable" in each["name"] for each in events),
    )


def _union(intervals: list[Interval]) -> list[Interval]:
    """Returns the intervals in ascending order, with those that touch joined."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined
